"""The disk tier: bad files are misses, a writer that nobody waits for, two processes at once."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxrun.core.step_plan import SerializedPayload, SerializedTensor, SnapshotKind
from mlxrun.engine.prefix_cache import cache_folder, disk_tier
from mlxrun.engine.prefix_cache.cache_folder import ModelFolder
from mlxrun.engine.prefix_cache.disk_tier import DiskTier
from mlxrun.engine.prefix_cache.entry import CacheCounters, CacheEntry, compute_entry_key
from mlxrun.engine.prefix_cache.entry_file import encode_entry
from tests.helpers.cache_files import OTHER, ROOT, make_entry, write_entry
from tests.helpers.command_processes import start_program
from tests.helpers.plain_user import obey_permissions


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    """Opens disk tiers on one folder, and closes them."""
    opened: list[DiskTier] = []

    def open_one(root: bytes = ROOT, **options: Any) -> DiskTier:
        opened.append(DiskTier(tmp_path, root, **{"counters": CacheCounters()} | options))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close()


def get_counters(tier: DiskTier) -> CacheCounters:
    return tier._counters


class SlowDisk:
    """A disk that writes one file for each `release`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = threading.Event()
        self._turns = threading.Semaphore(0)
        write_file = ModelFolder.write_file

        def wait_and_write(model: ModelFolder, key: bytes, chunks: Any) -> int:
            self.begun.set()
            assert self._turns.acquire(timeout=60)
            return write_file(model, key, chunks)

        monkeypatch.setattr(ModelFolder, "write_file", wait_and_write)

    def release(self, turns: int = 1) -> None:
        self._turns.release(turns)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_written_entries_are_found_again(open_tier: Callable[..., DiskTier], tmp_path: Path) -> None:
    first = open_tier()
    made = [make_entry(number) for number in range(5)]
    assert all(first.write(entry, payload) for entry, payload in made)
    first.close()
    assert get_counters(first).written == 5
    second = open_tier()
    assert {entry.key for entry in second.scan()} == {entry.key for entry, _ in made}
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert first.nbytes == second.nbytes == on_disk
    assert [second.read(entry) for entry, _ in made] == [payload for _, payload in made]
    assert (get_counters(second).read, get_counters(second).refused) == (5, 0)
    assert not list(tmp_path.rglob("*.tmp"))
    if os.name == "posix":
        assert (tmp_path / ROOT.hex()).stat().st_mode & 0o077 == 0


def test_a_closed_store_writes_no_more_but_reads(open_tier: Callable[..., DiskTier]) -> None:
    tier, (entry, payload) = open_tier(), make_entry(1)
    tier.write(entry, payload)
    tier.close()
    tier.close()
    assert not tier.write(*make_entry(2))
    assert tier.read(entry) == payload
    tier.delete(entry)
    assert tier.read(entry) is None
    assert tier.nbytes == 0


def test_nothing_there_is_nothing(open_tier: Callable[..., DiskTier], tmp_path: Path) -> None:
    tier, (entry, _) = open_tier(), make_entry(1)
    assert list(tier.scan()) == []
    assert tier.read(entry) is None
    tier.delete(entry)
    tier.close()
    assert (tier.nbytes, get_counters(tier)) == (0, CacheCounters())
    assert list(tmp_path.iterdir()) == []


def test_least_recently_used_first(open_tier: Callable[..., DiskTier], tmp_path: Path) -> None:
    made = [write_entry(tmp_path, number) for number in range(6)]
    for age, (_, _, path) in enumerate(made):
        os.utime(path, (1000 + age, 1000 + age))
    tier = open_tier()
    assert [r.key for r in tier.scan()] == [r.key for r, _, _ in made]
    for used in (2, 0):
        assert tier.read(made[used][0]) is not None
    assert [r.key for r in open_tier().scan()] == [made[n][0].key for n in (1, 3, 4, 5, 2, 0)]


def test_bad_files_are_deleted_and_a_miss(open_tier: Callable[..., DiskTier], tmp_path: Path) -> None:
    made = [write_entry(tmp_path, number) for number in range(4)]
    tier = open_tier()
    assert len(tier.scan()) == 4
    before = tier.nbytes
    flipped = bytearray(made[0][2].read_bytes())
    flipped[-1] ^= 1  # in the payload, which a scan does not read
    made[0][2].write_bytes(flipped)
    made[1][2].write_bytes(made[1][2].read_bytes()[:-1])
    made[2][2].unlink()
    assert [tier.read(entry) for entry, _, _ in made] == [None, None, None, made[3][1]]
    assert get_counters(tier).refused == 2
    assert tier.nbytes == made[3][2].stat().st_size < before
    assert [path.name for path in (tmp_path / ROOT.hex()).iterdir()] == [made[3][2].name]


