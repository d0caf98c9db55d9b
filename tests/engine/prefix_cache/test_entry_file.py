"""One entry as one file: what is written is read back, and nothing else is accepted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors

from mlxrun.core.request import TokenLogprob
from mlxrun.core.step_plan import SerializedPayload, SerializedTensor, SnapshotKind
from mlxrun.engine.prefix_cache import entry_file
from mlxrun.engine.prefix_cache.disk_tier import DiskTier
from mlxrun.engine.prefix_cache.entry import CacheCounters, CacheEntry
from mlxrun.engine.prefix_cache.entry_file import BadFile, encode_entry, load_entry, peek_entry
from mlxrun.engine.prefix_cache.entry_logprobs import LogprobBook
from tests.helpers.cache_files import OTHER, ROOT, make_entry, write_entry


def encode_file(number: int = 1, **changes: Any) -> bytes:
    entry, payload = make_entry(number)
    return b"".join(encode_entry(replace(entry, **changes), payload, ROOT))


def is_same(found: CacheEntry, wanted: CacheEntry) -> bool:
    fields = ("key", "parent", "kind", "start", "stop", "ids", "at_cache_position")
    return all(getattr(found, field) == getattr(wanted, field) for field in fields)


def sign_again(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return the file with a changed header and a checksum that fits it."""
    count = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + count])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    head, body = len(text).to_bytes(8, "little") + text, data[8 + count :]
    digest = entry_file._DIGEST
    return head[: digest.start] + entry_file.hash_file(head, [body]) + head[digest.stop :] + body


@pytest.mark.parametrize("kind", SnapshotKind)
def test_an_entry_is_read_back_as_it_was_written(kind: SnapshotKind, tmp_path: Path) -> None:
    entry, payload, path = write_entry(tmp_path, kind=kind)
    for source in (path, path.read_bytes()):
        found, loaded = load_entry(source, ROOT)
        assert is_same(found, entry)
        assert loaded == payload
        assert (found.in_tier, found.payload, found.nbytes) == (False, None, 0)
    assert is_same(peek_entry(path, ROOT)[0], entry)


def test_other_tools_can_read_it() -> None:
    entry, payload = make_entry(1)
    found = dict(safetensors.deserialize(encode_file()))
    assert bytes(found["ids"]["data"]) == entry.ids.tobytes()
    assert bytes(found["payload.0.keys"]["data"]) == payload.tensors["0.keys"].data
    assert found["payload.0.keys"]["dtype"] == "BF16"


def test_every_bit_counts() -> None:
    data = encode_file()
    load_entry(data, ROOT)
    rng = random.Random(1)
    for place in range(len(data)):  # each class of positions, and every position in it
        with pytest.raises(BadFile):
            load_entry(data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :], ROOT)


def test_a_torn_file_is_bad(tmp_path: Path) -> None:
    data = encode_file()
    path = tmp_path / f"{make_entry(1)[0].key.hex()}.safetensors"
    for length in range(len(data)):
        with pytest.raises(BadFile):
            load_entry(data[:length], ROOT)
        path.write_bytes(data[:length])
        with pytest.raises(BadFile):
            peek_entry(path, ROOT)
    for more in (b"x", bytes(8), data):
        with pytest.raises(BadFile):
            load_entry(data + more, ROOT)


def test_other_bytes_are_bad() -> None:
    rng = random.Random(2)
    data = encode_file()
    for length in (0, 7, 8, 64, 5000):
        with pytest.raises(BadFile):
            load_entry(rng.randbytes(length), ROOT)
    for count in (0, 1, 2**22 + 1, 2**63, 2**64 - 1):  # nothing is allocated for what a length claims
        with pytest.raises(BadFile):
            load_entry(count.to_bytes(8, "little") + data[8:], ROOT)
    deep = entry_file._HEADER_START + b'","x":' + b"[" * 100_000
    with pytest.raises(BadFile):
        load_entry(len(deep).to_bytes(8, "little") + deep, ROOT)


LIES = {
    "format": ["1", "3", "0", "", "2 ", "02"],
    "root": [OTHER.hex(), "", ROOT.hex().upper() + "00"],
    "key": [OTHER.hex(), "", "zz"],
    "parent": ["", "zz", OTHER.hex().upper().replace("0", "A"), "0"],
    "part": ["state2", "", "DELTA"],
    "start": ["7", "9", "12", "-8", "8.0", "08", " 8", "", "٨", "9" * 5000],
    "stop": ["11", "13", "8", "-1", "x", "1e1"],
    "boundary": ["maybe", "", "YES"],
    "tokens": ["0" * 32, ""],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in LIES for value in LIES[field]])
