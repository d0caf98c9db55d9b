"""mlxrun: a declarative server and batch runner over MLX language and vision models."""

__version__ = "0.1.0"
