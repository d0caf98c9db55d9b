"""Custom kernels in tests: made by something else than MLX, and what a compiler reads of their texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.model.fused import operations
from mlxrun.model.hooks import skinny_gemm
from mlxrun.model.kv.paged import attention_kernel

_CACHES = (
    attention_kernel._compile,
    operations.plan_launch,
    operations.compile_kernel,
    skinny_gemm.compile_kernel,
)
_INCLUDED = re.compile(r'^#include "([^"]+)"\n', re.MULTILINE)


@contextmanager
def use_maker(backend: str, make: Callable[..., Any], patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the block, `make` is in the place of MLX's function that makes kernels for this backend, and all
    modules with kernels make those for it."""
    patch.setattr(mx.fast, f"{backend}_kernel", make)
    for module in (attention_kernel, operations, skinny_gemm):
        patch.setattr(module, "get_backend", lambda: backend)
    forget_kernels()
    yield
    forget_kernels()


def forget_kernels() -> None:
    """Kernels are made anew when they are called next."""
    for cache in _CACHES:
        cache.cache_clear()


def expand_files(text: str, folder: Path = Path()) -> str:
    """The text with its included files in place of their lines, without comments of whole lines."""

    def read(found: re.Match[str]) -> str:
        path = folder / found[1]
        return expand_files(path.read_text(encoding="utf-8"), path.parent)

    return re.sub(r"^//.*\n", "", _INCLUDED.sub(read, text), flags=re.MULTILINE)
