"""What a run was computed with: versions of the libraries, device, BLAS and its threads.

Two runs whose environments differ may give other bytes, so their answers are not mixed in one output without
`--mixed`. Facts that change no answer (free memory, the version of Python) are recorded and not compared.
Without engine.reproducible and engine.blas_threads, the number of BLAS threads is what the environment made
it: it is named where bytes are compared, and hinders no run, as answers depend on their batch anyway.
"""

from __future__ import annotations

import functools
import importlib.metadata
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

_LIBRARIES = (
    "mlxrun",
    "mlx",
    "mlx-cpu",
    "mlx-cuda-12",
    "mlx-cuda-13",
    "nvidia-cublas-cu12",
    "nvidia-cublas",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvrtc",
    "mlx-lm",
    "mlx-vlm",
    "transformers",
    "tokenizers",
    "numpy",
    "llguidance",
    "pillow",
)
_NOT_COMPARED = ("python",)
# The facts on which results depend (DECISIVE in model/machine/device.py), as messages call them.
_DEVICE = {
    "backend": "the backend",
    "name": "the device",
    "architecture": "the architecture",
    "compile": "compiling (MLX_DISABLE_COMPILE, or g++ on a CPU)",
    "tf32": "TF32 (MLX_ENABLE_TF32)",
    "libc": "the C library",
    "blas": "the BLAS library",
    "blas_version": "the version of BLAS",
    "blas_kernel": "the BLAS kernel (OPENBLAS_CORETYPE)",
    "blas_threads": "the number of BLAS threads (engine.blas_threads)",
}
_THREADS, _FIXED = "blas_threads", "blas_threads_fixed"


def list_versions() -> dict[str, str]:
    """Versions of the libraries that compute the answers, which are not imported for it."""
    return {"python": platform.python_version(), **_read_versions()}


@functools.cache  # all metadata of a package is parsed for it, 5 ms each, and suites ask for each cell
def _read_versions() -> Mapping[str, str]:
    found: dict[str, str] = {}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # run from a source tree, or not needed on this platform
    return found


@dataclass(frozen=True, slots=True)
class RunEnvironment:
    """Versions and device of one run. None: not known, as in files of earlier versions of mlxrun."""

    versions: Mapping[str, str] | None
    device: Mapping[str, Any] | None

    @classmethod
    def parse(cls, found: Mapping[str, Any]) -> RunEnvironment:
        """That of a run, or of a whole manifest of format 1; values of other types count as not known."""
        versions, device = found.get("versions"), found.get("device")
        return cls(
            versions if isinstance(versions, Mapping) else None,
            device if isinstance(device, Mapping) else None,
        )

    def list_differences(self, new: RunEnvironment) -> list[str]:
        """Phrases that name what differs in `new`, such as `mlx is 0.31.0, was 0.30.1`. What one of the two
        does not know is left out."""
        return [*_compare_versions(self.versions, new.versions), *_compare_devices(self.device, new.device)]

    def list_obstacles(self, new: RunEnvironment) -> list[str]:
        """Those differences for which lines of both are not mixed: all but a number of threads that neither
        has fixed."""
        return _without_free_threads(self).list_differences(_without_free_threads(new))


def _compare_versions(old: Mapping[str, str] | None, new: Mapping[str, str] | None) -> Iterator[str]:
    if old is None or new is None:
        return
    for name in old:
        if name in new and name not in _NOT_COMPARED and old[name] != new[name]:
            yield f"{name} is {new[name]}, was {old[name]}"


def _compare_devices(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> Iterator[str]:
    if old is None or new is None:
        return
    for key, name in _DEVICE.items():
        if key in old and key in new and old[key] != new[key]:
            yield f"{name} is {_show(new[key])}, was {_show(old[key])}"


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value or "not known")


def _without_free_threads(found: RunEnvironment) -> RunEnvironment:
    if found.device is None or found.device.get(_FIXED, True):
        return found
    return replace(found, device={key: value for key, value in found.device.items() if key != _THREADS})
