"""One entry as one safetensors file, which other tools can read, with a digest over every byte.

    8 bytes  length of the header, little endian
    header   JSON: "__metadata__", whose first item is "digest"; then the table of tensors
    data     the entry's ids (int64); the logprobs of its tokens (EntryLogprobs.encode), if it has any;
             the payload's tensors in the order of the table

The safetensors package is not used: its functions take raw pointers, differ between versions and copy data.
Every byte is verified. A torn or changed file, or one of another model or version, raises BadFile.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from mlxrun.core.step_plan import SerializedPayload, SerializedTensor, SnapshotKind
from mlxrun.engine.prefix_cache.entry import CacheEntry, compute_entry_key
from mlxrun.engine.prefix_cache.entry_logprobs import EntryLogprobs

FORMAT = "2"
HEADER_LIMIT = 4 << 20
PEEK_BYTES = 1 << 15  # holds most headers with their ids, so that one read is enough
IDS = "ids"
LOGPROBS = "scores"
PAYLOAD = "payload."  # prefix of the codec's tensor names, so that none is called "ids"
CODEC = "codec."  # prefix of the codec's metadata
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1}
ITEM_BYTES |= {"U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}

NO_IDS = "it has no token ids"
WRONG_SIZE = "it is shorter or longer than its header says"

_HEADER_START = b'{"__metadata__":{"digest":"'
_DIGEST = slice(8 + len(_HEADER_START), 8 + len(_HEADER_START) + 64)  # its position in the file
_NO_DIGEST = b"0" * 64


class BadFile(Exception):
    """The file cannot be used; the message says why."""


def encode_entry(entry: CacheEntry, payload: SerializedPayload, fingerprint: bytes) -> list[bytes]:
    """Return the file as its header and the data of each tensor, which is not copied. ValueError if the file
    could not be read back."""
    tensors = {IDS: SerializedTensor("I64", (len(entry.ids),), entry.ids.tobytes())}
    known = entry.logprobs  # read once: the engine thread may replace them
    logprobs = None if known is None else known.encode()
    if logprobs is not None:
        tensors[LOGPROBS] = SerializedTensor("I32", (len(logprobs) // 4,), logprobs)
    tensors |= {PAYLOAD + name: tensor for name, tensor in payload.tensors.items()}
    fields = {"digest": _NO_DIGEST.decode(), **_describe_entry(entry, fingerprint, logprobs)}
    fields |= {CODEC + name: value for name, value in payload.meta.items()}
    header = _encode_header(fields, tensors)
    data = [tensor.data for tensor in tensors.values()]
    digest = hash_file(header, data)
    return [header[: _DIGEST.start] + digest + header[_DIGEST.stop :], *data]


def load_entry(source: Path | bytes, fingerprint: bytes) -> tuple[CacheEntry, SerializedPayload]:
    """Return the entry without its payload, and the serialized payload. Every byte is verified. BadFile, or
    OSError from the disk."""
    with source.open("rb") if isinstance(source, Path) else io.BytesIO(source) as file:
        size = os.fstat(file.fileno()).st_size if isinstance(source, Path) else len(source)
        header = _read_header(file)
        table = _read_table(header, size)
        data = [_read_exactly(file, info.nbytes) for info in table]
    if hash_file(header.raw, data) != header.raw[_DIGEST]:
        _fail("its checksum is wrong: it was changed or damaged")
    name = source.stem if isinstance(source, Path) else None
    logprobs = data[1] if len(table) > 1 and table[1].name == LOGPROBS else None
    entry = _decode_entry(header.fields, data[0], logprobs, fingerprint, name)
    tensors = {
        info.name.removeprefix(PAYLOAD): SerializedTensor(info.dtype, info.shape, bytes_)
        for info, bytes_ in zip(table, data, strict=True)
        if info.name.startswith(PAYLOAD)
    }
    meta = {name.removeprefix(CODEC): text for name, text in header.fields.items() if name.startswith(CODEC)}
    return entry, SerializedPayload(tensors, meta)


def peek_entry(path: Path, fingerprint: bytes) -> tuple[CacheEntry, os.stat_result]:
    """Return the entry by its header, ids and logprobs. The payload and its table are not verified, except
    for the length of the file."""
    with path.open("rb", buffering=PEEK_BYTES) as file:
        stat = os.fstat(file.fileno())
        header = _read_header(file)
        name, description = next(reversed(header.tensors.items()))
        ids_info, end = _parse_ids_info(header), _parse_tensor_info(name, description).end
        if stat.st_size != len(header.raw) + end or ids_info.end > end:
            _fail(WRONG_SIZE)
        ids = _read_exactly(file, ids_info.nbytes)
        logprobs_info = _parse_logprobs_info(header, ids_info.end)
        if logprobs_info is not None and logprobs_info.end > end:
            _fail(WRONG_SIZE)
        logprobs = None if logprobs_info is None else _read_exactly(file, logprobs_info.nbytes)
    return _decode_entry(header.fields, ids, logprobs, fingerprint, path.stem), stat


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    """One row of the table of tensors; `start` and `end` are offsets in the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class _Header:
    """What a file has before its data; `raw` begins with the length."""

    raw: bytes
    fields: Mapping[str, str]
    tensors: dict[str, Any]  # by name, as parsed from JSON; at least one


