"""timings.jsonl: the times of each finished line, which no answer depends on."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mlxrun.jobs.records.journal import LineTimes, LineTiming, TimingFile, make_timing, read_timings
from tests.helpers.batch_fakes import Bench, chats, finish_job, write_job

TIMING = LineTiming(1, "ab", False, 1e9, 0.5, None, 2.0, 10, 3, 4, 1)


async def test_every_line_of_every_run_has_its_times(tmp_path: Path) -> None:
    bench = await finish_job(tmp_path)
    timings = list(read_timings(bench.paths.timings))
    assert len(timings) == 14 and {timing.run for timing in timings} == {1}
    good = [timing for timing in timings if not timing.failed]
    assert len(good) == 12
    for timing in good:
        assert timing.tries == 1 and timing.output > 0 and timing.first is not None
        assert timing.waited is not None and 0 <= timing.waited <= timing.first <= timing.took
    records = {json.loads(line)["id"] for line in bench.paths.out.read_text().splitlines()}
    assert {f"batch_req_{timing.key}" for timing in good} == records

    await bench.run(retry_failed=True)
    later = list(read_timings(bench.paths.timings))
    assert later[:14] == timings and {timing.run for timing in later[14:]} == {2}


async def test_starting_over_moves_the_times_away(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(3)))
    await bench.run()
    await bench.run(fresh=True)
    (folder,) = bench.paths.earlier.iterdir()
    assert len(list(read_timings(folder / "timings.jsonl"))) == 3
    assert len(list(read_timings(bench.paths.timings))) == 3


async def test_records_and_journal_do_not_depend_on_times(tmp_path: Path) -> None:
    """The files that are compared byte by byte are the same without timings."""
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        bench = Bench(write_job(tmp_path / name, chats(6)))
        if name == "b":
            bench.paths.folder.mkdir()
            bench.paths.timings.mkdir()  # which cannot be appended to
        assert (await bench.run()).exit_code == 0
        found.append(
            [sorted(path.read_bytes().splitlines()) for path in (bench.paths.out, bench.paths.journal)]
        )
    assert found[0] == found[1]


def test_what_is_damaged_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "timings.jsonl"
    file = TimingFile(path)
    file.add([TIMING])
    file.close()
    good = path.read_bytes()
    wrong = [
        b"\xff\n",
        b"[]\n",
        b"{}\n",
        good.replace(b"2.0", b'"2"'),
        good.replace(b"2.0", b"-2"),
        *(good.replace(b"1000000000.0", each) for each in (b"NaN", b"Infinity", b"-1e400", b"9" * 400)),
        good.replace(b'"tries":1', b'"tries":"1"'),
        good.replace(b'"ab"', b'["ab"]'),
        good[:20],
    ]
    path.write_bytes(good + b"".join(wrong) + b"\n" + good)
    assert list(read_timings(path)) == [TIMING, TIMING]
    assert list(read_timings(tmp_path / "none")) == []


def test_a_file_that_cannot_be_written_is_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = TimingFile(tmp_path)
    file.add([TIMING])
    file.add([TIMING])
    file.close()
    assert caplog.text.count("reports will lack the times") == 1
    assert os.listdir(tmp_path) == []


def test_times_are_relative_to_the_start_of_the_line() -> None:
    times = LineTimes(100.0, tries=2)
    times.mark_progress(101.0, 0)
    times.mark_progress(103.5, 1)
    times.mark_progress(104.0, 1)
    timing = make_timing(3, "k", True, times, 110.0, (7, 2, 5))
    assert (timing.run, timing.failed, timing.tries) == (3, True, 2)
    assert (timing.waited, timing.first, timing.took) == (1.0, 3.5, 10.0)
    assert (timing.computed, timing.reused, timing.output) == (7, 2, 5)
