"""A job from file to files with an engine that echoes: records, resume, order, retries, exits."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import ConfigError, JobError
from mlxrun.jobs.records.run_paths import Appender
from mlxrun.jobs.run import job_run
from mlxrun.jobs.run.job_run import JobOptions, JobRun
from mlxrun.jobs.run.stop_signals import Interrupted, StopSignals
from tests.helpers.batch_fakes import (
    MIXED,
    Bench,
    FakeClient,
    by_id,
    chat,
    chats,
    read,
    write_job,
)
from tests.helpers.tokenizers import FakeModelInfo


async def test_bad_lines_become_error_records(tmp_path: Path) -> None:
    """Each with its line number and reason; the others run; exit 1."""
    bench = Bench(write_job(tmp_path, MIXED))
    outcome = await bench.run()
    assert outcome.exit_code == 1
    assert sorted(by_id(bench.paths.out)) == ["good", "short"]
    errors = {record["error"]["line"]: record for record in read(bench.paths.errors)}
    assert sorted(errors) == [2, 3, 4, 5, 7]
    assert errors[2]["custom_id"] is None
    assert errors[2]["response"] is None
    assert errors[2]["error"] == {
        "code": "invalid_line",
        "message": "not JSON: Expecting value at column 1",
        "line": 2,
        "param": None,
    }
    assert errors[3]["error"]["message"] == "custom_id 'good' is already used by line 1"
    assert errors[4]["response"]["status_code"] == 400
    assert errors[4]["response"]["body"]["error"]["param"] == errors[4]["error"]["param"] == "temprature"
    assert errors[5]["error"]["code"] == "context_length_exceeded"
    assert errors[5]["eval"] == {
        "score": 0,
        "match": "exact",
        "group": "a",
        "expected": "x",
        "extracted": None,
    }
    assert errors[7]["error"]["param"] == "url"
    assert [(name, g.lines, g.correct, g.failed) for name, g in outcome.scores.list_rows()] == [
        ("a", 2, 1, 1)
    ]


@pytest.mark.parametrize(("n", "metric"), [(2, "pass^3"), (4, "pass@8"), ("4", "pass@4")])
async def test_a_metric_that_a_line_cannot_have_is_its_error_alone(
    tmp_path: Path, n: Any, metric: str
) -> None:
    refused = {**chat("a", "x", n=n), "eval": {"expected": "x", "metrics": [metric]}}
    bench = Bench(write_job(tmp_path, [refused, *chats(2)]))
    outcome = await bench.run()
    (error,) = read(bench.paths.errors)
    assert (outcome.exit_code, error["custom_id"], error["error"]["code"]) == (1, "a", "invalid_line")
    assert error["eval"]["scores"] == {metric: 0} and len(read(bench.paths.out)) == 2


async def test_a_start_that_fails_promises_nothing(tmp_path: Path) -> None:
    """The same command would fail again: its config is wrong."""

    async def start() -> Any:
        raise ConfigError("model.adapter: x: the adapter does not fit the model")

    bench = Bench(write_job(tmp_path, chats(2)), prepare=lambda client: setattr(client, "start", start))
    with pytest.raises(ConfigError, match="does not fit"):
        await bench.run()
    assert bench.said == []


async def test_done_lines_are_not_run_again(tmp_path: Path) -> None:
    """Nothing to do, no engine, nothing changes, the same exit code and scores."""
    bench = Bench(write_job(tmp_path, MIXED))
    first = await bench.run()
    files = [path.read_bytes() for path in (bench.paths.out, bench.paths.errors)]
    second = await bench.run()
    assert (second.exit_code, bench.ran, bench.client.closed) == (1, 0, False)
    assert [path.read_bytes() for path in (bench.paths.out, bench.paths.errors)] == files
    assert second.scores.list_rows() == first.scores.list_rows()
    assert not bench.paths.dropped.exists()


async def test_files_are_read_for_digests_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a large draft model take seconds, in which a server has to answer others."""
    threads: list[threading.Thread] = []
    real = job_run.collect_settings
    monkeypatch.setattr(
        job_run,
        "collect_settings",
        lambda *given: threads.append(threading.current_thread()) or real(*given),  # type: ignore[func-returns-value]
    )
    await Bench(write_job(tmp_path, MIXED)).run()
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


