"""Reads safetensors files, so that errors name the file; the libraries' own often do not."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from mlxrun.errors import ModelLoadError


def read_tensors(path: Path) -> dict[str, mx.array]:
    """The tensors of a safetensors file, which are read when they are used. ModelLoadError if its header is
    damaged, or the file is shorter than it says."""
    try:
        found: dict[str, mx.array] = mx.load(str(path))
    except RuntimeError as error:
        raise ModelLoadError(f"{path}: it is damaged, perhaps an incomplete download: {error}") from error
    return found


def check_tensor_files(folder: Path) -> None:
    """ModelLoadError if a safetensors file in the folder is damaged: for a library that could not load it."""
    for file in sorted(folder.glob("*.safetensors")):
        read_tensors(file)
