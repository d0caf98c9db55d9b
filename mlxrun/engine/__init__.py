"""The engine: a synchronous step, the thread that owns it, and the asyncio client of that thread."""
