"""One record as one file, and back: safetensors, which other tools can read, with a digest over every byte.

    8 bytes  length of the header, little endian
    header   JSON: "__metadata__", whose first entry is "digest"; then the table of tensors
    data     the record's ids (int64), then the payload's tensors in the order of the table

Written here and not by the safetensors package: its functions take raw pointers, differ between versions and
copy everything. A reader believes nothing: what is torn, changed, of another model or version is a BadFile.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from mlxrun.cache.entry import CacheEntry, SerializedPayload, SerializedTensor
from mlxrun.scheduler.step_plan import SnapshotKind

FORMAT = "1"
HEADER_LIMIT = 4 << 20
PEEK_BYTES = 1 << 15  # most headers with their ids, at once
IDS = "ids"
PAYLOAD = "payload."  # before the names of the codec's tensors, so that none is called "ids"
CODEC = "codec."  # the same for its meta
FACTS = {"digest", "format", "root", "key", "parent", "part", "start", "stop", "boundary", "tokens"}
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1}
ITEM_BYTES |= {"U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}

NO_IDS = "it has no token ids"
WRONG_SIZE = "it is shorter or longer than its header says"

_BEFORE = b'{"__metadata__":{"digest":"'
_DIGEST = slice(8 + len(_BEFORE), 8 + len(_BEFORE) + 64)  # in the file
_NO_DIGEST = b"0" * 64

Check = Callable[[CacheEntry], bool]


class BadFile(Exception):
    """This file cannot be used; the text says why."""


def dump(record: CacheEntry, blob: SerializedPayload, root: bytes) -> list[bytes]:
    """The file in pieces: header, then each tensor, which is not copied. ValueError for what cannot be read
    back."""
    ids = record.ids.tobytes()
    tensors = {IDS: SerializedTensor("I64", (len(record.ids),), ids)}
    tensors |= {PAYLOAD + name: tensor for name, tensor in blob.tensors.items()}
    facts = {
        "digest": _NO_DIGEST.decode(),
        "format": FORMAT,
        "root": root.hex(),
        "key": record.key.hex(),
        "parent": record.parent.hex(),
        "part": record.part.value,
        "start": str(record.start),
        "stop": str(record.stop),
        "boundary": "yes" if record.boundary else "no",
        "tokens": _token_digest(ids),
    }
    facts |= {CODEC + name: value for name, value in blob.meta.items()}
    head = _encode(facts, tensors)
    data = [tensor.data for tensor in tensors.values()]
    digest = _file_digest(head, data)
    return [head[: _DIGEST.start] + digest + head[_DIGEST.stop :], *data]


def load(
    source: Path | bytes, root: bytes, *, check: Check | None = None
) -> tuple[CacheEntry, SerializedPayload]:
    """Everything, checked to the last byte. The record has no payload. BadFile, or OSError from the disk."""
    with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
        size = os.fstat(file.fileno()).st_size if isinstance(source, Path) else len(source)
        head = _read_head(file)
        table = _table(head, size)
        data = [_exactly(file, row.nbytes) for row in table]
    if _file_digest(head.raw, data) != head.raw[_DIGEST]:
        _bad("its checksum does not fit: it was changed or damaged")
    record = _record(head.facts, data[0], root, source.stem if isinstance(source, Path) else None, check)
    tensors = {
        row.name.removeprefix(PAYLOAD): SerializedTensor(row.dtype, row.shape, bytes_)
        for row, bytes_ in zip(table[1:], data[1:], strict=True)
    }
    meta = {name.removeprefix(CODEC): text for name, text in head.facts.items() if name.startswith(CODEC)}
    return record, SerializedPayload(tensors, meta)


def peek(path: Path, root: bytes, *, check: Check | None = None) -> tuple[CacheEntry, os.stat_result]:
    """The record, from the header and the ids alone: the payload is not read, so neither it nor its table is
    checked, but that the file is as long as it should be."""
    with path.open("rb", buffering=PEEK_BYTES) as file:
        stat = os.fstat(file.fileno())
        head = _read_head(file)
        name, entry = next(reversed(head.tensors.items()))
        first, end = _ids_row(head), _row(name, entry).end
        if stat.st_size != len(head.raw) + end or first.end > end:
            _bad(WRONG_SIZE)
        ids = _exactly(file, first.nbytes)
    return _record(head.facts, ids, root, path.stem, check), stat


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of the table of tensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class _Head:
    """The part of a file before its data; `raw` begins with the length."""

    raw: bytes
    facts: Mapping[str, str]
    tensors: dict[str, Any]  # by name, as the header says it; at least one


def _encode(facts: Mapping[str, str], tensors: Mapping[str, SerializedTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": facts}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + len(tensor.data)
        if len(tensor.data) != _tensor_bytes(tensor.dtype, tensor.shape):
            raise ValueError(f"{name}: {len(tensor.data)} bytes are no {tensor.dtype} {tensor.shape}")
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)  # as safetensors does: the data is aligned
    if len(text) > HEADER_LIMIT:
        raise ValueError(f"a header of {len(text)} bytes: at most {HEADER_LIMIT}")
    return len(text).to_bytes(8, "little") + text


def _read_head(file: IO[bytes]) -> _Head:
    length = _exactly(file, 8)
    count = int.from_bytes(length, "little")
    if not len(_BEFORE) < count <= HEADER_LIMIT:
        _bad(f"a header of {count} bytes cannot be")
    text = _exactly(file, count)
    if not text.startswith(_BEFORE):
        _bad("its header is not one of mlxrun")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        _bad("its header is not JSON")
    facts = header.pop("__metadata__")
    if not isinstance(facts, dict) or not all(isinstance(value, str) for value in facts.values()):
        _bad("its header has metadata that are no strings")
    if not header:
        _bad(NO_IDS)
    return _Head(length + text, facts, header)


def _table(head: _Head, size: int) -> list[_Row]:
    """The tensors, which follow each other without gaps and fill the file, the ids first."""
    rows = [_ids_row(head)]
    for name, entry in list(head.tensors.items())[1:]:
        row = _row(name, entry)
        if not name.startswith(PAYLOAD) or row.start != rows[-1].end:
            _bad(f"tensor {name} is not where it should be")
        rows.append(row)
    if size != len(head.raw) + rows[-1].end:
        _bad(WRONG_SIZE)
    return rows


def _ids_row(head: _Head) -> _Row:
    row = _row(*next(iter(head.tensors.items())))
    if (row.name, row.dtype, len(row.shape), row.start) != (IDS, "I64", 1, 0):
        _bad(NO_IDS)
    return row


def _row(name: str, entry: Any) -> _Row:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _bad(f"the header's entry of tensor {name} is incomplete")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        _bad(f"tensor {name} has an unknown type")
    if not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        _bad(f"tensor {name} has no proper shape or place")
    row = _Row(name, dtype, tuple(shape), *offsets)
    if row.nbytes != _tensor_bytes(dtype, shape):
        _bad(f"tensor {name} is not as long as its type and shape say")
    return row


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    if dtype not in ITEM_BYTES:
        raise ValueError(f"no type {dtype} in these files")
    return math.prod(shape) * ITEM_BYTES[dtype]


def _record(
    facts: Mapping[str, str], data: bytes, root: bytes, name: str | None, check: Check | None
) -> CacheEntry:
    """The record that the header speaks of, if all it says agrees."""
    if facts.get("format") != FORMAT:
        _bad(f"its format is {facts.get('format')!r}; this version reads {FORMAT!r}")
    if {fact for fact in facts if not fact.startswith(CODEC)} != FACTS:
        _bad("its header lacks something, or has too much")
    if facts["root"] != root.hex():
        _bad("it belongs to another model")
    if name is not None and facts["key"] != name:
        _bad("its name is not its key: it was renamed or swapped")
    if facts["boundary"] not in ("yes", "no"):
        _bad("its header says neither yes nor no to boundary")
    if facts["tokens"] != _token_digest(data):
        _bad("its token ids are not those that its header names")
    try:
        record = CacheEntry(
            key=_unhex(facts["key"]),
            parent=_unhex(facts["parent"]),
            part=SnapshotKind(facts["part"]),
            start=_number(facts["start"]),
            stop=_number(facts["stop"]),
            ids=array("q", data),
            boundary=facts["boundary"] == "yes",
            on_disk=True,
        )
    except ValueError as error:
        _bad(f"its header is wrong: {error}")
    if not record.start < record.stop or record.stop - record.start != len(record.ids):
        _bad(f"{len(record.ids)} token ids are not those of {record.start} to {record.stop}")
    if check is not None and not check(record):
        _bad("its key is not that of its content")
    return record


def _unhex(text: str) -> bytes:
    found = bytes.fromhex(text)
    if found.hex() != text:
        raise ValueError(f"{text!r} is not written as mlxrun does")
    return found


def _number(text: str) -> int:
    found = int(text)
    if str(found) != text or found < 0:
        raise ValueError(f"{text!r} is not written as mlxrun does")
    return found


def _token_digest(ids: bytes) -> str:
    return hashlib.blake2b(ids, digest_size=16).hexdigest()


def _file_digest(head: bytes, data: Iterable[bytes]) -> bytes:
    """Of the whole file, zeros where the digest itself is."""
    found = hashlib.blake2b(head[: _DIGEST.start] + _NO_DIGEST + head[_DIGEST.stop :], digest_size=32)
    for piece in data:
        found.update(piece)
    return found.hexdigest().encode("ascii")


def _exactly(file: IO[bytes], count: int) -> bytes:
    found = file.read(count)
    if len(found) != count:
        _bad("it ends too early")
    return found


def _bad(reason: str) -> NoReturn:
    raise BadFile(reason)
