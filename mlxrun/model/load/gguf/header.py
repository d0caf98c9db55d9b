"""Reads the header of a GGUF file: its metadata, and the name, shape and type of each tensor. No weights.

mx.load reads the same metadata, but only together with all weights, which front ends do not need. It trusts
the file, so lengths and places are checked here.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrun.core.errors import ModelLoadError

_VERSIONS = (2, 3)
# The formats of values by the number of their type; 8 is a string, 9 an array.
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
# The names of types by their number.
_TYPES = dict(
    enumerate(
        (
            *("F32", "F16", "Q4_0", "Q4_1", "4", "5", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q4_K"),
            *("Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S"),
            "IQ4_XS",
        )
    )
)
_TYPES |= {28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}
# Limits of a header, several times those of the largest vocabularies: a file may have terabytes, which cost
# its disk nothing.
_MAX_HEADER = 1 << 26  # bytes
_MAX_ITEMS = 1 << 22  # of all arrays together
_MAX_ENTRIES = 1 << 16  # of the metadata, and of the tensors
# Values and bytes of a block, by type; the types that are read (see architectures.py).
_BLOCKS = {"F32": (1, 4), "F16": (1, 2), "BF16": (1, 2)}
_BLOCKS |= {"Q4_0": (32, 18), "Q4_1": (32, 20), "Q8_0": (32, 34), "Q6_K": (256, 210)}
KEPT_BLOCKS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # and their bits for each value, in MLX
GROUP_SIZE = 32  # values of each of these blocks
_ALIGNMENT = 32  # of tensors, where `general.alignment` does not say


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. `shape` as in MLX, rows first; `type`: its name in GGUF, such as F16 or Q4_0."""

    shape: tuple[int, ...]
    type: str

    @property
    def nbytes(self) -> int:
        """Its bytes in the file; 0 for unsupported types."""
        values, nbytes = _BLOCKS.get(self.type, (1, 0))
        return math.prod(self.shape) // values * nbytes

    def count_loaded_bytes(self, itemsize: int | None) -> int:
        """Its bytes as MLX loads it, with floats of `itemsize` bytes; None: as it makes them. It keeps some
        blocks, with a scale and a bias in float16 of each, and makes float16 of the others."""
        values = math.prod(self.shape)
        if self.type in KEPT_BLOCKS:
            return values * KEPT_BLOCKS[self.type] // 8 + values // GROUP_SIZE * 2 * (itemsize or 2)
        return values * (itemsize or (4 if self.type == "F32" else 2))


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The metadata and the tensors of the file `path`, by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def digest_tokenizer(self) -> str:
        """sha256 (hex) of the metadata that the tokenizer is made of."""
        own = {key: value for key, value in self.metadata.items() if key.startswith("tokenizer.")}
        return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()

    def read(self, key: str, kind: type, default: Any = None) -> Any:
        """The metadata under `key`; `default` if it is absent. ModelLoadError for another type than
        `kind`."""
        value = self.metadata.get(key, default)
        if value is default or (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
            return value
        raise ModelLoadError(f"{self.path}: {key} is {value!r:.60}, which is not a {kind.__name__}")


def read_header(path: Path) -> GgufHeader:
    """Read a file's header. ModelLoadError if it is damaged or not a GGUF file."""
    try:
        if not path.stat().st_size:
            raise ValueError("the file is empty")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(data).read_all(path)
    except (OSError, ValueError, struct.error, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: the header of the GGUF file cannot be read: {error}") from error


class _HeaderReader:
    """Reads values one after the other. ValueError or struct.error for damaged data."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._place = 0
        self._items = 0  # of the arrays so far

    def read_all(self, path: Path) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._place = 4
        (version,) = self._unpack("I")
        if version not in _VERSIONS:
            raise ValueError(f"it has version {version}, where {_VERSIONS} can be read")
        tensors, values = self._unpack("QQ")
        if max(tensors, values) > _MAX_ENTRIES:
            raise ValueError(f"it would have {tensors} tensors and {values} values")
        metadata: dict[str, Any] = {}
        for _ in range(values):
            self._add(metadata, self._read_string(), self._read_value(*self._unpack("I")))
        found: dict[str, GgufTensor] = {}
        places: dict[str, int] = {}
        for _ in range(tensors):
            name, tensor, places[name] = self._read_tensor()
            self._add(found, name, tensor)
        self._check_places(found, places, metadata.get("general.alignment", _ALIGNMENT))
        return GgufHeader(path, metadata, found)

    def _check_places(
        self, tensors: Mapping[str, GgufTensor], places: Mapping[str, int], alignment: Any
    ) -> None:
        """ValueError unless each tensor lies within the file, on no other one. `places`: where they begin,
        counted from the end of the header."""
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r:.60}, which is not a power of 2")
        begin = -(-self._place // alignment) * alignment
        end = 0
        for name in sorted(tensors, key=places.__getitem__):
            tensor, place = tensors[name], places[name]
            values, _ = _BLOCKS.get(tensor.type, (1, 0))
            row = tensor.shape[-1] if tensor.shape else 1
            if row % values:
                raise ValueError(f"{name!r:.100} has rows of {row} values, not whole blocks of {tensor.type}")
            if place < end:
                raise ValueError(f"{name!r:.100} begins inside another tensor")
            end = place + tensor.nbytes
            if place % alignment or begin + end > len(self._data):
                raise ValueError(f"{name!r:.100} does not lie within the file")

    def _add(self, found: dict[str, Any], name: str, value: Any) -> None:
        if name in found:
            raise ValueError(f"it has {name!r:.100} twice")
        found[name] = value

    def _unpack(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{form}")
        return struct.unpack(f"<{form}", self._take(size))

    def _take(self, size: int) -> bytes:
        """The next bytes. ValueError if the file has fewer: a download that broke off."""
        if self._place + size > len(self._data):
            raise ValueError("it ends within its header, so the file is cut")
        if self._place + size > _MAX_HEADER:
            raise ValueError(f"it would have more than {_MAX_HEADER:,} bytes")
        found = self._data[self._place : self._place + size]
        self._place += size
        return found

    def _read_string(self) -> str:
        (size,) = self._unpack("Q")
        return self._take(size).decode("utf-8")

    def _read_value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._read_string()
        if kind == _ARRAY:
            kind, count = self._unpack("IQ")
            self._items += count
            if self._items > _MAX_ITEMS:
                raise ValueError(f"a list of {count} values, and {_MAX_ITEMS:,} are the most of all lists")
            if kind in _FORMATS:
                return list(self._unpack(f"{count}{_FORMATS[kind]}"))
            if kind == _ARRAY:  # which llama.cpp does not read either
                raise ValueError("a list of lists")
            return [self._read_value(kind) for _ in range(count)]
        if kind not in _FORMATS:
            raise ValueError(f"a value of the unknown type {kind}")
        return self._unpack(_FORMATS[kind])[0]

    def _read_tensor(self) -> tuple[str, GgufTensor, int]:
        """The name of the next tensor, what it is, and its place behind the header."""
        name = self._read_string()
        (rank,) = self._unpack("I")
        if not 1 <= rank <= 8:
            raise ValueError(f"{name!r:.100} has {rank} dimensions")
        *shape, kind, place = self._unpack(f"{rank}QIQ")
        if 0 in shape:
            raise ValueError(f"{name!r:.100} has no values")
        return name, GgufTensor(tuple(reversed(shape)), _TYPES.get(kind, f"type {kind}")), place
