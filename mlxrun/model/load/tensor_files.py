"""Reads safetensors files, and refuses damaged ones by name. MLX loads many of them without an error.

A header is read before any weight. Its tensors must lie side by side and fill the file, as the format
demands. An overlap, a hole, or an end beyond the file is damage, or an attack. A download is incomplete if an
index names a missing file.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import mlx.core as mx

from mlxrun.core.errors import ModelLoadError
from mlxrun.core.limited_json import load_json, make_object
from mlxrun.model.load.model_files import (
    check_plain_file,
    list_weight_files,
    list_weight_indexes,
    read_json,
)

_MAX_HEADER = 100_000_000  # bytes, as in the format's own library
_METADATA = "__metadata__"
# Bits of a value, by the name of its type; a file with others is left to MLX, which refuses it.
_BITS = {"BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "BF16": 16}
_BITS[f"C{2 * 32}"] = 2 * 32  # a complex number
_BITS |= {f"{kind}{bits}": bits for kind in "UIF" for bits in (8, 16, 32, 64) if (kind, bits) != ("F", 8)}
# What is raised of files that are wrong; a head of no size is divided by.
_OF_FILES = (
    *(OSError, ValueError, LookupError, TypeError, ImportError),
    *(RuntimeError, AttributeError, ArithmeticError, AssertionError),
)
log = logging.getLogger(__name__)


@contextmanager
def name_file_errors(folder: Path) -> Iterator[None]:
    """Within the block, what the libraries or this package raise of wrong files of a model becomes a
    ModelLoadError that names its folder."""
    try:
        yield
    except _OF_FILES as error:
        if isinstance(error, RuntimeError):
            for file in list_weight_files(folder) if folder.is_dir() else ():
                read_tensors(file)  # whose damage the library did not name
        raise ModelLoadError(f"{folder}: {_describe_error(error)}") from error


def _describe_error(error: Exception) -> str:
    """The error, with the library versions if they do not know the model type."""
    text = f"the model cannot be loaded: {type(error).__name__}: {error}"
    if "not supported" in str(error):
        versions = ", ".join(f"{n} {importlib.metadata.version(n)}" for n in ("mlx-lm", "mlx-vlm"))
        text += f" (by {versions})"
    return text


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as the header describes it. `dtype`: its safetensors name; `start` and `stop`: bytes from the
    end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_entries(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name, without their values. ModelLoadError if the header is
    damaged, or does not match the file."""
    check_plain_file(path)
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 8:
                raise ValueError(f"the file has {size} bytes only")
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, _MAX_HEADER):
                raise ValueError(f"its header would have {length} bytes")
            found = load_json(file.read(length), object_pairs_hook=make_object)
        if not isinstance(found, dict):
            raise ValueError("its header is not a JSON object")
        entries = {name: _read_entry(name, value) for name, value in found.items() if name != _METADATA}
        _check_places(entries, size - 8 - length)
    except (OSError, ValueError) as error:
        reason = "the header of the weights cannot be used, perhaps after an incomplete download"
        raise ModelLoadError(f"{path}: {reason}: {str(error) or type(error).__name__}") from error
    return entries


def read_folder_entries(folder: Path) -> dict[str, TensorEntry]:
    """The tensors of all weight files in a folder, as `read_entries`."""
    files = list_weight_files(folder)
    return {name: entry for file in files for name, entry in read_entries(file).items()}


def read_tensors(path: Path) -> dict[str, mx.array]:
    """The tensors of a safetensors file, read lazily. ModelLoadError as `read_entries`."""
    read_entries(path)
    try:
        found: dict[str, mx.array] = mx.load(str(path))
    except RuntimeError as error:
        raise ModelLoadError(f"{path}: it is damaged, perhaps an incomplete download: {error}") from error
    return found


def _read_entry(name: str, value: Any) -> TensorEntry:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and _is_counts(shape) and _is_counts(offsets) and len(offsets) == 2):
        raise ValueError(f"{name!r:.100} has no type, shape and place")
    start, stop = offsets
    bits = _BITS.get(dtype)
    if bits is not None and (stop - start) * 8 != math.prod(shape) * bits:
        raise ValueError(f"{name!r:.100} of shape {shape!r:.60} and type {dtype} has {stop - start} bytes")
    return TensorEntry(dtype, tuple(shape), start, stop)


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    """Whether this is a list of numbers that are not negative."""
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)


def _check_places(entries: Mapping[str, TensorEntry], size: int) -> None:
    """ValueError unless the tensors lie side by side and fill `size` bytes."""
    place = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start < place:
            raise ValueError(f"{name!r:.100} begins inside another tensor")
        if entry.start > place:
            raise ValueError(f"there are {entry.start - place} bytes before {name!r:.100} that are no tensor")
        place = entry.stop
    if place != size:
        raise ValueError(f"its tensors have {place} bytes, and the file has {size}")


def check_shards(folder: Path) -> None:
    """ModelLoadError if an index names a missing file. It is only a warning if the other files have all its
    weights: the libraries do not read the index of another checkpoint."""
    for index in list_weight_indexes(folder):
        places = read_json(index).get("weight_map")
        if not isinstance(places, Mapping):
            continue
        missing = sorted({str(name) for name in places.values() if not (folder / str(name)).is_file()})
        if not missing:
            continue
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        problem = f"{missing[0]}{more}, named in {index.name}, {'are' if more else 'is'} missing"
        if not places.keys() <= read_folder_entries(folder).keys():
            raise ModelLoadError(f"{folder}: {problem}: an incomplete download?")
        log.warning("%s: %s, but the other files have all its weights", folder, problem)
