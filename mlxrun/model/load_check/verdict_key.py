"""Computes the key of a kept verdict: a digest of all that the load check's result depends on.

These are every byte of the model, the source of mlxrun, the libraries, the device and the settings. The
variables of the environment count by which libraries compute. What is not surely the same has another key.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import mlxrun
from mlxrun.config.setting_fields import to_plain
from mlxrun.config.settings import Config
from mlxrun.model.load.model_digests import digest_large_files, list_model_files
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.machine.device import describe_device, uses_cuda
from mlxrun.model.machine.versions import list_library_versions

FORMAT = 2  # of kept verdicts
_SECTIONS = ("model", "engine", "scheduler", "cache", "prefill", "speculation")
# Where files are, when they are written, and what things are called: digests say what is in them.
# By the memory limit only the form of weights is chosen, which the verdict has.
_LEFT_OUT = (
    ("model", "path"),
    ("model", "names"),
    ("cache", "disk_path"),
    ("cache", "intervals_only"),
    ("engine", "load_check"),
    ("scheduler", "memory_limit"),
)
_LIBRARIES = ("mlx", "mlx_lm", "mlx_vlm")
# The variables by which BLAS, compilers, GPUs and loaders of libraries compute otherwise.
_VARIABLES = (
    *("MLX_", "METAL_", "MTL_", "CUDA_", "CUBLAS", "CUDNN", "NVIDIA_", "NCCL_"),
    *("OPENBLAS_", "GOTO_", "BLIS_", "MKL_", "VECLIB_", "OMP_", "GOMP_", "KMP_"),
    *("LD_", "DYLD_", "GLIBC_"),
)
_VARYING = ("free_memory",)  # facts about a device that change by the second
_DRIVER = Path("/proc/driver/nvidia/version")


def compute_key(config: Config, info: LoadedModelInfo) -> str:
    """The key (hex) of the verdict of a model, with a config whose values of the device are filled in."""
    parts = {
        "format": FORMAT,
        "mlxrun": digest_source(),
        "libraries": describe_libraries(),
        "model": describe_model(config, info),
        "device": describe_computer(config),
        "variables": list_variables(os.environ),
        "settings": describe_settings(config),
    }
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def describe_model(config: Config, info: LoadedModelInfo) -> dict[str, Any]:
    """Digests that cover every byte of the model's files."""
    return {
        "digests": {name: info.digests[name] for name in ("model", "tokenizer", "template")},
        "large": digest_large_files(list_model_files(config.model, info.folder)),
        "processor": info.processor_digest.hex(),
        "adapters": [(lora.name, lora.digest) for lora in info.adapters],
        "kind": (info.vision, info.context_length),
    }


@functools.cache
def digest_source() -> str:
    """A digest of the source of mlxrun, and of its kernels."""
    root, found = Path(mlxrun.__file__).parent, hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.h")]):
        content = path.read_bytes()
        found.update(f"{path.relative_to(root)}:{len(content)}:".encode() + content)
    return found.hexdigest()


def describe_libraries() -> dict[str, Any]:
    """The versions of the libraries, and sizes and times of the files of those that compute. So a library
    that was changed in place is another one."""
    stamps = hashlib.sha256()
    for name in _LIBRARIES:
        for line in _list_stamps(name):
            stamps.update(f"{line}\n".encode())
    return {"versions": list_library_versions() | _list_cuda_versions(), "files": stamps.hexdigest()}


def _list_stamps(package: str) -> Iterator[str]:
    spec = importlib.util.find_spec(package)
    for root in sorted(spec.submodule_search_locations or () if spec else ()):
        for folder, inner, names in os.walk(root):
            inner[:] = sorted(name for name in inner if name != "__pycache__")
            for name in sorted(names):
                stat = os.stat(os.path.join(folder, name))
                yield f"{folder}/{name} {stat.st_size} {stat.st_mtime_ns}"


def _list_cuda_versions() -> dict[str, str]:
    """The versions of NVIDIA's libraries and of its driver; empty without such a device."""
    if not uses_cuda():
        return {}
    found = {each.name: each.version for each in metadata.distributions() if each.name.startswith("nvidia")}
    driver = _DRIVER.read_text() if _DRIVER.is_file() else ""
    return found | {"driver": driver}


def describe_computer(config: Config) -> dict[str, Any]:
    """The device, the system and the compiler."""
    facts = {name: fact for name, fact in describe_device(config.engine).items() if name not in _VARYING}
    compiler = shutil.which("g++")
    stamp = None if compiler is None else (os.path.realpath(compiler), os.stat(compiler).st_mtime_ns)
    return {"device": facts, "system": platform.platform(), "compiler": stamp}


def list_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by which libraries compute otherwise."""
    return {name: value for name, value in environ.items() if name.startswith(_VARIABLES)}


def describe_settings(config: Config) -> dict[str, Any]:
    """The settings of the sections that the engine computes by, but for _LEFT_OUT."""
    plain = to_plain(config)
    return {
        section: {key: value for key, value in plain[section].items() if (section, key) not in _LEFT_OUT}
        for section in _SECTIONS
    }