async def test_changed_lines_run_again(tmp_path: Path) -> None:
    """Three lines edited, one removed, one added: four run; the old answers are kept aside."""
    bench = Bench(write_job(tmp_path, chats(10)))
    await bench.run()
    before = by_id(bench.paths.out)
    lines = chats(10)
    for i in (2, 5, 7):
        lines[i] = chat(f"line-{i}", f"now {i}")
    write_job(tmp_path, [*lines[:9], chat("new", "new")])
    outcome = await bench.run()
    assert sorted(bench.client.tries) == ["new", "now 2", "now 5", "now 7"]
    after = by_id(bench.paths.out)
    assert outcome.meter.done == len(after) == 10
    assert {name for name in after if before.get(name) == after[name]} == {
        f"line-{i}" for i in (0, 1, 3, 4, 6, 8)
    }
    assert sorted(by_id(bench.paths.dropped)) == ["line-2", "line-5", "line-7", "line-9"]
    assert any(text.startswith("3 lines will run again") for text in bench.said)
    assert any(text.startswith("the job no longer contains 1 line") for text in bench.said)
    assert f"moved to {bench.paths.dropped}: 4 records" in bench.said


async def test_errors_of_lines_that_are_gone_are_not_kept(tmp_path: Path) -> None:
    """And nothing says that they were."""
    bench = Bench(write_job(tmp_path, [*chats(2), chat("long", "LONG")]))
    await bench.run()
    write_job(tmp_path, chats(2))
    await bench.run()
    assert "the job no longer contains 1 line" in bench.said
    assert not any("moved" in text for text in bench.said) and not bench.paths.dropped.exists()


async def test_a_changed_eval_is_scored_again_and_not_run(tmp_path: Path) -> None:
    """`eval` is no part of a line's key: the stored answer is compared with what is wanted now."""
    bench = Bench(
        write_job(tmp_path, [chat("a", "yes", {"expected": "no", "match": "contains"}), chat("b", "b")])
    )
    outcome = await bench.run()
    assert outcome.scores.groups["all"].correct == 0
    wanted = {"expected": "yes", "match": "contains", "group": "new"}
    write_job(tmp_path, [chat("a", "yes", wanted), chat("b", "b", {"expected": "b", "match": "contains"})])
    outcome = await bench.run()
    assert bench.ran == 0
    assert {name: group.correct for name, group in outcome.scores.groups.items()} == {"new": 1, "all": 1}
    assert {r["custom_id"]: r["eval"]["score"] for r in read(bench.paths.out)} == {"a": 1, "b": 1}


