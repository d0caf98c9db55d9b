"""Turns messages into prompt tokens, and answer tokens into text. Nothing here imports mlx."""
