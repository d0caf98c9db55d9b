"""Loads the system's OpenBLAS before MLX on Linux, where the MLX wheel for CPUs links the reference BLAS.

With RTLD_GLOBAL the loader resolves MLX's `cblas_*` calls to the first library that has them. float32 matrix
products are then some 30 times faster on two cores. `mlxrun.model` calls this before anything imports mlx.

The number of OpenBLAS threads splits a product, and so changes the last digits of its result. It is part of a
computation: `hold_blas_threads` sets it for as long as an engine needs it. Where no engine needs one number,
`follow_free_cores` gives OpenBLAS fewer threads while other processes compute.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mlxrun.core.errors import ConfigError
from mlxrun.core.processes import list_mapped_files
from mlxrun.model.machine.free_cores import FreeCores

log = logging.getLogger(__name__)

NAMES = ("libopenblas.so.0", "libopenblas.so", "libopenblasp.so.0", "libopenblaso.so.0")
OPENMP = 2  # what openblas_get_parallel() returns for a build with OpenMP
loaded_path: str | None = None  # once it is found: libraries stay, and a look at all takes milliseconds
ADVICE = "install OpenBLAS (Debian, Ubuntu: apt install libopenblas0-pthread)"


def load_blas() -> str | None:
    """Load OpenBLAS for all libraries that are loaded later. Returns its path; None if there is none, or if
    mlx was loaded before."""
    if not sys.platform.startswith("linux") or "mlx.core" in sys.modules:
        return None
    for name in _iterate_names():
        try:
            ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        _HELD.watch_cores()
        return find_loaded_blas() or name
    log.debug("no OpenBLAS found: %s", ADVICE)
    return None


def _iterate_names() -> Iterator[str]:
    """Names to try; the search for other names runs programs, so it comes last."""
    yield from NAMES
    found = ctypes.util.find_library("openblas")
    if found is not None:
        yield found


def describe_blas() -> dict[str, Any]:
    """The OpenBLAS in this process: its file name (None: not loaded), its version, the processor of its
    kernels, and its number of threads. Those that `follow_free_cores` takes away count."""
    path = find_loaded_blas()
    if path is None:
        return {"blas": None}
    found: dict[str, Any] = {"blas": Path(path).name}
    library = ctypes.CDLL(path)  # loaded already, so this only counts
    with suppress(AttributeError):
        version = re.search(r"OpenBLAS (\S+)", _read_text(library.openblas_get_config))
        found["blas_version"] = None if version is None else version[1]
        found["blas_kernel"] = _read_text(library.openblas_get_corename)
        is_followed = _HELD.followers and not _HELD.holders
        found["blas_threads"] = _HELD.usual if is_followed else int(library.openblas_get_num_threads())
    return found


def _read_text(function: Any) -> str:
    function.restype = ctypes.c_char_p
    return str(function().decode())


@contextmanager
def hold_blas_threads(count: int | None) -> Iterator[None]:
    """Within the block, compute with `count` threads of OpenBLAS, whatever the environment says; None:
    unchanged. ConfigError if another engine of this process holds another number."""
    path = None if count is None else find_loaded_blas()
    if count is None or path is None:
        yield
        return
    library: Any = ctypes.CDLL(path)
    with _HELD.lock:
        if _HELD.holders and _HELD.count != count:
            raise ConfigError(
                f"engine.blas_threads: another engine of this process computes with {_HELD.count}, so "
                f"this one cannot with {count}; give both the same number"
            )
        if not _HELD.holders:
            _HELD.note_usual(library)
            _set_threads(library, count)
            _HELD.count = count
        _HELD.holders += 1
    try:
        yield
    finally:
        with _HELD.lock:
            _HELD.holders -= 1
            if not _HELD.holders:
                library.openblas_set_num_threads(_HELD.usual)


@contextmanager
def follow_free_cores() -> Iterator[Callable[[], None]]:
    """Within the block, each call of the function adapts the threads of OpenBLAS to other processes.

    They are as many as these have left cores free since the last call, and never more than there were before.
    A call does nothing while engines hold a number. Nor does it where threads have no common number (OpenMP),
    or where the system does not say what others use.
    """
    path = find_loaded_blas()
    library: Any = None if path is None else ctypes.CDLL(path)
    cores = None if library is None else _HELD.watch_cores()
    if cores is None or library.openblas_get_parallel() == OPENMP:
        yield lambda: None
        return
    with _HELD.lock:
        _HELD.note_usual(library)
        _HELD.followers += 1

    def follow() -> None:
        with _HELD.lock:
            free = cores.count()
            if free is None or _HELD.holders:
                return
            count = min(free, _HELD.usual)
            if int(library.openblas_get_num_threads()) != count:
                library.openblas_set_num_threads(count)

    try:
        yield follow
    finally:
        with _HELD.lock:
            _HELD.followers -= 1
            if not _HELD.followers and not _HELD.holders:
                library.openblas_set_num_threads(_HELD.usual)


class _HeldThreads:
    """The number of threads that the engines of this process hold (`count`). `usual`: the number that
    OpenBLAS had before the first of `holders` and `followers` came. It has it again when they have left."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders = self.count = self.followers = self.usual = 0
        self.cores: FreeCores | None = None

    def note_usual(self, library: Any) -> None:
        """Note how many threads OpenBLAS has, unless an engine has changed their number."""
        if not self.holders and not self.followers:
            self.usual = int(library.openblas_get_num_threads())

    def watch_cores(self) -> FreeCores | None:
        """What measures the free cores of this process, since its first call; None where nothing can."""
        if self.cores is None:
            with suppress(OSError, AttributeError, ValueError, IndexError):
                self.cores = FreeCores()
        return self.cores


_HELD = _HeldThreads()


def _set_threads(library: Any, count: int) -> None:
    """ConfigError if products would have another number of threads nevertheless."""
    before = int(library.openblas_get_num_threads())
    library.openblas_set_num_threads(count)
    found = int(library.openblas_get_num_threads())
    if count > 1 and library.openblas_get_parallel() == OPENMP:
        # Each thread has a number of its own there, and MLX computes on one that it has started itself.
        with ThreadPoolExecutor(1) as other:
            found = min(found, other.submit(library.omp_get_max_threads).result())
    if found != count:
        library.openblas_set_num_threads(before)
        raise ConfigError(
            f"engine.blas_threads: OpenBLAS computes with {found} threads here and not with {count}; set it "
            f"to {found}, or install libopenblas0-pthread, or start with OMP_NUM_THREADS={count}"
        )


def find_loaded_blas() -> str | None:
    """The path of the OpenBLAS in this process. Those of NumPy and SciPy do not count, as MLX cannot use
    them."""
    global loaded_path
    if loaded_path is None:
        paths = (path for path in list_mapped_files() if "openblas" in path)
        own = (path for path in paths if "scipy_openblas" not in path and ".libs/" not in path)
        loaded_path = min(own, default=None)
    return loaded_path
