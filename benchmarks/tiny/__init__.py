"""Tiny models with random weights, for comparing the engine with the libraries."""
