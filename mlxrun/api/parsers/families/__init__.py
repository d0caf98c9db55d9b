"""The formats of model families, one record each. The lists are in `tool_calls.py` and `reasoning.py`."""
