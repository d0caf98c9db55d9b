"""The HTTP handlers, one module for each API; most define a `SURFACE`."""
