"""The prefix cache: what was computed for one prompt, kept by content, for all that begin alike. No mlx."""
