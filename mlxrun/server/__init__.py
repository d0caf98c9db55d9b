"""The HTTP server: one aiohttp application before the engine, one module an API surface."""
