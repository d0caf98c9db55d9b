"""The HTTP handlers, one module for each API. Most define a `SURFACE`."""
