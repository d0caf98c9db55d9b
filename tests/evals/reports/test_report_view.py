"""The words and numbers of a report."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from mlxrun.evals.reports import report_view
from mlxrun.evals.reports.report_runs import ReportRuns, read_runs
from tests.helpers.batch_fakes import chat, chats
from tests.helpers.report_jobs import mixed_lines, read_lines, run_lines, run_other_answers


def read_lead(runs: ReportRuns) -> str:
    return "".join(text for text, _ in report_view.build_lead(runs)).replace("\u00a0", " ")


async def test_one_run(tmp_path: Path) -> None:
    runs = await read_lines(tmp_path, mixed_lines())
    assert report_view.build_title(runs) == "job on embedded"
    assert (
        read_lead(runs)
        == "50.0 % of 4 lines, 95 % interval [15.0, 85.0]. 2 failed, 1 cut at the length, of all 6 lines."
    )
    a, b, total = report_view.list_score_rows(runs.runs)
    assert (a.name, a.group.lines, a.group.value, a.group.failed, a.group.cut_by_length) == (
        "a",
        2,
        0.5,
        0,
        0,
    )
    assert (b.name, b.group.failed, b.group.cut_by_length, b.is_total) == ("b", 1, 1, False)
    assert (total.name, total.group.lines, total.is_total) == ("total", 4, True)
    (run,) = runs.runs
    assert (run.total, run.answered, run.counts["failed"], run.counts["cut"]) == (6, 4, 2, 1)
    assert "4 answered whole" not in run.bar and "3 answered whole, 1 cut, 0 empty, 2 failed" in run.bar
    assert report_view.count_states(runs) == [
        ("all", "all", 6),
        ("wrong", "wrong", 1),
        ("failed", "failed", 2),
        ("cut", "cut", 1),
    ]


async def test_a_job_that_runs_again_was_not_killed(tmp_path: Path) -> None:
    runs = await read_lines(tmp_path, chats(2))
    folder = runs.runs[0].folder
    folder.manifest["runs"].append(folder.manifest["runs"][0] | {"ended": None})
    (fact,) = report_view.list_facts(runs)
    assert fact.startswith("unfinished, ") and ", in 2 runs, 1 of them killed" in fact
    status = {"state": "running", "pid": os.getpid(), "updated": datetime.now(UTC).isoformat()}
    folder.paths.status.write_text(json.dumps(status))
    (fact,) = report_view.list_facts(runs)
    assert fact.startswith("running, ") and ", in 2 runs" in fact and "killed" not in fact


async def test_a_run_without_scores(tmp_path: Path) -> None:
    runs = await read_lines(tmp_path, [chat("a", "one")])
    assert read_lead(runs) == (
        "1 of 1 line answered; none has an expected answer. None failed, was cut or is empty."
    )
    assert report_view.list_score_rows(runs.runs) == []


async def test_answers_that_could_not_be_scored(tmp_path: Path) -> None:
    """They score 0, so that the sentence with the score has to name them."""
    runs = await read_lines(tmp_path, [*chats(3), chat("j", "x", {"match": "judge"})])
    assert read_lead(runs).startswith("75.0 % of 4 lines")
    assert read_lead(runs).endswith(" None failed, was cut or is empty. 1 answer could not be scored.")


async def test_lines_that_all_failed_say_why_at_the_top(tmp_path: Path) -> None:
    """The most frequent reason, of one run and over several."""
    bad = [chat("a", "LONG"), chat("b", "LONG"), "no JSON"]
    runs = await read_lines(tmp_path, bad)
    lead = read_lead(runs)
    assert "3 failed. The most frequent reason (2 lines): " in lead
    many = replace(runs, runs=[*runs.runs, *runs.runs])
    assert "6 lines failed. The most frequent reason (4 lines): " in read_lead(many)


async def test_two_runs(tmp_path: Path) -> None:
    first = await run_lines(tmp_path / "a", chats(4))
    second = await run_other_answers(tmp_path / "b", chats(4), {"line-2"})
    runs = read_runs([first.paths.out, second.paths.out])
    assert report_view.build_title(runs) == "a/job and b/job"
    assert read_lead(runs) == "2 runs with 8 lines in all. 1 line with different scores. No line failed."
    rows = report_view.list_score_rows(runs.runs)
    assert [(row.name, row.run, row.is_first, row.is_last) for row in rows[:2]] == [
        ("g0", 0, True, False),
        ("g0", 1, False, True),
    ]
    assert ("flip", "differ between runs", 1) in report_view.count_states(runs)


async def test_lines_that_were_no_part_of_a_run(tmp_path: Path) -> None:
    bench = await run_lines(tmp_path, chats(4))
    await bench.run(fresh=True, limit=3)
    runs = read_runs([bench.job])
    assert read_lead(runs).endswith("1 line not part of the run (--limit).")
    assert report_view.list_facts(runs)[0].startswith("limited, ")
    assert (runs.runs[0].unfinished, runs.runs[0].total) == (0, 3)


async def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    bench = await run_lines(tmp_path, chats(4))
    await bench.run(fresh=True, limit=3)
    manifest = json.loads(bench.paths.manifest.read_text())
    del manifest["runs"][-1]["limit"]  # as after a kill
    bench.paths.manifest.write_text(json.dumps(manifest))
    runs = read_runs([bench.job])
    assert read_lead(runs).endswith("1 line not finished.")
    assert report_view.list_facts(runs)[0].startswith("unfinished, ")


async def test_a_mixed_run_says_so(tmp_path: Path) -> None:
    runs = await read_lines(tmp_path, chats(1))
    assert "several versions" not in report_view.list_facts(runs)[0]
    runs.runs[0].folder.manifest["mixed"] = True
    assert report_view.list_facts(runs)[0].endswith("answers of several versions or devices")
