"""The only package that imports mlx, mlx_lm and mlx_vlm, besides bench's peers.

OpenBLAS must be in the process before mlx is: see mlxrun.model.machine.blas.
"""

import os

from mlxrun.model.machine.blas import load_blas

load_blas()
# MLX on CUDA keeps cuDNN plans and CUDA graphs by shape, few of them, and raises when it makes too many anew:
# prompts of all lengths are our daily work.
os.environ.setdefault("MLX_CUDA_SDPA_CACHE_SIZE", "2048")
os.environ.setdefault("MLX_CUDA_GRAPH_CACHE_SIZE", "2048")
os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found": it is not needed