def test_a_header_that_lies_is_refused_even_if_signed(field: str, value: str, tmp_path: Path) -> None:
    """Each field of the header."""
    entry, _, path = write_entry(tmp_path)
    path.write_bytes(
        sign_again(path.read_bytes(), lambda header: header["__metadata__"].update({field: value}))
    )
    for read in (load_entry, peek_entry):
        with pytest.raises(BadFile):
            read(path, ROOT)
    store = DiskTier(tmp_path, ROOT, counters=CacheCounters())
    assert store.read(entry) is None
    assert not path.exists()


@pytest.mark.parametrize("field", sorted(entry_file._describe_entry(make_entry(1)[0], ROOT)))
def test_a_header_that_lacks_a_field_is_refused(field: str) -> None:
    with pytest.raises(BadFile):
        load_entry(sign_again(encode_file(), lambda header: header["__metadata__"].pop(field)), ROOT)


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.pop("ids"),
        lambda h: h.update(strange=h.pop("payload.none")),
        lambda h: h["__metadata__"].update(more="1"),
        lambda h: h["__metadata__"].update(more=1),
        lambda h: h["ids"].update(shape=[2, 2]),
        lambda h: h["ids"].update(shape=[3]),
        lambda h: h["ids"].update(shape=[4.0]),
        lambda h: h["ids"].update(shape=None),
        lambda h: h["ids"].update(dtype="U64"),
        lambda h: h["ids"].update(dtype=["I64"]),
        lambda h: h["ids"].update(data_offsets=[8, 40]),
        lambda h: h["ids"].update(data_offsets=[0, -32]),
        lambda h: h["ids"].update(data_offsets=[0, 32, 64]),
        lambda h: h["payload.0.keys"].update(dtype="F9"),
        lambda h: h["payload.0.keys"].update(shape=[2**62, 2**62]),
        lambda h: h["payload.0.keys"].update(data_offsets=[0, 64]),
        lambda h: h["payload.0.keys"].pop("shape"),
        lambda h: h.update({"payload.x": 3}),
    ],
)
def test_a_table_that_lies_is_refused_even_if_signed(change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(BadFile):
        load_entry(sign_again(encode_file(), change), ROOT)


def test_a_peek_reads_no_more_than_there_is(tmp_path: Path) -> None:
    _, _, path = write_entry(tmp_path)
    lie = {"shape": [2**40], "data_offsets": [0, 2**43]}
    path.write_bytes(sign_again(path.read_bytes(), lambda header: header["ids"].update(lie)))
    with pytest.raises(BadFile, match="longer"):
        peek_entry(path, ROOT)


def test_signing_again_is_not_what_is_refused() -> None:
    load_entry(sign_again(encode_file(), lambda header: None), ROOT)
    load_entry(
        sign_again(encode_file(), lambda header: header["__metadata__"].update({"codec.kind": "x"})), ROOT
    )


def test_a_key_that_is_not_of_the_content_is_refused() -> None:
    with pytest.raises(BadFile, match="key"):
        load_entry(encode_file(key=bytes(16)), ROOT)


def test_what_could_not_be_read_back_is_not_written() -> None:
    entry, _ = make_entry(1)
    for tensor in (SerializedTensor("BF16", (3,), b"1234"), SerializedTensor("F9", (4,), b"1234")):
        with pytest.raises(ValueError):
            encode_entry(entry, SerializedPayload({"x": tensor}, {}), ROOT)
    with pytest.raises(ValueError, match="header"):
        encode_entry(entry, SerializedPayload({}, {"x": "y" * entry_file.HEADER_LIMIT}), ROOT)


def test_scores_that_reach_beyond_the_file_are_refused_unread(tmp_path: Path) -> None:
    """Their length is that of the header alone: nobody may ask the memory for that much."""
    book = LogprobBook(tuple(range(13)), ())
    book.record(1, [TokenLogprob(-1.0, ((2, -0.5),))] * 12)
    entry, payload, path = write_entry(tmp_path)
    scores = book.make_logprobs(entry.start, entry.stop, entry.stop)

    def forge(header: dict[str, Any]) -> None:
        start, count = header["scores"]["data_offsets"][0], 10**15
        header["scores"] |= {"shape": [count], "data_offsets": [start, start + 4 * count]}

    data = b"".join(encode_entry(replace(entry, logprobs=scores), payload, ROOT))
    path.write_bytes(data)
    assert peek_entry(path, ROOT)[0].logprobs is not None
    path.write_bytes(sign_again(data, forge))
    with pytest.raises(BadFile, match="shorter or longer"):
        peek_entry(path, ROOT)
