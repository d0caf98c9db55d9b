"""Records and journal entries reach the disk in an order that loses nothing, and the outputs are sorted."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.durable_writes import sync_handle
from mlxrun.core.errors import JobError
from mlxrun.jobs.records import output_records
from mlxrun.jobs.records.journal import Journal
from mlxrun.jobs.records.run_paths import Appender
from tests.helpers.batch_fakes import Bench, by_id, chat, chats, make_config, read, write_job
from tests.helpers.raw_clients import until

COUNT = 12


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="asks Linux for the names of open files")
async def test_the_journal_never_runs_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are written after their records, so a killed process leaves none without; and no commit ends
    before the records are on disk whose entries it makes durable."""
    bench = Bench(write_job(tmp_path, chats(COUNT)), make_config(rows=2))
    real_sync, real_write = sync_handle, os.write
    written, synced = list[bool](), list[tuple[str, int]]()

    def count_records() -> int:
        return bench.paths.out.read_bytes().count(b"\n")

    def write(handle: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{handle}") == str(bench.paths.journal):
            claimed = sum(1 for _ in Journal(bench.paths.journal).read_entries())
            written.append(claimed + bytes(data).count(b"\n") == count_records())
        return real_write(handle, data)

    def sync(handle: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{handle}")).name
        if name in ("job.out.jsonl", "journal.jsonl"):
            synced.append((name, count_records()))
        real_sync(handle)

    monkeypatch.setattr("mlxrun.jobs.run.line_runner.COMMIT_LINES", 2)
    monkeypatch.setattr("os.write", write)
    monkeypatch.setattr("mlxrun.jobs.records.run_paths.sync_handle", sync)
    bench.client.pause = 0.001
    await bench.run()
    assert 1 < len(written) <= COUNT and all(written)
    names = [name for name, _ in synced if synced[-1][1]]
    assert names[-2:] == ["job.out.jsonl", "journal.jsonl"] and synced[-2][1] == COUNT
    assert len(names) > 3


async def test_lines_that_end_together_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the number of writes does not grow with the rate of lines."""
    calls, append = Counter[str](), Appender.append

    def count(self: Appender, data: bytes) -> None:
        calls[self.path.name] += 1
        append(self, data)

    monkeypatch.setattr(Appender, "append", count)
    bench = Bench(write_job(tmp_path, [*chats(60), "bad"]), make_config(rows=30))
    await bench.run()
    assert len(by_id(bench.paths.out)) == 60 and len(read(bench.paths.errors)) == 1
    assert 0 < calls["job.out.jsonl"] <= 40 and calls["journal.jsonl"] <= 41


async def test_the_last_lines_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the writer is closed in a thread, beside the last turn of the event loop."""
    append = Appender.append

    def append_slowly(self: Appender, data: bytes) -> None:
        time.sleep(0.02)
        append(self, data)

    monkeypatch.setattr(Appender, "append", append_slowly)
    bench = Bench(write_job(tmp_path, chats(20)), make_config(rows=20))
    await bench.run()
    assert len(read(bench.paths.out)) == len(list(Journal(bench.paths.journal).read_entries())) == 20


@pytest.mark.parametrize("name", ["job.out.jsonl", "journal.jsonl"])
async def test_lines_that_cannot_be_written_are_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The run ends and says why; the next one has each line once."""
    bench = Bench(write_job(tmp_path, chats(40)), make_config(rows=4))
    append, left = Appender.append, iter(range(3))

    def fill(self: Appender, data: bytes) -> None:
        if self.path.name == name and next(left, None) is None:
            raise JobError(f"{self.path}: No space left on device")
        append(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Appender, "append", fill)
        with pytest.raises(JobError, match="No space left"):
            await bench.run()
    done = len(by_id(bench.paths.out))
    assert 0 < done < 40
    assert (await bench.run()).exit_code == 0
    assert len(read(bench.paths.out)) == len(by_id(bench.paths.out)) == 40


async def test_an_unwritable_journal_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is closed all the same; records without entries are taken over by the next run."""
    bench = Bench(write_job(tmp_path, chats(8)))

    def full(*_: object) -> None:
        raise JobError("journal.jsonl: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("mlxrun.jobs.records.output_writer.OutputWriter.commit", full)
        with pytest.raises(JobError, match="No space left"):
            await bench.run()
    assert bench.client.closed
    before = by_id(bench.paths.out)
    assert (await bench.run()).exit_code == 0
    assert before.items() <= by_id(bench.paths.out).items()
    assert bench.ran == 8 - len(before)
    assert json.loads(bench.paths.manifest.read_text())["device"] == {"name": "fake"}


async def test_order_input(tmp_path: Path) -> None:
    """The finished output is in the order of the job, also over several runs and for errors."""
    lines: list[Any] = [*chats(30), "bad one", chat("z", "z"), "bad two"]
    bench = Bench(write_job(tmp_path, lines[10:]), make_config(order="completion", rows=16))
    bench.client.pause = 0.002
    await bench.run()
    assert [r["custom_id"] for r in read(bench.paths.out)] != [f"line-{i}" for i in range(10, 30)] + ["z"]
    write_job(tmp_path, lines)
    bench.config = make_config(order="input", rows=16)
    await bench.run()
    assert bench.ran == 10
    assert [r["custom_id"] for r in read(bench.paths.out)] == [f"line-{i}" for i in range(30)] + ["z"]
    assert [r["error"]["line"] for r in read(bench.paths.errors)] == [31, 33]
    done = bench.paths.out.read_bytes()
    await bench.run()
    assert (bench.ran, bench.paths.out.read_bytes()) == (0, done)


async def test_no_line_waits_for_a_slow_one(tmp_path: Path) -> None:
    """With order input too, a slow first line holds nothing back."""
    bench = Bench(
        write_job(tmp_path, [chat("slow", "s" * 2500), *chats(40)]), make_config(order="input", rows=2)
    )
    bench.prepare = lambda client: setattr(client, "waits", lambda text: text.startswith("s" * 9))
    task = asyncio.create_task(bench.run())
    await until(lambda: len(read(bench.paths.out)) == 40)
    assert "slow" not in {r["custom_id"] for r in read(bench.paths.out)}
    bench.client.go_on()
    await task
    assert read(bench.paths.out)[0]["custom_id"] == "slow"


async def test_records_are_one_line_for_every_tool(tmp_path: Path) -> None:
    """Unicode line ends and control characters in answers never break a line."""
    bench = Bench(write_job(tmp_path, [{"id": "a", "prompt": "x\u2028y\x85z\x0b\x1e\u0159\U0001f600"}]))
    await bench.run()
    assert len(bench.paths.out.read_text(encoding="utf-8").splitlines()) == 1
    assert read(bench.paths.out)[0]["response"]["body"]["choices"][0]["text"].startswith(
        "x\u2028y\x85z\x0b\x1e\u0159\U0001f600"
    )
    assert output_records.parse_record(output_records.dump_record(read(bench.paths.out)[0])) is not None
