"""The memory that this process may still take: its limits (`ulimit`), its control groups, and the machine.

A limit of address space also counts reserved space: stacks of threads, and the buffers of BLAS. A failed
allocation crashes MLX and hangs OpenBLAS, so a shortage must be known before. Linux only; elsewhere no limit
is known.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import ModelLoadError
from mlxrun.core.processes import read_output

BLAS_BUFFER = 128 << 20  # bytes that OpenBLAS reserves for each thread that multiplies
STACKS = 64 << 20  # bytes of eight threads' stacks
MACHINE = "this machine"  # the name of its own limit
IMPORTS = 400_000_000  # bytes of address space that MLX, BLAS and the tokenizers take when they are imported
_M_ARENA_MAX, _ARENAS = -8, 2  # of glibc's mallopt
_PROC = Path("/proc/self")
_GROUPS = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_VM_STAT = ("/usr/bin/vm_stat",)
_DROPPABLE = ("Pages free", "File-backed pages", "Pages purgeable")
_LIMITS = (("RLIMIT_AS", "ulimit -v", 0), ("RLIMIT_DATA", "ulimit -d", 5))  # and the place in statm


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """`name`: what has the limit, for messages; `total`: its bytes; `left`: those not in use. `reserves`:
    whether it counts reserved address space."""

    name: str
    total: int
    left: int
    reserves: bool = False

    def describe(self) -> str:
        return f"{self.name} leaves {format_rounded(self.left)} of {format_rounded(self.total)}"


def list_limits() -> list[MemoryLimit]:
    """All limits that are set. The machine's own memory is the last one."""
    return [*list_process_limits(), *_list_group_limits(), *list_machine_limits()]


def find_free_memory(limits: list[MemoryLimit], reserved: int) -> int:
    """The fewest bytes that a limit leaves, 0 if none is known. `reserved`: subtracted where reserved space
    counts."""
    left = [max(1, each.left - reserved) if each.reserves else each.left for each in limits]
    return min(left, default=0)


def count_reserved_bytes(loaded: bool) -> int:
    """Bytes of address space that threads and BLAS will reserve. `loaded`: a loaded model has taken some of
    them."""
    threads = os.cpu_count() or 1
    with suppress(KeyError, ValueError):
        threads = min(threads, int(os.environ["OPENBLAS_NUM_THREADS"]))
    return BLAS_BUFFER * threads + STACKS + (0 if loaded else BLAS_BUFFER + STACKS)


def explain_shortage(needed: int, limits: list[MemoryLimit], reserved: int) -> str | None:
    """The limit that leaves fewer than `needed` bytes, in words; None if there is none. `reserved`:
    additional bytes where reserved space counts."""
    for limit in limits:
        extra = reserved if limit.reserves else 0
        if needed + extra > limit.left:
            space = f" + threads and BLAS {format_rounded(extra)}" if extra else ""
            return f"{space} = {format_rounded(needed + extra)}, but {limit.describe()}"
    return None


def prepare_imports() -> None:
    """Prepare limited address space for MLX's import: all threads share few heaps, each of which would
    reserve 64 MB. ModelLoadError if too little is left."""
    limits = list_process_limits()
    if not limits:
        return
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, _ARENAS)
    if "mlx.core" in sys.modules:
        return
    tight = min(limits, key=lambda each: each.left)
    if tight.left < IMPORTS:
        raise ModelLoadError(
            f"too little memory: {tight.describe()}, and the libraries of models alone take "
            f"{format_rounded(IMPORTS)} of address space"
        )


def list_process_limits() -> list[MemoryLimit]:
    """Those of `ulimit -v` and `ulimit -d`."""
    try:
        import resource

        pages = [int(part) for part in (_PROC / "statm").read_text().split()]
    except (ImportError, OSError, ValueError):  # another system
        return []
    found = []
    for kind, name, place in _LIMITS:
        total = resource.getrlimit(getattr(resource, kind))[0]
        if total != resource.RLIM_INFINITY:
            used = pages[place] * resource.getpagesize()
            found.append(MemoryLimit(name, total, max(0, total - used), reserves=True))
    return found


def _list_group_limits() -> list[MemoryLimit]:
    """Those of the control groups (of either version) that this process is in, and of the groups above."""
    found = []
    for folder, names in _list_groups():
        with suppress(OSError, ValueError):
            limit, used, cached = names
            total = int((folder / limit).read_text())  # "max": none
            pairs = (line.partition(" ")[::2] for line in (folder / "memory.stat").read_text().splitlines())
            # Without files that the group has in memory and would let go.
            taken = int((folder / used).read_text()) - int(dict(pairs).get(cached, 0))
            if total < 1 << 60:  # version 1 has a number for none, too
                name = f"the memory limit of the control group {folder}"
                found.append(MemoryLimit(name, total, max(0, total - taken)))
    return found


def _list_groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The folders of these groups, and the names of what is read there."""
    try:
        lines = (_PROC / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, kinds, path = line.split(":", 2)
        root, names = _GROUPS, ("memory.max", "memory.current", "inactive_file")
        if number != "0":
            if "memory" not in kinds.split(","):
                continue
            root = root / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        folder = root / path.lstrip("/")
        if not folder.is_dir():  # in a container, which sees its own group as the root
            folder = root
        while True:
            yield folder, names
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent


def list_machine_limits() -> list[MemoryLimit]:
    """What the machine has, and what of it is available without swapping."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return _list_mac_limits() if sys.platform == "darwin" else []
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.endswith("kB")}
    if "MemAvailable" not in sizes:
        return []
    return [MemoryLimit(MACHINE, sizes.get("MemTotal", 0), sizes["MemAvailable"])]


def _list_mac_limits() -> list[MemoryLimit]:
    """The same by `vm_stat` of macOS."""
    left = count_available(read_output(*_VM_STAT))
    if left is None:
        return []
    return [MemoryLimit(MACHINE, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), left)]


def count_available(vm_stat: str) -> int | None:
    """Bytes that macOS can give without swapping, by the output of `vm_stat`: free pages, those of files, and
    those that programs have offered. None if the output has no such lines."""
    size = re.search(r"page size of (\d+) bytes", vm_stat)
    pages = dict(re.findall(r"^(.+?):\s+(\d+)\.$", vm_stat, re.MULTILINE))
    if size is None or "Pages free" not in pages:
        return None
    return int(size[1]) * sum(int(pages.get(name, 0)) for name in _DROPPABLE)
