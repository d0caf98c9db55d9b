"""The emulated GPU, in the place of Metal."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlxrun.model.fused import operations
from mlxrun.model.kv.paged import attention_kernel
from tests.metal.emulator.compiler import OLDEST, find_compiler
from tests.metal.emulator.emulated_kernel import Emulator


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    """Custom Metal kernels run on it, and the attention kernel is the one for Metal."""
    if find_compiler() is None:
        pytest.skip(f"Metal kernels are emulated on Linux, with clang++-19 (or clang++ {OLDEST} and newer)")
    emulator = Emulator()
    monkeypatch.setattr(mx.fast, "metal_kernel", emulator.make_kernel)
    caches = (attention_kernel._compile, operations.compile_kernel)
    for module in (attention_kernel, operations):
        monkeypatch.setattr(module, "get_backend", lambda: "metal")
    for cache in caches:
        cache.cache_clear()
    yield emulator
    for cache in caches:
        cache.cache_clear()
