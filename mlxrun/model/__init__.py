"""The only package that imports mlx, mlx_lm and mlx_vlm, besides bench's peers.

OpenBLAS must be in the process before mlx is: see mlxrun.model.blas.
"""

from mlxrun.model.blas import load_blas

load_blas()
