"""The HTTP server: one aiohttp application in front of the engine, one module for each API surface."""