def test_a_scan_deletes_swapped_renamed_and_torn_files(
    open_tier: Callable[..., DiskTier], tmp_path: Path
) -> None:
    paths = [write_entry(tmp_path, number)[2] for number in range(5)]
    one, two = paths[0].read_bytes(), paths[1].read_bytes()
    paths[0].write_bytes(two)
    paths[1].write_bytes(one)
    paths[2].rename(paths[2].with_name("00" * 16 + ".safetensors"))
    paths[3].write_bytes(paths[3].read_bytes()[:-1])
    tier = open_tier()
    assert [entry.key.hex() for entry in tier.scan()] == [paths[4].stem]
    assert get_counters(tier).refused == 4
    assert [path.name for path in (tmp_path / ROOT.hex()).iterdir()] == [paths[4].name]


def test_what_is_not_ours_is_not_touched(open_tier: Callable[..., DiskTier], tmp_path: Path) -> None:
    _, _, other = write_entry(tmp_path, root=OTHER)
    home = tmp_path / ROOT.hex()
    home.mkdir()
    name = make_entry(1)[0].key.hex()
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
    tier = open_tier()
    assert list(tier.scan()) == []
    assert all(path.exists() for path in [*strange, other, home / f"{'0' * 32}.safetensors"])
    assert get_counters(tier).refused == 0


def test_a_file_of_another_model_in_our_folder_is_deleted(
    open_tier: Callable[..., DiskTier], tmp_path: Path
) -> None:
    """It was copied there, or left by an older version with other fingerprints."""
    entry, _, path = write_entry(tmp_path, root=OTHER)
    moved = ModelFolder(tmp_path, ROOT).locate_file(entry.key)
    moved.parent.mkdir()
    path.rename(moved)
    tier = open_tier()
    assert list(tier.scan()) == []
    assert (get_counters(tier).refused, moved.exists()) == (1, False)


def test_a_file_that_holds_another_entry_is_refused(
    open_tier: Callable[..., DiskTier], tmp_path: Path
) -> None:
    entry, _, path = write_entry(tmp_path)
    assert open_tier().read(replace(entry, ids=array("q", [1, 2, 3, 4]))) is None
    assert not path.exists()


def test_left_overs_of_dead_processes_are_removed(open_tier: Callable[..., DiskTier], tmp_path: Path) -> None:
    home = tmp_path / ROOT.hex()
    home.mkdir()
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    name, pid, me = "ab" * 16, done.pid, os.getpid()
    gone = [home / f"{name}.{pid}.01234567-3.tmp", home / f"{name}.{me}.01234567-3.tmp"]
    kept = [
        home / f"{name}.{me}.{cache_folder._PROCESS_TOKEN}-3.tmp",
        home / f"{name}.{os.getppid()}.01234567-3.tmp",
    ]
    old = home / f"{name}.{os.getppid()}.76543210-1.tmp"
    for path in (*gone, *kept, old):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    open_tier().scan()
    assert sorted(home.iterdir()) == sorted(kept)


# -- the queue ---------------------------------------------------------------------------------------


