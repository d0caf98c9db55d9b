"""The engine's workloads: answers, vectors, transcripts, and the choice of tokens."""