def _encode_header(fields: Mapping[str, str], tensors: Mapping[str, SerializedTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": fields}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + len(tensor.data)
        if len(tensor.data) != _count_bytes(tensor.dtype, tensor.shape):
            raise ValueError(f"{name}: {len(tensor.data)} bytes do not fit {tensor.dtype} {tensor.shape}")
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)  # aligns the data, as safetensors does
    if len(text) > HEADER_LIMIT:
        raise ValueError(f"a header of {len(text)} bytes is longer than {HEADER_LIMIT}")
    return len(text).to_bytes(8, "little") + text


def _read_header(file: IO[bytes]) -> _Header:
    length = _read_exactly(file, 8)
    count = int.from_bytes(length, "little")
    if not len(_HEADER_START) < count <= HEADER_LIMIT:
        _fail(f"its header cannot have {count} bytes")
    text = _read_exactly(file, count)
    if not text.startswith(_HEADER_START):
        _fail("its header was not written by mlxrun")
    try:
        tensors = json.loads(text)
    except (ValueError, RecursionError):
        _fail("its header is not JSON")
    fields = tensors.pop("__metadata__")
    if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()):
        _fail("its header has metadata that are not strings")
    if not tensors:
        _fail(NO_IDS)
    return _Header(length + text, fields, tensors)


def _read_table(header: _Header, size: int) -> list[_TensorInfo]:
    """Return the tensors, the ids first; they follow each other without gaps and fill the file."""
    table = [_parse_ids_info(header)]
    logprobs = _parse_logprobs_info(header, table[0].end)
    table += [] if logprobs is None else [logprobs]
    for name, description in list(header.tensors.items())[len(table) :]:
        info = _parse_tensor_info(name, description)
        if not name.startswith(PAYLOAD) or info.start != table[-1].end:
            _fail(f"tensor {name} is not where it should be")
        table.append(info)
    if size != len(header.raw) + table[-1].end:
        _fail(WRONG_SIZE)
    return table


def _parse_ids_info(header: _Header) -> _TensorInfo:
    info = _parse_tensor_info(*next(iter(header.tensors.items())))
    if (info.name, info.dtype, len(info.shape), info.start) != (IDS, "I64", 1, 0):
        _fail(NO_IDS)
    return info


def _parse_logprobs_info(header: _Header, start: int) -> _TensorInfo | None:
    """The tensor of logprobs, which is the second one; None if there is none."""
    if LOGPROBS not in header.tensors:
        return None
    info = _parse_tensor_info(LOGPROBS, header.tensors[LOGPROBS])
    if list(header.tensors).index(LOGPROBS) != 1 or (info.dtype, info.start) != ("I32", start):
        _fail("its logprobs are not where they should be")
    return info


