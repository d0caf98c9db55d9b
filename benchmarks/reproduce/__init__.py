"""`python -m benchmarks reproduce`: the same lines under conditions that may change no byte of an answer."""
