"""Models: loading them, checking them, and computing the scheduler's steps. Only this package and cli/bench
import mlx.

OpenBLAS must be in the process before mlx is: see mlxrun.model.machine.blas.
"""

import os

from mlxrun.model.machine.blas import load_blas
from mlxrun.model.machine.memory_limits import prepare_imports
from mlxrun.model.machine.transformers_scan import install_short_scan

prepare_imports()
load_blas()
install_short_scan()
# MLX on CUDA caches few cuDNN plans and CUDA graphs, by shape, and raises if it has to make too many anew.
# Prompts of all lengths need many.
os.environ.setdefault("MLX_CUDA_SDPA_CACHE_SIZE", "2048")
os.environ.setdefault("MLX_CUDA_GRAPH_CACHE_SIZE", "2048")
os.environ.setdefault("MLX_ENABLE_CACHE_THRASHING_CHECK", "0")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found": it is not needed
