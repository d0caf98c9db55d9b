"""The prefix cache stores what was computed for one prompt, for all prompts that begin alike. No mlx."""
