"""What the last digits of results depend on besides model, settings and versions: device, BLAS, compiler."""

from __future__ import annotations

import os
import platform
import shutil
from typing import Any

import mlx.core as mx

from mlxrun.config.settings import EngineSettings
from mlxrun.model.machine.blas import describe_blas
from mlxrun.model.machine.device import get_backend, may_shorten_float32

REPRODUCIBLE_THREADS = 1  # the only number that every machine has
# The facts on which the last digits of results depend.
DECISIVE = (
    *("backend", "name", "architecture", "compile", "tf32", "libc"),
    *("blas", "blas_version", "blas_kernel", "blas_threads"),
)


def choose_blas_threads(settings: EngineSettings) -> int | None:
    """The threads of OpenBLAS that an engine computes with; None: those that there are, nothing is fixed."""
    if settings.blas_threads is None and settings.reproducible:
        return REPRODUCIBLE_THREADS
    return settings.blas_threads


def describe_device(settings: EngineSettings | None = None) -> dict[str, Any]:
    """The device and its backend, with MLX's own names for byte counts, and without serial numbers.
    `settings`: of an engine, whose BLAS threads are then described, and not those of the process."""
    info = {k: v for k, v in mx.device_info(mx.default_device()).items() if k not in ("uuid", "pci_bus_id")}
    name = str(info.pop("device_name", info.get("architecture", "unknown")))
    facts = {"backend": get_backend(), "name": name} | info | {"compile": _compiles()}
    if facts["backend"] != "cpu":
        return facts | {"tf32": may_shorten_float32()}
    facts |= {"libc": " ".join(platform.libc_ver()).strip() or None} | describe_blas()
    if settings is not None and "blas_threads" in facts:
        fixed = choose_blas_threads(settings)
        facts["blas_threads"] = fixed or facts["blas_threads"]
        facts["blas_threads_fixed"] = fixed is not None
    return facts


def describe_rounding(settings: EngineSettings) -> dict[str, Any]:
    """The decisive facts of an engine with these settings."""
    found = describe_device(settings)
    return {key: found[key] for key in DECISIVE if key in found}


def _compiles() -> bool:
    """Whether MLX fuses operations: on a CPU it calls g++ for that, and computes without if there is none."""
    if "MLX_DISABLE_COMPILE" in os.environ:
        return False
    return get_backend() != "cpu" or shutil.which("g++") is not None
