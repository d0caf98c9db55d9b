"""The emulated GPU, in the place of Metal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.custom_kernels import use_maker
from tests.metal.emulator.compiler import OLDEST, find_compiler
from tests.metal.emulator.emulated_kernel import Emulator


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    """Custom Metal kernels run on it."""
    if find_compiler() is None:
        pytest.skip(f"Metal kernels are emulated on Linux, with clang++-19 (or clang++ {OLDEST} and newer)")
    emulator = Emulator()
    with use_maker("metal", emulator.make_kernel, monkeypatch):
        yield emulator
