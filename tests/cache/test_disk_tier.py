"""The disk tier: one record a file, every byte checked; a writer nobody waits for; two processes at once.

B28, and what design 7 says of files.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors

from mlxrun.cache import cache_folder as cache_folder_module
from mlxrun.cache import disk_tier, entry_file
from mlxrun.cache.cache_folder import ModelFolder, check_folder, get_default_folder, resolve_cache_folder
from mlxrun.cache.content_keys import compute_entry_key
from mlxrun.cache.disk_tier import DiskTier
from mlxrun.cache.entry import CacheCounters, CacheEntry, SerializedPayload, SerializedTensor
from mlxrun.cache.entry_file import BadFile, encode_entry, load_entry, peek_entry
from mlxrun.errors import ConfigError
from mlxrun.scheduler.step_plan import SnapshotKind

ROOT, OTHER = bytes(range(16)), bytes(range(1, 17))


def make(
    number: int, size: int = 64, part: SnapshotKind = SnapshotKind.DELTA
) -> tuple[CacheEntry, SerializedPayload]:
    """A record of four tokens and what it holds; another number, another content."""
    record = CacheEntry(
        b"", ROOT, part, 8, 12, array("q", [number, -1, 2**62, 0]), boundary=part is SnapshotKind.STATE
    )
    record.key = compute_entry_key(record)
    data = random.Random(number).randbytes(size)
    tensors = {
        "0.keys": SerializedTensor("BF16", (1, 2, size // 4), data),
        "ids": SerializedTensor("U8", (3,), b"abc"),  # a codec may use any name
        "none": SerializedTensor("F32", (0, 4), b""),
    }
    return record, SerializedPayload(tensors, {"kind": "kv", "digest": "ä"})


def whole(number: int = 1, **changes: Any) -> bytes:
    record, blob = make(number)
    return b"".join(encode_entry(replace(record, **changes), blob, ROOT))


def same(found: CacheEntry, wanted: CacheEntry) -> bool:
    facts = ("key", "parent", "part", "start", "stop", "ids", "boundary")
    return all(getattr(found, fact) == getattr(wanted, fact) for fact in facts)


def signed_again(data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """The file with another header and a checksum that fits it."""
    count = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + count])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    head, body = len(text).to_bytes(8, "little") + text, data[8 + count :]
    place = entry_file._DIGEST
    return head[: place.start] + entry_file._file_digest(head, [body]) + head[place.stop :] + body


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    """Makes DiskFiles on one folder, and closes them."""
    made: list[DiskTier] = []

    def one(root: bytes = ROOT, **options: Any) -> DiskTier:
        made.append(DiskTier(tmp_path, root, **{"counters": CacheCounters()} | options))
        return made[-1]

    yield one
    for store in made:
        store.close()


def counters(store: DiskTier) -> CacheCounters:
    return store._counters


def saved(
    tmp_path: Path, number: int = 1, root: bytes = ROOT, **options: Any
) -> tuple[CacheEntry, SerializedPayload, Path]:
    """A record that is on disk, and its file."""
    record, blob = make(number, **options)
    home = ModelFolder(tmp_path, root)
    home.write_file(record.key, encode_entry(record, blob, root))
    return record, blob, home.locate_file(record.key)


class Held:
    """A disk that lets one file through for each `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self._turns = threading.Semaphore(0)
        put = ModelFolder.write_file

        def held(home: ModelFolder, key: bytes, pieces: Any) -> int:
            self.begun.set()
            assert self._turns.acquire(timeout=10)
            return put(home, key, pieces)

        monkeypatch.setattr(ModelFolder, "put", held)

    def release(self, turns: int = 1) -> None:
        self._turns.release(turns)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


# -- one file ----------------------------------------


@pytest.mark.parametrize("part", SnapshotKind)
def test_a_record_comes_back_as_it_was(part: SnapshotKind, tmp_path: Path) -> None:
    record, blob, path = saved(tmp_path, part=part)
    for source in (path, path.read_bytes()):
        found, payload = load_entry(source, ROOT, check=lambda r: r.key == compute_entry_key(r))
        assert same(found, record)
        assert payload == blob
        assert (found.on_disk, found.payload, found.nbytes) == (True, None, 0)
    assert same(peek_entry(path, ROOT)[0], record)


def test_other_tools_can_read_it() -> None:
    record, blob = make(1)
    found = dict(safetensors.deserialize(whole()))
    assert bytes(found["ids"]["data"]) == record.ids.tobytes()
    assert bytes(found["payload.0.keys"]["data"]) == blob.tensors["0.keys"].data
    assert found["payload.0.keys"]["dtype"] == "BF16"


def test_every_bit_counts() -> None:
    data = whole()
    load_entry(data, ROOT)
    rng = random.Random(1)
    for place in range(len(data)):  # each class of positions, and every position in it
        with pytest.raises(BadFile):
            load_entry(data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :], ROOT)


def test_a_torn_file_is_bad(tmp_path: Path) -> None:
    data = whole()
    path = tmp_path / f"{make(1)[0].key.hex()}.safetensors"
    for cut in range(len(data)):
        with pytest.raises(BadFile):
            load_entry(data[:cut], ROOT)
        path.write_bytes(data[:cut])
        with pytest.raises(BadFile):
            peek_entry(path, ROOT)
    for more in (b"x", bytes(8), data):
        with pytest.raises(BadFile):
            load_entry(data + more, ROOT)


def test_other_bytes_are_bad() -> None:
    rng = random.Random(2)
    data = whole()
    for length in (0, 7, 8, 64, 5000):
        with pytest.raises(BadFile):
            load_entry(rng.randbytes(length), ROOT)
    for count in (0, 1, 2**22 + 1, 2**63, 2**64 - 1):  # nothing is allocated for what a length claims
        with pytest.raises(BadFile):
            load_entry(count.to_bytes(8, "little") + data[8:], ROOT)
    deep = entry_file._BEFORE + b'","x":' + b"[" * 100_000
    with pytest.raises(BadFile):
        load_entry(len(deep).to_bytes(8, "little") + deep, ROOT)


FACTS = {
    "format": ["2", "0", "", "1 ", "01"],
    "root": [OTHER.hex(), "", ROOT.hex().upper() + "00"],
    "key": [OTHER.hex(), "", "zz"],
    "parent": ["", "zz", OTHER.hex().upper().replace("0", "A"), "0"],
    "part": ["state2", "", "DELTA"],
    "start": ["7", "9", "12", "-8", "8.0", "08", " 8", "", "٨", "9" * 5000],
    "stop": ["11", "13", "8", "-1", "x", "1e1"],
    "boundary": ["maybe", "", "YES"],
    "tokens": ["0" * 32, ""],
}


@pytest.mark.parametrize(("fact", "value"), [(fact, value) for fact in FACTS for value in FACTS[fact]])
def test_a_header_that_lies_is_refused_even_if_signed(fact: str, value: str, tmp_path: Path) -> None:
    """B28: each field."""
    record, _, path = saved(tmp_path)
    path.write_bytes(
        signed_again(path.read_bytes(), lambda header: header["__metadata__"].update({fact: value}))
    )
    for read in (load_entry, peek_entry):
        with pytest.raises(BadFile):
            read(path, ROOT, check=lambda r: r.key == compute_entry_key(r))
    store = DiskTier(tmp_path, ROOT, counters=CacheCounters())
    assert store.read(record) is None
    assert not path.exists()


@pytest.mark.parametrize("fact", sorted(entry_file.FIELDS - {"digest"}))
def test_a_header_that_lacks_something_is_refused(fact: str) -> None:
    with pytest.raises(BadFile):
        load_entry(signed_again(whole(), lambda header: header["__metadata__"].pop(fact)), ROOT)


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
        load_entry(signed_again(whole(), change), ROOT)


def test_a_peek_reads_no_more_than_there_is(tmp_path: Path) -> None:
    _, _, path = saved(tmp_path)
    lie = {"shape": [2**40], "data_offsets": [0, 2**43]}
    path.write_bytes(signed_again(path.read_bytes(), lambda header: header["ids"].update(lie)))
    with pytest.raises(BadFile, match="longer"):
        peek_entry(path, ROOT)


def test_signing_again_is_not_what_is_refused() -> None:
    load_entry(signed_again(whole(), lambda header: None), ROOT)
    load_entry(signed_again(whole(), lambda header: header["__metadata__"].update({"codec.kind": "x"})), ROOT)


def test_a_key_that_is_not_of_the_content_is_refused() -> None:
    with pytest.raises(BadFile, match="key"):
        load_entry(whole(key=bytes(16)), ROOT, check=lambda r: r.key == compute_entry_key(r))


def test_what_could_not_be_read_back_is_not_written() -> None:
    record, _ = make(1)
    for tensor in (SerializedTensor("BF16", (3,), b"1234"), SerializedTensor("F9", (4,), b"1234")):
        with pytest.raises(ValueError):
            encode_entry(record, SerializedPayload({"x": tensor}, {}), ROOT)
    with pytest.raises(ValueError, match="header"):
        encode_entry(record, SerializedPayload({}, {"x": "y" * entry_file.HEADER_LIMIT}), ROOT)


# -- the store: what it takes and gives ----------------------------------------


def test_written_records_are_found_again(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    first = opened()
    made = [make(number) for number in range(5)]
    assert all(first.write(record, blob) for record, blob in made)
    first.close()
    assert counters(first).written == 5
    second = opened(check=lambda r: r.key == compute_entry_key(r))
    assert {record.key for record in second.scan()} == {record.key for record, _ in made}
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert first.nbytes == second.nbytes == counters(second).disk_bytes == on_disk
    assert [second.read(record) for record, _ in made] == [blob for _, blob in made]
    assert (counters(second).read, counters(second).refused) == (5, 0)
    assert not list(tmp_path.rglob("*.tmp"))
    if os.name == "posix":
        assert (tmp_path / ROOT.hex()).stat().st_mode & 0o077 == 0


def test_a_closed_store_writes_no_more_but_reads(opened: Callable[..., DiskTier]) -> None:
    store, (record, blob) = opened(), make(1)
    store.write(record, blob)
    store.close()
    store.close()
    assert not store.write(*make(2))
    assert store.read(record) == blob
    store.delete(record)
    assert store.read(record) is None
    assert store.nbytes == 0


def test_nothing_there_is_nothing(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    store, (record, _) = opened(), make(1)
    assert list(store.scan()) == []
    assert store.read(record) is None
    store.delete(record)
    store.close()
    assert (store.nbytes, counters(store)) == (0, CacheCounters())
    assert list(tmp_path.iterdir()) == []


def test_least_recently_used_first(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    made = [saved(tmp_path, number) for number in range(6)]
    for age, (_, _, path) in enumerate(made):
        os.utime(path, (1000 + age, 1000 + age))
    store = opened()
    assert [r.key for r in store.scan()] == [r.key for r, _, _ in made]
    for used in (2, 0):
        assert store.read(made[used][0]) is not None
    assert [r.key for r in opened().scan()] == [made[n][0].key for n in (1, 3, 4, 5, 2, 0)]


def test_bad_files_are_deleted_and_a_miss(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    made = [saved(tmp_path, number) for number in range(4)]
    store = opened()
    assert len(store.scan()) == 4
    before = store.nbytes
    flipped = bytearray(made[0][2].read_bytes())
    flipped[-1] ^= 1  # in the payload, which a scan does not read
    made[0][2].write_bytes(flipped)
    made[1][2].write_bytes(made[1][2].read_bytes()[:-1])
    made[2][2].unlink()
    assert [store.read(record) for record, _, _ in made] == [None, None, None, made[3][1]]
    assert counters(store).refused == 2
    assert store.nbytes == made[3][2].stat().st_size < before
    assert [path.name for path in (tmp_path / ROOT.hex()).iterdir()] == [made[3][2].name]


def test_a_scan_deletes_swapped_renamed_and_torn_files(
    opened: Callable[..., DiskTier], tmp_path: Path
) -> None:
    paths = [saved(tmp_path, number)[2] for number in range(5)]
    one, two = paths[0].read_bytes(), paths[1].read_bytes()
    paths[0].write_bytes(two)
    paths[1].write_bytes(one)
    paths[2].rename(paths[2].with_name("00" * 16 + ".safetensors"))
    paths[3].write_bytes(paths[3].read_bytes()[:-1])
    store = opened()
    assert [record.key.hex() for record in store.scan()] == [paths[4].stem]
    assert counters(store).refused == 4
    assert [path.name for path in (tmp_path / ROOT.hex()).iterdir()] == [paths[4].name]


def test_what_is_not_ours_is_not_touched(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    _, _, other = saved(tmp_path, root=OTHER)
    home = tmp_path / ROOT.hex()
    home.mkdir()
    name = make(1)[0].key.hex()
    strange = [
        home / "notes.txt",
        home / f"{name}.safetensors.bak",
        home / f"{name.upper()[:-1]}G.safetensors",
    ]
    strange += [home / "model.safetensors", home / f"{name}.tmp", tmp_path / f"{name}.safetensors"]
    for path in strange:
        path.write_bytes(b"x")
    (home / f"{name}.safetensors").mkdir()
    (home / f"{'0' * 32}.safetensors").symlink_to(other)
    store = opened()
    assert list(store.scan()) == []
    assert all(path.exists() for path in [*strange, other, home / f"{'0' * 32}.safetensors"])
    assert counters(store).refused == 0


def test_a_file_of_another_model_in_our_folder_is_deleted(
    opened: Callable[..., DiskTier], tmp_path: Path
) -> None:
    """B28: copied there, or left by an older way to make fingerprints."""
    record, _, path = saved(tmp_path, root=OTHER)
    moved = ModelFolder(tmp_path, ROOT).locate_file(record.key)
    moved.parent.mkdir()
    path.rename(moved)
    store = opened()
    assert list(store.scan()) == []
    assert (counters(store).refused, moved.exists()) == (1, False)


def test_a_file_that_holds_another_record_than_asked_is_refused(
    opened: Callable[..., DiskTier], tmp_path: Path
) -> None:
    record, _, path = saved(tmp_path)
    assert opened().read(replace(record, ids=array("q", [1, 2, 3, 4]))) is None
    assert not path.exists()


def test_left_overs_of_dead_processes_are_removed(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    home = tmp_path / ROOT.hex()
    home.mkdir()
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    name, pid, me = "ab" * 16, done.pid, os.getpid()
    gone = [home / f"{name}.{pid}.01234567-3.tmp", home / f"{name}.{me}.01234567-3.tmp"]
    kept = [
        home / f"{name}.{me}.{cache_folder_module._PROCESS_TOKEN}-3.tmp",
        home / f"{name}.{os.getppid()}.01234567-3.tmp",
    ]
    old = home / f"{name}.{os.getppid()}.76543210-1.tmp"
    for path in (*gone, *kept, old):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    opened().scan()
    assert sorted(home.iterdir()) == sorted(kept)


# -- the queue ----------------------------------------


def test_a_pending_write_is_read_and_counted(
    opened: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, store = Held(monkeypatch), opened()
    (first, one), (second, two) = make(1), make(2)
    assert store.write(first, one) and store.write(second, two) and store.write(second, two)
    assert held.begun.wait(10)
    assert store.read(first) is one and store.read(second) is two
    assert store.nbytes == counters(store).disk_bytes == one.nbytes + two.nbytes + 64
    held.release(2)
    store.close()
    assert (counters(store).written, counters(store).read) == (2, 0)


def test_deleting_a_pending_write_cancels_it(
    opened: Callable[..., DiskTier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, store = Held(monkeypatch), opened()
    made = [make(number) for number in range(3)]
    for record, blob in made:
        store.write(record, blob)
    assert held.begun.wait(10)
    store.delete(made[0][0])  # under way
    store.delete(made[1][0])  # waiting
    assert store.read(made[0][0]) is None and store.read(made[1][0]) is None
    assert store.nbytes == made[2][1].nbytes + 32
    assert store.write(*made[0])  # wanted after all
    held.release(5)
    store.close()
    names = {path.stem for path in tmp_path.rglob("*.safetensors")}
    assert names == {made[0][0].key.hex(), made[2][0].key.hex()}
    assert {record.key.hex() for record in opened().scan()} == names


def test_delete_then_write_again_many_times(opened: Callable[..., DiskTier]) -> None:
    store, (record, blob) = opened(), make(1)
    rng = random.Random(3)
    there = False
    for _ in range(300):
        there = rng.random() < 0.5
        if there:
            assert store.write(record, blob)
        else:
            store.delete(record)
        if rng.random() < 0.3:
            assert (store.read(record) == blob) == there
    store.close()
    assert (store.read(record) == blob) == there
    assert len(opened().scan()) == there


def test_a_full_queue_drops_and_does_not_block(
    opened: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, store = Held(monkeypatch), opened(queue_bytes=250)
    taken = [store.write(*make(number)) for number in range(5)]
    assert taken == [True, True, False, False, False]
    assert store.dropped == 3
    held.release(9)
    wait_for(lambda: counters(store).written == 2)
    assert store.write(*make(9, size=4000))  # larger than the queue, which is empty
    store.close()
    assert counters(store).written == 3


def test_reads_go_before_writes(
    opened: Callable[..., DiskTier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, blob, _ = saved(tmp_path, 1)
    store, new = opened(), make(2)
    real = disk_tier.load_entry

    def slow(*args: Any, **options: Any) -> Any:
        store.write(*new)
        time.sleep(0.1)
        assert counters(store).written == 0
        return real(*args, **options)

    monkeypatch.setattr(disk_tier, "load", slow)
    assert store.read(record) == blob
    wait_for(lambda: counters(store).written == 1)


# -- disks that fail ----------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EDQUOT])
def test_a_disk_that_takes_no_more_is_one_warning(
    code: int,
    opened: Callable[..., DiskTier],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    old, blob, _ = saved(tmp_path, 1)
    store = opened()
    store.scan()
    before = store.nbytes
    broken = True

    def failing(*args: Any) -> None:
        if broken:
            raise OSError(code, os.strerror(code))

    real = Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, to: failing() or real(path, to))
    monkeypatch.setattr(disk_tier, "RETRY_SECONDS", 0.2)
    caplog.set_level(logging.WARNING)
    for number in (2, 3):
        store.write(*make(number))
        wait_for(lambda: store.nbytes == before)
        assert not store.write(*make(4))
        assert store.read(old) == blob
        time.sleep(0.25)
    assert len(caplog.records) == 1
    assert os.strerror(code) in caplog.text
    assert not list(tmp_path.rglob("*.tmp"))
    broken = False
    assert store.write(*make(5))
    store.close()
    assert (counters(store).written, store.dropped) == (1, 2)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_read(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    record, blob, path = saved(tmp_path)
    path.parent.chmod(0o500)
    try:
        store = opened()
        assert len(store.scan()) == 1
        assert store.read(record) == blob
        store.write(*make(2))
        wait_for(lambda: not store.write(*make(3)))
        store.delete(record)
    finally:
        store.close()
        path.parent.chmod(0o700)
    assert path.exists()


def test_a_folder_that_cannot_be_made_is_a_miss(
    opened: Callable[..., DiskTier], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ROOT.hex()).write_text("mine")
    store, (record, blob) = opened(), make(1)
    assert list(store.scan()) == []
    assert store.write(record, blob)
    wait_for(lambda: not store.write(*make(2)))
    assert store.read(record) is None
    store.delete(record)
    store.close()
    assert (tmp_path / ROOT.hex()).read_text() == "mine"
    assert len(caplog.records) == 1


def test_a_folder_that_goes_away_is_made_again(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    store = opened()
    for number in range(3):
        store.write(*make(number))
        wait_for(lambda n=number: counters(store).written == n + 1)
        for path in (tmp_path / ROOT.hex()).iterdir():
            path.unlink()
        (tmp_path / ROOT.hex()).rmdir()
    assert store.read(make(0)[0]) is None


def test_a_blob_that_is_no_file_is_dropped(opened: Callable[..., DiskTier]) -> None:
    store, (record, _) = opened(), make(1)
    assert store.write(record, SerializedPayload({"x": SerializedTensor("F9", (1,), b"1")}, {}))
    store.write(*make(2))
    store.close()
    assert (counters(store).written, store.dropped) == (1, 1)


# -- several processes ----------------------------------------

WRITER = """
import random, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from tests.cache.test_disk_tier import ROOT, make
from mlxrun.cache.disk_tier import DiskFiles
from mlxrun.cache.entry import Counters

store = DiskFiles(Path(sys.argv[1]), ROOT, counters=Counters())
rng, left = random.Random(int(sys.argv[2])), int(sys.argv[3])
print("ready", flush=True)
while left:
    left -= 1
    record, blob = make(rng.randrange(40), 200_000)
    what = rng.random()
    if what < 0.5:
        store.write(record, blob)
    elif what < 0.9:
        found = store.read(record)
        assert found is None or found == blob
    else:
        store.delete(record)
store.close()
print("refused", store._counters.refused, flush=True)
"""


def process(where: Path, seed: int, steps: int) -> subprocess.Popen[str]:
    code = WRITER.format(tests=str(Path(__file__).parents[2]))
    command = [sys.executable, "-c", code, str(where), str(seed), str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def test_killed_writers_leave_whole_files_or_none(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    rng = random.Random(4)
    for seed in range(8):
        with process(tmp_path, seed, -1) as child:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            time.sleep(rng.random() * 0.15)
            child.send_signal(signal.SIGKILL)
        store = opened()
        for record in store.scan():
            assert store.read(record) is not None
        assert counters(store).refused == 0
        assert not list(tmp_path.rglob("*.tmp"))


def test_two_processes_on_one_folder(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    children = [process(tmp_path, seed, 600) for seed in (1, 2)]
    store = opened()
    while any(child.poll() is None for child in children):
        for record in store.scan():
            store.read(record)
    for child in children:
        out, _ = child.communicate()
        assert (child.returncode, out) == (0, "ready\nrefused 0\n")
    assert counters(store).refused == 0
    assert all(store.read(record) is not None for record in store.scan())


# -- folders, and many files ----------------------------------------


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(cache_folder_module.sys, "platform", "linux")
    assert get_default_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/mlxrun/prefixes")
    assert get_default_folder({"XDG_CACHE_HOME": "x"}) == tmp_path / ".cache/mlxrun/prefixes"
    assert get_default_folder({}) == tmp_path / ".cache/mlxrun/prefixes"
    monkeypatch.setattr(cache_folder_module.sys, "platform", "darwin")
    assert get_default_folder({}) == tmp_path / "Library/Caches/mlxrun/prefixes"
    assert resolve_cache_folder("~/mine") == tmp_path / "mine"
    with pytest.raises(ConfigError, match="cache.disk_path: ~nobody-here/x: no home folder"):
        resolve_cache_folder("~nobody-here/x")


def test_a_folder_that_cannot_be_used_is_a_config_error(tmp_path: Path) -> None:
    check_folder(tmp_path / "a/b")
    assert list((tmp_path / "a/b").iterdir()) == []
    (tmp_path / "file").touch()
    for bad in (tmp_path / "file", tmp_path / "file/x"):
        with pytest.raises(
            ConfigError, match=r"cache\.disk_path: .*file.* cannot be written: .*; give a folder"
        ):
            check_folder(bad)


def test_a_scan_of_many_files_is_quick(opened: Callable[..., DiskTier], tmp_path: Path) -> None:
    """5,000 files of 120 tensors and 512 ids: about a second; the bound leaves room for slow machines."""
    tensors = {
        f"{layer}.{name}": SerializedTensor("BF16", (1, 1, 2), b"1234")
        for layer in range(60)
        for name in "kv"
    }
    home = ModelFolder(tmp_path, ROOT)
    for number in range(1000):
        record = CacheEntry(b"", ROOT, SnapshotKind.DELTA, 0, 512, array("q", [number] * 512))
        record.key = compute_entry_key(record)
        home.write_file(record.key, encode_entry(record, SerializedPayload(tensors, {}), ROOT))
    began = time.perf_counter()
    assert len(opened().scan()) == 1000
    assert time.perf_counter() - began < 2
