"""Runs as they are read: finished and unfinished ones, and those whose job file has changed."""

from __future__ import annotations

import json
import os
import tracemalloc
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import JobError
from mlxrun.evals.comparisons.comparison import compare_paths
from mlxrun.evals.run_folders.run_folder import RunFolder, open_runs
from mlxrun.jobs.records.output_records import BatchStamp
from mlxrun.jobs.scoring.eval_spec import EvalReader
from mlxrun.jobs.scoring.verdict import ScoredAnswer, Verdict
from tests.helpers.batch_fakes import MIXED, Bench, chat, chats, edit_line, finish_job, write_job
from tests.helpers.eval_runs import run_lines


class Always:
    """A scorer that gives every answer 1."""

    name = "always"
    digest = "00"

    def score(self, answer: ScoredAnswer) -> Verdict:
        return Verdict(1)


def describe(run: RunFolder) -> list[str]:
    """The problems of a run, without the folder."""
    return [str(problem).replace(f"{run.paths.out.parent}/", "") for problem in run.check()]


async def test_a_finished_run_is_read_in_the_order_of_its_job(tmp_path: Path) -> None:
    bench = await finish_job(tmp_path)
    run = RunFolder.open(bench.job)
    lines = list(run.read_lines())
    assert run.state == "done" and run.total == 14 and run.check() == []
    assert [line.id for line in lines] == [*(f"line-{at}" for at in range(12)), "line 13", "long"]
    assert [line.number for line in lines] == list(range(1, 15))
    assert lines[0].line is not None and lines[0].line.custom_id == "line-0"
    assert lines[0].answer is not None and lines[0].answer.startswith("say 0")
    assert (lines[0].score, lines[1].group, lines[0].finish) == (1, "g1", "stop")
    assert (lines[12].answer, lines[12].score, lines[12].finish) == (None, None, None)
    assert lines[12].error is not None and "not JSON" in lines[12].error


async def test_lines_without_an_id_of_their_own_are_named_by_number(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, MIXED))
    await bench.run()
    run = RunFolder.open(bench.job)
    assert [line.id for line in run.read_lines()] == [
        "good",
        "line 2",
        "line 3",
        "param",
        "long",
        "short",
        "url",
    ]
    assert run.check() == []


@pytest.mark.parametrize("ids", [["line 2", None], [None, "line 1"], ["line 2", "line 2"]])
async def test_an_id_may_look_like_the_name_of_a_line(tmp_path: Path, ids: list[str | None]) -> None:
    """Two equal jobs are runs of the same lines, whatever their ids are."""
    lines = [chat("x", "hi", {"expected": "hi"}) | {"custom_id": each} for each in ids]
    jobs = [await run_lines(tmp_path / name, lines) for name in "ab"]
    names = [line.id for line in RunFolder.open(jobs[0]).read_lines()]
    assert len(set(names)) == 2
    (found,) = compare_paths(*jobs).comparisons
    assert found.total.result.lines == 2


async def test_equal_lines_have_a_record_each(tmp_path: Path) -> None:
    bench = Bench(
        write_job(tmp_path, [chat("a", "one"), chat("a", "one"), chat("b", "LONG"), chat("b", "LONG")])
    )
    await bench.run()
    run = RunFolder.open(bench.job)
    assert [(line.id, line.number, line.error is None) for line in run.read_lines()] == [
        ("a", 1, True),
        ("line 2", 2, False),
        ("b", 3, False),
        ("line 4", 4, False),
    ]
    assert run.check() == []


async def test_an_unfinished_run_has_the_lines_that_are_done(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(9)))
    await bench.run(limit=4)
    run = RunFolder.open(bench.job)
    assert run.state == "unfinished" and len(list(run.read_lines())) == 4 and run.check() == []
    with bench.paths.out.open("ab") as file:
        file.write(b'{"id": "batch_req_00')  # a kill
    assert len(list(run.read_lines())) == 4 and run.check() == []


async def test_a_line_that_changed_in_the_job_has_no_line(tmp_path: Path) -> None:
    """The answers are those of the run, so they are read."""
    bench = await finish_job(tmp_path)
    edit_line(bench.job, 2, lambda line: line.replace(b"say 2", b"tell 2", 1))
    run = RunFolder.open(bench.job)
    lines = {line.id: line for line in run.read_lines()}
    assert len(lines) == 14 and [line.id for line in lines.values() if line.line is None] == ["line-2"]
    problems = describe(run)
    assert problems[0] == "job.jsonl: the job file has changed since the run"
    assert len(problems) == 2 and "line 'line-2' changed in the job file since the run" in problems[1]
    bench.job.unlink()
    assert all(line.line is None for line in run.read_lines())
    assert describe(run)[0] == "job.jsonl: the job file is missing"


