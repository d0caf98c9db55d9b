"""Models that transcribe sound, by mlx-audio."""
