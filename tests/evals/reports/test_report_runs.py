"""The runs of a report, and what is wrong with their folders."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlxrun.core.errors import JobError
from mlxrun.evals.reports.report_runs import read_runs
from tests.helpers.batch_fakes import chats, edit_line
from tests.helpers.report_jobs import mixed_lines, run_lines, write_suite


async def test_counts_and_reasons(tmp_path: Path) -> None:
    bench = await run_lines(tmp_path, mixed_lines())
    found = read_runs([bench.job])
    (run,) = found.runs
    assert dict(run.counts) == {"lines": 6, "failed": 2, "cut": 1, "empty": 0, "unscored": 0, "retried": 0}
    assert run.scores.compute_total().lines == 4 and len(run.timings) == 6
    reasons = run.list_reasons()
    assert [(reason.count, reason.ids) for reason in reasons] == [(1, ["failed"]), (1, ["line 6"])]
    assert [row.id for row in found.rows] == ["right", "wrong", "cut", "failed", "free", "line 6"]


async def test_runs_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    paths = [
        (await run_lines(tmp_path / name, chats(2), f"{job}.jsonl")).paths.out
        for name, job in ("ax", "bx", "by")
    ]
    assert [run.label for run in read_runs(paths).runs] == ["a/x", "b/x", "y"]
    assert [run.label for run in read_runs(paths[:1]).runs] == ["x"]


async def test_cells_of_a_suite(tmp_path: Path) -> None:
    suite = tmp_path / "s.out"
    for model in ("m1", "m2"):
        for variant in ("seed-1", "seed-2"):
            await run_lines(suite / model / "sums" / variant, chats(3))
    write_suite(suite)
    found = read_runs([suite])
    assert found.suite == suite and found.tasks == ["sums"]
    assert [run.label for run in found.runs][:2] == ["m1/sums/seed-1", "m1/sums/seed-2"]
    assert (found.runs[3].model, found.runs[3].task, found.runs[3].variant) == ("m2", "sums", "seed-2")
    assert len(found.rows) == 3 and set(found.rows[0].answers) == {0, 1, 2, 3}

    shutil.copytree(suite, tmp_path / "other.out")
    assert read_runs([suite, tmp_path / "other.out"]).suite is None, "cells of two suites"


async def test_problems_of_a_folder_are_said_and_the_rest_is_read(tmp_path: Path) -> None:
    bench = await run_lines(tmp_path, chats(4))
    edit_line(bench.paths.out, 1, lambda line: line.replace(b"say", b"sat"))
    said: list[str] = []
    found = read_runs([bench.job], say=said.append)
    assert len(said) == 1 and "job.out.jsonl:2" in said[0] and "edited" in said[0]
    assert found.runs[0].problems == said


async def test_an_unfinished_run(tmp_path: Path) -> None:
    bench = await run_lines(tmp_path, chats(4))
    await bench.run(fresh=True, limit=3)
    (run,) = read_runs([bench.job]).runs
    assert (run.unfinished, run.left_out, run.counts["lines"]) == (0, 1, 3)


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no such file"):
        read_runs([tmp_path / "none.jsonl"])
