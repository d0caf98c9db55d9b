"""Text: messages to prompt tokens, and answer tokens to text. Nothing here imports mlx."""
