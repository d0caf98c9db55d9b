"""Makes a Linux process look to mlxrun and its tests like a Mac whose GPU refuses to compute.

What mlxrun and tests read below /proc and /sys is not there, `sys.platform` is darwin, and Metal is available
but computes nothing. Other packages see Linux: on a Mac they have their own ways. This file imports nothing
of the repository, as it runs in every process that tests start.
"""

from __future__ import annotations

import builtins
import io
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

VARIABLE = "TEST_PRETEND_MAC"
_HIDDEN = ("/proc", "/sys")
_OWN = ("mlxrun", "tests", "benchmarks")
# They decide by the platform how memory of this very process is laid out, and which library to load.
_REAL = ("mlxrun.cli.interrupts", "mlxrun.model.machine.blas", "tests.helpers.child_start")
_PASSED_ON = {"pathlib", "genericpath", "posixpath", "os", "io", "shutil", "codecs", __name__}


class _Darwin(ModuleType):
    """The module sys, of another platform. A test may name a third one."""

    def __getattribute__(self, name: str) -> Any:
        if name == "platform":
            return super().__getattribute__("__dict__").get(name, "darwin")
        return getattr(sys, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "platform":
            super().__setattr__(name, value)
        else:
            setattr(sys, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(sys, name)


def pretend_mac() -> None:
    """Call it before mlxrun is imported."""
    for module, name in (
        (builtins, "open"),
        (io, "open"),
        *((os, name) for name in ("open", "stat", "lstat", "listdir", "scandir", "readlink", "access")),
    ):
        setattr(module, name, _hide(getattr(module, name)))
    darwin = _Darwin("sys")

    def refine(module: Any, caller: str) -> Any:
        is_own = _is_of(caller, _OWN) and not _is_of(caller, _REAL)
        return darwin if module is sys and is_own else module

    _after_import(refine)
    subprocess.run = _answer_vm_stat(subprocess.run)  # type: ignore[assignment]
    _when_mlx_is_there(_offer_metal)


def use_cpu() -> None:
    """Let MLX compute on the CPU, once it is imported."""
    _when_mlx_is_there(lambda mx: mx.set_default_device(mx.cpu))


def _is_of(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == each or module.startswith(f"{each}.") for each in packages)


def _find_caller() -> str:
    """The first module in the stack that is not a layer of the standard library over files."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name not in _PASSED_ON:
            return str(name)
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _hide(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, for which there is no /proc if mlxrun or a test calls it."""

    def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(path, int):
            name = os.fsdecode(path)
            if name.startswith(_HIDDEN) and _is_of(_find_caller(), _OWN):
                if getattr(function, "__name__", "") == "access":
                    return False
                raise FileNotFoundError(2, "No such file or directory", name)
        return function(path, *args, **kwargs)

    return call


def _answer_vm_stat(usual: Callable[..., Any]) -> Callable[..., Any]:
    """`subprocess.run`, for which there is the `vm_stat` of macOS."""

    def run(command: Any, *args: Any, **kwargs: Any) -> Any:
        if command != ("/usr/bin/vm_stat",):
            return usual(command, *args, **kwargs)
        size, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_AVPHYS_PAGES")
        text = f"Mach Virtual Memory Statistics: (page size of {size} bytes)\nPages free: {pages}.\n"
        return subprocess.CompletedProcess(command, 0, text, "")

    return run


def _after_import(refine: Callable[[Any, str], Any]) -> None:
    """Let `refine` replace what an import statement of a module, whose name it gets, has found."""
    usual = builtins.__import__

    def load(name: str, globals: Any = None, *args: Any, **kwargs: Any) -> Any:
        return refine(usual(name, globals, *args, **kwargs), (globals or {}).get("__name__", ""))

    builtins.__import__ = load  # type: ignore[assignment]


def _when_mlx_is_there(change: Callable[[Any], None]) -> None:
    """Call `change(mlx.core)`, as soon as an import statement has loaded it."""
    done = False

    def refine(module: Any, caller: str) -> Any:
        nonlocal done
        mx = sys.modules.get("mlx.core")
        spec = getattr(mx, "__spec__", None)  # None of a stand-in for the library
        if not done and spec is not None and not getattr(spec, "_initializing", False):
            done = True
            change(mx)
        return module

    if "mlx.core" in sys.modules:
        change(sys.modules["mlx.core"])
    else:
        _after_import(refine)


def _offer_metal(mx: Any) -> None:
    """Metal is available, as mlxrun sees it. What it would compute raises, as there is none."""
    real, real_metal = mx.is_available, mx.metal.is_available

    def is_available(device: Any) -> bool:
        return _is_of(_find_caller(), ("mlxrun",)) or bool(real(device))

    def is_metal_available() -> bool:
        return _is_of(_find_caller(), ("mlxrun",)) or bool(real_metal())

    mx.is_available, mx.metal.is_available = is_available, is_metal_available
