"""Runs that may be exported, and their scores by group."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from mlxrun.core.errors import JobError
from mlxrun.evals.exports.exported_run import ExportedRun, ExportNames, dump_json
from mlxrun.evals.run_folders.run_folder import RunFolder
from tests.helpers.batch_fakes import Bench, chat, chats, edit_line, write_job
from tests.helpers.export_fakes import LINES, SCORED, finish_rich_job, open_export


async def test_scores_by_group_are_those_of_the_lines(tmp_path: Path) -> None:
    run = await finish_rich_job(tmp_path)
    found, lines = run.summary, list(run.read_lines())
    assert (found.lines, found.failed, run.is_complete) == (len(LINES), 2, True)
    assert found.total.scores.count == len(SCORED) and set(found.groups) == {"a", "a b", "pick"}
    for name, group in found.groups.items():
        scores = [line.score for line in lines if line.group == name and line.score is not None]
        assert group.value == pytest.approx(statistics.fmean(scores))
    assert found.input_tokens == sum(line.tokens[0] for line in lines) > 0
    assert found.groups["a b"].metrics["pass@2"].count == 1


async def test_settings_that_all_lines_share(tmp_path: Path) -> None:
    lines = [chat("a", "x", {"expected": "x"}, temperature=0, max_tokens=4), chat("b", "y", temperature=0)]
    bench = Bench(write_job(tmp_path, lines))
    await bench.run()
    assert open_export(bench.job).summary.generation == {"temperature": 0}


async def test_a_later_start_without_work_is_not_when_it_ended(tmp_path: Path) -> None:
    run = await finish_rich_job(tmp_path)
    last = run.manifest["runs"][-1]
    idle = dict.fromkeys(("computed", "reused", "done", "failed"), 0)
    run.manifest["runs"].append({**last, **idle, "ended": "2099-01-01T00:00:00+00:00"})
    assert run.ended == last["ended"]


async def test_names_of_model_and_task(tmp_path: Path) -> None:
    run = await finish_rich_job(tmp_path, task="sums")
    assert (run.model, run.model_id, run.task) == ("acme/tiny", "mlxrun/acme/tiny", "sums")
    assert open_export(run.run.paths.job, model=None).task == "job"
    cell = tmp_path / "suite/model-a/task-b/seed-1"
    cell.mkdir(parents=True)
    (tmp_path / "suite/suite.json").write_text("{}")
    bench = Bench(write_job(cell, chats(2)))
    await bench.run()
    found = open_export(bench.job)
    assert (found.task, found.cell, found.facts["cell"]) == ("task-b", *["model-a/task-b/seed-1"] * 2)


async def test_an_unfinished_run_is_refused_unless_asked_for(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, chats(9)))
    await bench.run(limit=4)
    run = RunFolder.open(bench.job)
    with pytest.raises(JobError, match="unfinished, with 4 of 9 lines done"):
        ExportedRun.check(run, ExportNames())
    found = ExportedRun.check(run, ExportNames(), partial=True)
    assert not found.is_complete and found.summary.lines == 4 and found.facts["complete"] is False


async def test_runs_without_scores_and_changed_lines_are_refused(tmp_path: Path) -> None:
    bench = Bench(write_job(tmp_path, [chat("a", "x")]))
    await bench.run()
    with pytest.raises(JobError, match="none of its lines is scored"):
        open_export(bench.job)
    run = await finish_rich_job(tmp_path)
    edit_line(run.run.paths.job, 0, lambda line: line.replace(b"say 7", b"say 8", 1))
    with pytest.raises(JobError, match="the line 'right' has changed since the run"):
        open_export(run.run.paths.job)


async def test_an_edited_record_is_named(tmp_path: Path) -> None:
    run = await finish_rich_job(tmp_path)
    edit_line(
        run.run.paths.out, 0, lambda line: line.replace(b'"status_code": 200', b'"status_code": 201', 1)
    )
    with pytest.raises(JobError, match=f"{run.run.paths.out}"):
        open_export(run.run.paths.job)


async def test_the_digest_names_the_answers(tmp_path: Path) -> None:
    run = await finish_rich_job(tmp_path)
    assert run.digest == open_export(run.run.paths.job).digest
    assert run.digest != open_export(run.run.paths.job, task="other").digest


def test_lone_surrogates_are_escaped_in_json() -> None:
    assert dump_json({"a": "ü\ud800"}) == '{"a": "ü\\ud800"}'