def _parse_tensor_info(name: str, description: Any) -> _TensorInfo:
    if not isinstance(description, dict) or set(description) != {"dtype", "shape", "data_offsets"}:
        _fail(f"the header's description of tensor {name} is incomplete")
    dtype, shape, offsets = description["dtype"], description["shape"], description["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        _fail(f"tensor {name} has an unknown type")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        _fail(f"tensor {name} has an invalid shape or position")
    info = _TensorInfo(name, dtype, tuple(shape), *offsets)
    if info.nbytes != _count_bytes(dtype, shape):
        _fail(f"tensor {name} has another length than its type and shape say")
    return info


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _count_bytes(dtype: str, shape: Iterable[int]) -> int:
    if dtype not in ITEM_BYTES:
        raise ValueError(f"the type {dtype} cannot be written to these files")
    return math.prod(shape) * ITEM_BYTES[dtype]


def _describe_entry(entry: CacheEntry, fingerprint: bytes, logprobs: bytes | None = None) -> dict[str, str]:
    """Return the header's fields about an entry; `logprobs`: its encoded logprobs."""
    digest = None if logprobs is None else hashlib.blake2b(logprobs, digest_size=16).hexdigest()
    return ({} if digest is None else {LOGPROBS: digest}) | {
        "format": FORMAT,
        "root": fingerprint.hex(),
        "key": entry.key.hex(),
        "parent": entry.parent.hex(),
        "part": entry.kind.value,
        "start": str(entry.start),
        "stop": str(entry.stop),
        "boundary": "yes" if entry.at_cache_position else "no",
        "tokens": hashlib.blake2b(entry.ids.tobytes(), digest_size=16).hexdigest(),
    }


def _decode_entry(
    fields: Mapping[str, str], ids: bytes, logprobs: bytes | None, fingerprint: bytes, name: str | None
) -> CacheEntry:
    """Return the entry that the header describes, if every field agrees with the content."""
    if fields.get("format") != FORMAT:
        _fail(f"its format is {fields.get('format')!r}; this version reads {FORMAT!r}")
    if fields.get("root") != fingerprint.hex():
        _fail("it belongs to another model")
    try:
        entry = CacheEntry(
            key=bytes.fromhex(fields["key"]),
            parent=bytes.fromhex(fields["parent"]),
            kind=SnapshotKind(fields["part"]),
            start=int(fields["start"]),
            stop=int(fields["stop"]),
            ids=array("q", ids),
            at_cache_position=fields.get("boundary") == "yes",
            logprobs=None if logprobs is None else EntryLogprobs.decode(logprobs),
        )
    except (KeyError, ValueError) as error:
        _fail(f"its header is incomplete or wrong: {error}")
    expected = _describe_entry(entry, fingerprint, logprobs)
    for field in sorted(expected.keys() | fields.keys() - {"digest"}):
        if not field.startswith(CODEC) and fields.get(field) != expected.get(field):
            _fail(f"its header says {field} {fields.get(field)!r}, but it is {expected.get(field)!r}")
    if name is not None and fields["key"] != name:
        _fail("its name is not its key: it was renamed or swapped")
    if not 0 <= entry.start < entry.stop or entry.stop - entry.start != len(entry.ids):
        _fail(f"it has {len(entry.ids)} token ids for positions {entry.start} to {entry.stop}")
    if entry.key != compute_entry_key(entry):
        _fail("its key is not that of its content")
    if entry.logprobs is not None and entry.logprobs.first + len(entry.logprobs.best_ids) != entry.stop:
        _fail("its logprobs are those of other tokens")
    return entry


def hash_file(header: bytes, data: Iterable[bytes]) -> bytes:
    """Hash the whole file, with zeros in place of the digest itself."""
    state = hashlib.blake2b(header[: _DIGEST.start] + _NO_DIGEST + header[_DIGEST.stop :], digest_size=32)
    for tensor in data:
        state.update(tensor)
    return state.hexdigest().encode("ascii")


def _read_exactly(file: IO[bytes], count: int) -> bytes:
    data = file.read(count)
    if len(data) != count:
        _fail("it ends too early")
    return data


def _fail(reason: str) -> NoReturn:
    raise BadFile(reason)
