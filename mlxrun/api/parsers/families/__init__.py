"""The formats of model families: one module each, listed in `api/parsers/registry.py`."""
