"""`mlxrun bench engine`: measures the engine beside mlx-lm's BatchGenerator in one process."""
