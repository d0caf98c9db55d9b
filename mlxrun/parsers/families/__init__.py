"""The formats of model families: one module each, listed in `parsers/registry.py`."""
