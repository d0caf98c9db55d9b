"""The engine's workloads: answers, vectors, and the choice of tokens."""