@pytest.mark.parametrize("form", ["chat", "response", "output"])
async def test_a_changed_image_runs_its_line_again(tmp_path: Path, form: str) -> None:
    """The answer belongs to the pixels, not to the path; an unchanged file is no reason to run. The path is
    found in chat messages, in input items, and in outputs of tools."""
    from PIL import Image

    def ask(name: str) -> dict[str, Any]:
        if form == "chat":
            image: Any = {"type": "image_url", "image_url": {"url": f"{name}.png"}}
            return chat(name, [{"type": "text", "text": "what?"}, image])  # type: ignore[arg-type]
        image = {"type": "input_image", "image_url": f"{name}.png"}
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "what?"}, image]}]
        if form == "output":
            call = {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"}
            result = {"type": "function_call_output", "call_id": "c", "output": [image]}
            items = [{"role": "user", "content": f"look at {name}"}, call, result]
        return {"id": name, "input": items}

    for name in "ab":
        Image.new("RGB", (4, 4), "red").save(tmp_path / f"{name}.png")
    bench = Bench(
        write_job(tmp_path, [ask("a"), ask("b"), ask("missing")]), model_info=FakeModelInfo(vision=True)
    )
    assert (await bench.run()).exit_code == 1
    assert bench.ran == 2
    assert read(bench.paths.errors)[0]["error"]["code"] == "invalid_image"
    Image.new("RGB", (4, 4), "blue").save(tmp_path / "b.png")
    Image.new("RGB", (4, 4), "blue").save(tmp_path / "missing.png")
    assert (await bench.run()).exit_code == 0
    assert bench.ran == 2
    (tmp_path / "a.png").touch()
    await bench.run()
    assert bench.ran == 0


async def test_limit(tmp_path: Path) -> None:
    """The first N lines of the file; a later run without it does the rest, one with it loses nothing."""
    bench = Bench(write_job(tmp_path, chats(8)))
    outcome = await bench.run(limit=3)
    assert (outcome.exit_code, outcome.meter.total, bench.ran) == (0, 3, 3)
    await bench.run()
    assert bench.ran == 5
    await bench.run(limit=3)
    assert (bench.ran, len(by_id(bench.paths.out))) == (0, 8)


async def test_a_limit_is_named(tmp_path: Path) -> None:
    """What is done is counted of the lines that are to be done, on resume too."""
    bench = Bench(write_job(tmp_path, chats(8)))
    assert (await bench.run(limit=3)).meter.format_done() == "3 of the first 3 lines (the job has 8)"
    assert (await bench.run(limit=5)).meter.format_done() == "5 of the first 5 lines (the job has 8)"
    assert bench.said == ["continuing: 3 of the first 5 lines (the job has 8) done, 0 failed"]
    assert (await bench.run(limit=1)).meter.format_done() == "1 of 1 line (the job has 8)"
    assert (await bench.run(limit=9)).meter.format_done() == "8 of 8 lines"
    assert bench.said == ["continuing: 5 of 8 lines done, 0 failed"]
    status = json.loads(bench.paths.status.read_text())
    assert (status["total"], status["lines"]) == (8, 8)


async def test_limit_and_retry(tmp_path: Path) -> None:
    """Failed lines beyond the limit stay failed."""
    bench = Bench(write_job(tmp_path, [chat("a", "LONG 1"), chat("b", "LONG 2"), chat("c", "c")]))
    await bench.run()
    await bench.run(retry_failed=True, limit=1)
    assert bench.client.tries == {"LONG 1": 1}
    assert sorted(by_id(bench.paths.errors)) == ["a", "b"]


@pytest.mark.parametrize(
    "name, text",
    [
        ("none.jsonl", "cannot read the job file: No such file"),
        ("folder", "cannot read"),
        ("empty.jsonl", "no lines"),
    ],
)
async def test_a_job_file_that_is_none(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(JobError, match=text):
        await Bench(tmp_path / name).run()


async def test_an_engine_that_starts_when_the_signal_comes_is_closed(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(2)))
    stop = StopSignals(bench.said.append, owns_process=False)

    async def start() -> FakeClient:
        stop.request()
        return bench.client

    setup = replace(bench.make_setup(), start=start)
    with pytest.raises(Interrupted):
        await JobRun(bench.paths, setup, JobOptions(), bench.said.append, stop).run()
    assert bench.client.closed and not bench.ran


async def test_lines_that_could_not_be_written_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job says as many as the next run finds."""
    bench = Bench(write_job(tmp_path, chats(8)))
    await bench.run(limit=3)

    def fail(file: Appender, data: bytes) -> None:
        raise JobError("the disk is full")

    monkeypatch.setattr(Appender, "append", fail)
    with pytest.raises(JobError, match="the disk is full"):
        await bench.run()
    assert bench.said[-1] == "3 of 8 lines done, 0 failed; the same command continues from here"
    monkeypatch.undo()
    assert (await bench.run()).exit_code == 0
    assert "continuing: 3 of 8 lines done, 0 failed" in bench.said
