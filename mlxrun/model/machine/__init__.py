"""The machine that MLX runs on: the device, its memory, BLAS and library versions."""