async def test_a_batch_of_a_server_is_read(tmp_path: Path) -> None:
    """Its keys depend on its id, which is the name of its folder."""
    folder = tmp_path / "batch_12"
    folder.mkdir()
    bench = Bench(write_job(folder, chats(3)), stamp=BatchStamp("batch_12", 5))
    await bench.run()
    run = RunFolder.open(folder)
    assert len(list(run.read_lines())) == 3 and run.check() == []


async def test_the_runs_of_a_folder_have_names(tmp_path: Path) -> None:
    for name in ("m/t/seed-1", "m/t/seed-2"):
        (tmp_path / name).mkdir(parents=True)
        await Bench(write_job(tmp_path / name, chats(2))).run()
    assert [run.name for run in open_runs(tmp_path)] == ["m/t/seed-1", "m/t/seed-2"]
    with pytest.raises(JobError, match="contains 2 runs: m/t/seed-1/job.out.jsonl, m/t/seed-2"):
        RunFolder.open(tmp_path)


async def test_long_lines_are_read_one_by_one(tmp_path: Path) -> None:
    """Of 100 lines with prompts of 100 kB, a few are in memory at once."""
    bench = Bench(write_job(tmp_path, [chat(f"q{at}", "word " * 20_000, max_tokens=1) for at in range(100)]))
    await bench.run()
    assert bench.job.stat().st_size > 10_000_000
    tracemalloc.start()
    try:
        assert sum(1 for _ in RunFolder.open(bench.job).read_lines()) == 100
        assert tracemalloc.get_traced_memory()[1] < 3_000_000
    finally:
        tracemalloc.stop()


async def test_a_run_whose_process_works_is_running(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(6)))
    await bench.run(limit=3)
    run = RunFolder.open(bench.job)
    status = {"state": "running", "pid": os.getpid(), "updated": datetime.now(UTC).isoformat()}

    def read_state(**changed: Any) -> str:
        bench.paths.status.write_text(json.dumps(status | changed))
        return run.state

    assert read_state() == "running" and len(list(run.read_lines())) == 3
    hour_ago = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    assert read_state(updated=hour_ago) == "unfinished" and read_state(state="done") == "unfinished"
    assert read_state(pid=2**22 + 1) == "unfinished"
    assert read_state(pid=10**30) == read_state(pid=0) == read_state(pid=-1) == "unfinished"
    assert read_state(updated="0001-01-01T00:00:00+12:00") == "unfinished"
    bench.paths.status.write_text(json.dumps({key: each for key, each in status.items() if key != "state"}))
    assert run.state == "unfinished"
    assert read_state(done=float("inf")) == "running" and run.progress == (3, 0, 6)
    bench.paths.status.unlink()
    assert run.state == "unfinished"


async def test_an_image_that_changed_is_named(tmp_path: Path) -> None:
    line = chat("a", "x")
    image = {"type": "image_url", "image_url": {"url": "a.png"}}
    line["body"]["messages"][0]["content"] = [{"type": "text", "text": "x"}, image]
    (tmp_path / "a.png").write_bytes(b"one")
    bench = Bench(write_job(tmp_path, [line]))
    await bench.run()
    run = RunFolder.open(bench.job)
    assert run.check() == []
    (tmp_path / "a.png").write_bytes(b"two")
    [problem] = run.check()
    assert problem.kind == "job" and "names a file that has changed since the run (line 1 of" in str(problem)
    assert [line.line for line in run.read_lines()] == [None]


async def test_lines_are_found_however_their_eval_was_read(tmp_path: Path) -> None:
    """No code of a job is imported to read its run. One scorer for all lines replaces an `eval` that ends the
    job otherwise."""
    wanted = {"scorer": "no_such_module_here:score", "expected": 1}
    lines = [chat("a", "x", wanted), chat("b", "x", {"expected": [], "match": "number"}), chat("c", "x")]
    with pytest.raises(JobError, match="is not loaded"):
        await Bench(write_job(tmp_path, lines), evals=EvalReader()).run()
    (tmp_path / "loaded").mkdir()
    bench = Bench(write_job(tmp_path / "loaded", lines), evals=EvalReader(scorer=Always()))
    await bench.run()
    run = RunFolder.open(bench.job)
    assert [line.error is None for line in run.read_lines()] == [True, True, True]
    assert run.check() == []
