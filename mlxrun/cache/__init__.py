"""The prefix cache: what was computed for one prompt, kept by content, for every other that begins like it. No mlx."""
