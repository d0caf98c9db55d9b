"""The only package that imports mlx, mlx_lm and mlx_vlm, besides bench's peers.

OpenBLAS must be in the process before mlx is: see mlxrun.model.blas.
"""

import os

from mlxrun.model.blas import load_blas

load_blas()
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found": it is not needed