def test_a_pending_write_is_read_and_counted(
    open_tier: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, tier = SlowDisk(monkeypatch), open_tier()
    (first, one), (second, two) = make_entry(1), make_entry(2)
    assert tier.write(first, one) and tier.write(second, two) and tier.write(second, two)
    assert disk.begun.wait(60)
    assert tier.read(first) is one and tier.read(second) is two
    assert tier.nbytes == one.nbytes + two.nbytes + 64
    disk.release(2)
    tier.close()
    assert (get_counters(tier).written, get_counters(tier).read) == (2, 0)


def test_an_entry_that_changes_while_it_is_written_is_written_again(
    open_tier: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have got logprobs after the writer had read it."""
    disk, tier = SlowDisk(monkeypatch), open_tier()
    (entry, old), (_, new) = make_entry(1), make_entry(2, 128)
    assert tier.write(entry, old)
    assert disk.begun.wait(60)
    assert tier.write(entry, new) and tier.read(entry) is new
    assert tier.nbytes == new.nbytes + 32
    disk.release(2)
    tier.close()
    assert tier.read(entry) == new
    assert tier.nbytes > 0
    assert len(open_tier().scan()) == 1


def test_deleting_a_pending_write_cancels_it(
    open_tier: Callable[..., DiskTier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, tier = SlowDisk(monkeypatch), open_tier()
    made = [make_entry(number) for number in range(3)]
    for entry, payload in made:
        tier.write(entry, payload)
    assert disk.begun.wait(60)
    tier.delete(made[0][0])  # under way
    tier.delete(made[1][0])  # waiting
    assert tier.read(made[0][0]) is None and tier.read(made[1][0]) is None
    assert tier.nbytes == made[2][1].nbytes + 32
    assert tier.write(*made[0])  # wanted after all
    disk.release(5)
    tier.close()
    names = {path.stem for path in tmp_path.rglob("*.safetensors")}
    assert names == {made[0][0].key.hex(), made[2][0].key.hex()}
    assert {entry.key.hex() for entry in open_tier().scan()} == names


def test_delete_then_write_again_many_times(open_tier: Callable[..., DiskTier]) -> None:
    tier, (entry, payload) = open_tier(), make_entry(1)
    rng = random.Random(3)
    there = False
    for _ in range(300):
        there = rng.random() < 0.5
        if there:
            assert tier.write(entry, payload)
        else:
            tier.delete(entry)
        if rng.random() < 0.3:
            assert (tier.read(entry) == payload) == there
    tier.close()
    assert (tier.read(entry) == payload) == there
    assert len(open_tier().scan()) == there


def test_a_full_queue_drops_and_does_not_block(
    open_tier: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, tier = SlowDisk(monkeypatch), open_tier(queue_bytes=250)
    taken = [tier.write(*make_entry(number)) for number in range(5)]
    assert taken == [True, True, False, False, False]
    disk.release(9)
    wait_for(lambda: get_counters(tier).written == 2)
    assert tier.write(*make_entry(9, size=4000))  # larger than the queue, which is empty
    tier.close()
    assert get_counters(tier).written == 3


def test_reads_go_before_writes(
    open_tier: Callable[..., DiskTier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, payload, _ = write_entry(tmp_path, 1)
    tier, new = open_tier(), make_entry(2)
    real = disk_tier.load_entry

    def slow(*args: Any, **options: Any) -> Any:
        tier.write(*new)
        time.sleep(0.1)
        assert get_counters(tier).written == 0
        return real(*args, **options)

    monkeypatch.setattr(disk_tier, "load_entry", slow)
    assert tier.read(entry) == payload
    wait_for(lambda: get_counters(tier).written == 1)


# -- disks that fail ---------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EIO, errno.EDQUOT])
def test_a_disk_that_takes_no_more_is_one_warning(
    code: int,
    open_tier: Callable[..., DiskTier],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    old, payload, _ = write_entry(tmp_path, 1)
    tier = open_tier()
    tier.scan()
    before = tier.nbytes
    broken = True

    def failing(*args: Any) -> None:
        if broken:
            raise OSError(code, os.strerror(code))

    real = Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, to: failing() or real(path, to))
    now = time.monotonic()
    monkeypatch.setattr(disk_tier, "time", SimpleNamespace(monotonic=lambda: now, time_ns=time.time_ns))
    caplog.set_level(logging.WARNING)
    for number in (2, 3):
        tier.write(*make_entry(number))
        wait_for(lambda: tier.nbytes == before)
        assert not tier.write(*make_entry(4))
        assert tier.read(old) == payload
        now += disk_tier.RETRY_SECONDS + 1
    assert len(caplog.records) == 1
    assert os.strerror(code) in caplog.text
    assert not list(tmp_path.rglob("*.tmp"))
    broken = False
    assert tier.write(*make_entry(5))
    tier.close()
    assert get_counters(tier).written == 1
    assert {entry.key for entry in open_tier().scan()} == {old.key, make_entry(5)[0].key}


def test_a_read_only_folder_is_read(
    open_tier: Callable[..., DiskTier], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is not deleted is said."""
    entry, payload, path = write_entry(tmp_path)
    path.parent.chmod(0o500)
    with obey_permissions():
        tier = open_tier()
        try:
            assert len(tier.scan()) == 1
            assert tier.read(entry) == payload
            tier.write(*make_entry(2))
            wait_for(lambda: not tier.write(*make_entry(3)))
            tier.delete(entry)
        finally:
            tier.close()
            path.parent.chmod(0o700)
    assert path.exists()
    assert f"{path}: not deleted: Permission denied" in caplog.text


def test_a_folder_that_cannot_be_made_is_a_miss(
    open_tier: Callable[..., DiskTier], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / ROOT.hex()).write_text("mine")
    tier, (entry, payload) = open_tier(), make_entry(1)
    assert list(tier.scan()) == []
    assert tier.write(entry, payload)
    wait_for(lambda: not tier.write(*make_entry(2)))
    assert tier.read(entry) is None
    tier.delete(entry)
    tier.close()
    assert (tmp_path / ROOT.hex()).read_text() == "mine"
    assert len(caplog.records) == 1


def test_a_folder_that_goes_away_is_made_again(open_tier: Callable[..., DiskTier], tmp_path: Path) -> None:
    tier = open_tier()
    for number in range(3):
        tier.write(*make_entry(number))
        wait_for(lambda n=number: get_counters(tier).written == n + 1)
        for path in (tmp_path / ROOT.hex()).iterdir():
            path.unlink()
        (tmp_path / ROOT.hex()).rmdir()
    assert tier.read(make_entry(0)[0]) is None


def test_a_payload_that_cannot_be_written_is_dropped(open_tier: Callable[..., DiskTier]) -> None:
    tier, (entry, _) = open_tier(), make_entry(1)
    assert tier.write(entry, SerializedPayload({"x": SerializedTensor("F9", (1,), b"1")}, {}))
    tier.write(*make_entry(2))
    tier.close()
    assert get_counters(tier).written == 1
    assert [entry.key for entry in open_tier().scan()] == [make_entry(2)[0].key]


# -- several processes -------------------------------------------------------------------------------

WRITER = """
import random, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from tests.helpers.cache_files import ROOT, make_entry
from mlxrun.engine.prefix_cache.disk_tier import DiskTier
from mlxrun.engine.prefix_cache.entry import CacheCounters

tier = DiskTier(Path(sys.argv[1]), ROOT, counters=CacheCounters())
rng, left = random.Random(int(sys.argv[2])), int(sys.argv[3])
print("ready", flush=True)
while left:
    left -= 1
    entry, payload = make_entry(rng.randrange(40), 200_000)
    what = rng.random()
    if what < 0.5:
        tier.write(entry, payload)
    elif what < 0.9:
        found = tier.read(entry)
        assert found is None or found == payload
    else:
        tier.delete(entry)
tier.close()
print("refused", tier._counters.refused, flush=True)
"""


def process(where: Path, seed: int, steps: int) -> AbstractContextManager[subprocess.Popen[str]]:
    code = WRITER.format(tests=str(Path(__file__).parents[3]))
    command = [sys.executable, "-c", code, str(where), str(seed), str(steps)]
    return start_program(command, cwd=Path(__file__).parents[3])


def test_killed_writers_leave_complete_files_or_none(
    open_tier: Callable[..., DiskTier], tmp_path: Path
) -> None:
    rng = random.Random(4)
    for seed in range(8):
        with process(tmp_path, seed, -1) as child:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            time.sleep(rng.random() * 0.15)
            child.send_signal(signal.SIGKILL)
        tier = open_tier()
        for entry in tier.scan():
            assert tier.read(entry) is not None
        assert get_counters(tier).refused == 0
        assert not list(tmp_path.rglob("*.tmp"))


def test_two_processes_on_one_folder(open_tier: Callable[..., DiskTier], tmp_path: Path) -> None:
    tier = open_tier()
    with process(tmp_path, 1, 600) as one, process(tmp_path, 2, 600) as other:
        children = (one, other)
        while any(child.poll() is None for child in children):
            for entry in tier.scan():
                tier.read(entry)
        for child in children:
            out, _ = child.communicate()
            assert (child.returncode, out) == (0, "ready\nrefused 0\n")
    assert get_counters(tier).refused == 0
    assert all(tier.read(entry) is not None for entry in tier.scan())


# -- many files --------------------------------------------------------------------------------------


def test_a_scan_of_many_files_is_quick(open_tier: Callable[..., DiskTier], tmp_path: Path) -> None:
    """Counted and not timed: some two calls for each of the 120 tensors of a file, none for its 512 ids."""
    tensors = {
        f"{layer}.{name}": SerializedTensor("BF16", (1, 1, 2), b"1234")
        for layer in range(60)
        for name in "kv"
    }
    home = ModelFolder(tmp_path, ROOT)
    for number in range(100):
        entry = CacheEntry(b"", ROOT, SnapshotKind.DELTA, 0, 512, array("q", [number] * 512))
        entry.key = compute_entry_key(entry)
        home.write_file(entry.key, encode_entry(entry, SerializedPayload(tensors, {}), ROOT))
    tier, calls = open_tier(), Counter[str]()
    sys.setprofile(lambda frame, event, arg: calls.update([event]))
    try:
        found = tier.scan()
    finally:
        sys.setprofile(None)
    assert len(found) == 100
    assert calls["call"] + calls["c_call"] < 100 * 400, calls
