"""Lines in flight: how many, what is tried again, and what ends the run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxrun.core.errors import EngineDead, JobError
from mlxrun.jobs.run.line_runner import LOAD_LINES, UPDATE_EVERY, LineRunner
from mlxrun.jobs.run.progress import ProgressView
from mlxrun.jobs.scoring.answer_values import SearchTimer
from tests.helpers.batch_fakes import Bench, by_id, chat, chats, make_config, read, write_job
from tests.helpers.command_processes import PATIENCE
from tests.helpers.raw_clients import until
from tests.helpers.scorer_bombs import set_limits


async def test_failed_lines_run_again_on_request_only(tmp_path: Path) -> None:
    """A failed line stays failed until --retry-failed; its error record goes if it succeeds."""
    bench = Bench(write_job(tmp_path, [chat("a", "BUSY 9"), chat("b", "b"), "bad"]), make_config(retries=0))
    assert (await bench.run()).exit_code == 1
    assert bench.ran == 2
    assert (await bench.run()).exit_code == 1
    assert bench.ran == 0
    assert any("2 failed (--retry-failed runs these again)" in text for text in bench.said)
    bench.config = make_config(retries=9)
    bench.no_sleep = True
    assert (await bench.run(retry_failed=True)).exit_code == 1
    assert bench.client.tries == {"BUSY 9": 10}
    assert sorted(by_id(bench.paths.out)) == ["a", "b"]
    assert [record["error"]["line"] for record in read(bench.paths.errors)] == [3]


async def test_transient_errors_are_tried_again_and_others_not(tmp_path: Path) -> None:
    """`retries` more tries for what may pass; none for what is the request's own fault, or ours."""
    bench = Bench(
        write_job(tmp_path, [chat("a", f"{word} 2 {word}") for word in ("BUSY",)]), make_config(retries=2)
    )
    bench.no_sleep = True
    assert (await bench.run()).exit_code == 0
    assert bench.ran == 3
    lines = [chat(word, f"{word} 5") for word in ("BUSY", "BROKEN", "LONG", "BUG")]
    write_job(tmp_path, lines)
    assert (await bench.run()).exit_code == 1
    assert bench.client.tries == {"BUSY 5": 3, "BROKEN 5": 3, "LONG 5": 1, "BUG 5": 1}
    errors = {record["custom_id"]: record for record in read(bench.paths.errors)}
    assert {name: record["response"]["status_code"] for name, record in errors.items()} == {
        "BUSY": 429,
        "BROKEN": 500,
        "LONG": 400,
        "BUG": 500,
    }
    assert errors["BUG"]["error"]["message"] == "internal error (KeyError)"


@pytest.mark.parametrize("turns", range(4))
async def test_the_thread_of_commits_ends_with_a_run_that_fails(turns: int) -> None:
    """Also if a commit is due at that moment. The run would wait for it for ever."""
    nothing: Any = SimpleNamespace(commit=lambda: None)
    runner = LineRunner(nothing, nothing, nothing, nothing, nothing, nothing)
    committing = asyncio.create_task(runner._commit_regularly())
    await asyncio.sleep(0.05)
    runner._commit_due.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    committing.cancel()
    await asyncio.wait((committing,), timeout=PATIENCE)
    assert committing.cancelled()


async def test_a_dead_engine_ends_the_run_and_the_job_can_go_on(tmp_path: Path) -> None:
    """Exit 3; what was finished stays, the manifest says how the run ended, and nothing else is lost."""
    bench = Bench(
        write_job(tmp_path, [*chats(6), chat("dead", "DEAD"), chat("last", "last")]),
        make_config(concurrency=1),
    )
    with pytest.raises(EngineDead):
        await bench.run()
    assert bench.client.closed
    assert sorted(by_id(bench.paths.out)) == [f"line-{i}" for i in range(6)]
    assert any("6 of 8 lines done" in text and "the same command continues" in text for text in bench.said)
    write_job(tmp_path, [*chats(6), chat("last", "last")])
    assert (await bench.run()).exit_code == 0
    assert bench.ran == 1
    manifest = json.loads(bench.paths.manifest.read_text())
    assert [(run["exit"], run["done"]) for run in manifest["runs"]] == [(3, 6), (0, 1)]


async def test_the_window_is_bounded(tmp_path: Path) -> None:
    """At most `concurrency` lines are in flight, by default twice the rows."""
    for config, most in ((make_config(concurrency=3), 3), (make_config(rows=4), 8)):
        bench = Bench(write_job(tmp_path, chats(40)), config)
        bench.prepare = lambda client: client.stop_after(0)
        task = asyncio.create_task(bench.run(fresh=True))
        await until(lambda bench=bench, most=most: bench.client.busy == most)
        bench.client.go_on()
        await task
        assert bench.client.most == most


async def test_the_input_changes_while_it_runs(tmp_path: Path) -> None:
    """A line is not answered under another line's key."""
    bench = Bench(write_job(tmp_path, chats(3 * LOAD_LINES)), make_config(concurrency=1))
    bench.prepare = lambda client: client.stop_after(15)  # in the third line; some more have been read
    task = asyncio.create_task(bench.run())
    await until(lambda: len(read(bench.paths.out)) == 2 and bench.client.busy)
    text = bench.job.read_text()
    with bench.job.open("r+") as file:
        file.write(text.replace("say 17", "SAY 17").replace("say 18", "SAY 18"))
    bench.client.go_on()
    with pytest.raises(JobError, match="changed while the job was running"):
        await task


async def test_progress_is_never_older_than_a_second(tmp_path: Path) -> None:
    """Views, and with them /v1/status of a server, are updated while no line ends."""
    bench, updates = Bench(write_job(tmp_path, [chat("slow", "s")])), list[int]()
    bench.prepare = lambda client: setattr(client, "waits", lambda text: len(updates) < 4)

    class Watch(ProgressView):
        def update(self) -> None:
            updates.append(bench.client.output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.helpers.batch_fakes.make_view", lambda meter, stream: Watch())
        await bench.run()
    assert updates[:4] == [0, 0, 0, 0] and UPDATE_EVERY < 1


async def test_a_slow_pattern_harms_its_line_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It scores 0 after a second with a note and a warning; the next run does not search it again."""
    set_limits(monkeypatch, PATIENCE)  # a busy machine gives little of the second, which is processor time
    slow = {"expected": "^(a|aa)+$", "match": "regex", "group": "slow"}
    quick = {"expected": "(a+)+$", "match": "regex", "group": "quick"}
    lines = [chat("slow", "a" * 200 + "!", slow), chat("quick", "a" * 40 + "!", quick), *chats(4)]
    bench = Bench(write_job(tmp_path, lines))
    outcome = await bench.run()
    assert outcome.exit_code == 1  # an answer could not be scored
    assert {name: group.correct for name, group in outcome.scores.groups.items()} == {
        "slow": 0,
        "quick": 0,
        "g0": 2,
        "g1": 2,
    }
    out = by_id(bench.paths.out)
    result = json.loads(out["slow"])["eval"]
    assert result["extracted"] is None and "for 1 s" in result["note"]
    assert "note" not in json.loads(out["quick"])["eval"]
    assert "job.jsonl:1: line 'slow' scores 0: the pattern was searched for 1 s" in caplog.text
    caplog.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SearchTimer, "search", lambda *_: pytest.fail("it is searched again"))
        await bench.run()
    assert bench.ran == 0 and by_id(bench.paths.out) == out
