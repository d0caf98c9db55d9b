"""What a report shows of each line, and how lines of several runs become rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxrun.evals.reports import report_lines
from mlxrun.evals.reports.report_lines import LineRows, cut_text, make_preview
from mlxrun.evals.run_folders.run_folder import RunFolder
from mlxrun.evals.run_folders.run_line import RunLine
from mlxrun.jobs.lines.job_file import JobLine
from tests.helpers.report_jobs import TIMING, mixed_lines, run_lines


def make_line(text: str = "4", prompt: str = "2 + 2?", **result: Any) -> RunLine:
    choice = {"message": {"content": text, "reasoning_content": "adds"}, "finish_reason": "stop"}
    body = {"choices": [choice, choice], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}
    record = {"id": "batch_req_0", "custom_id": "a", "response": {"body": body}, "error": None}
    line = JobLine(1, "a", "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]})
    return RunLine("a", 1, line, record | ({"eval": result} if result else {}))


async def test_marks_and_flags(tmp_path: Path) -> None:
    bench = await run_lines(tmp_path, mixed_lines())
    rows = LineRows()
    for line in RunFolder.open(bench.job).read_lines():
        rows.add(0, 0, line, None)
    found = {row.id: (row.answers[0].mark, row.answers[0].flags) for row in rows.rows.values()}
    assert found == {
        "right": ("c", 0),
        "wrong": ("w", 0),
        "cut": ("c", report_lines.CUT),
        "failed": ("f", 0),
        "free": ("u", 0),
        "line 6": ("f", 0),
    }


def test_partly_right_and_empty() -> None:
    answer = LineRows().add(0, 0, make_line(" ", score=0.25, match="x", expected=None, extracted=None), None)
    assert (answer.mark, answer.flags, answer.shown["empty"]) == ("p", report_lines.EMPTY, True)


def test_details_are_those_of_the_record() -> None:
    line = make_line(
        score=0, match="json", expected=False, extracted=None, note="slow", scores={"f1": 0.5}, choices=[0, 1]
    )
    shown = LineRows().add(0, 0, line, TIMING).shown
    assert shown == {
        "answer": "4",
        "reasoning": "adds",
        "choices": ["4"],
        "finish": "stop",
        "tokens": [9, 1],
        "times": [1.0, 2.0, 4.0, 0],
        "match": "json",
        "expected": False,
        "extracted": None,
        "note": "slow",
        "scores": {"f1": 0.5},
        "choice_scores": [0, 1],
        "score": 0,
    }


def test_lines_of_one_id_are_one_row() -> None:
    rows = LineRows()
    rows.add(0, 0, make_line(score=1), None)
    rows.add(1, 0, make_line(score=0), None)
    rows.add(2, 1, make_line(score=0), None)
    first, other = rows.rows.values()
    assert set(first.answers) == {0, 1} and first.is_flip
    assert set(other.answers) == {2} and not other.is_flip, "the same id in another task is another line"
    assert "prompt" not in first.answers[1].shown


def test_other_fractions_are_flips_too() -> None:
    for score, differs in ((0.5, True), (0.25, False), (None, False)):
        rows = LineRows()
        rows.add(0, 0, make_line(score=0.25), None)
        rows.add(1, 0, make_line(score=score) if score is not None else make_line(), None)
        (row,) = rows.rows.values()
        assert row.is_flip is differs


def test_a_prompt_that_differs_is_shown_with_its_run() -> None:
    rows = LineRows()
    rows.add(0, 0, make_line(score=1), None)
    rows.add(1, 0, make_line(prompt="2+2=", score=1), None)
    (row,) = rows.rows.values()
    assert row.prompt == [("user", "2 + 2?", [])]
    assert row.answers[1].shown["prompt"] == [("user", "2+2=", [])]


def test_prompts_that_differ_where_they_are_cut_are_different() -> None:
    rows = LineRows()
    for run, middle in enumerate("ab"):
        rows.add(run, 0, make_line(prompt="x" * 9000 + middle + "x" * 9000), None)
    (row,) = rows.rows.values()
    assert row.answers[1].shown["prompt"] == row.prompt


def test_long_texts_are_cut_in_their_middle() -> None:
    text = "a" * 5000 + "b" * 5000
    before, left, after = cut_text(text, False)
    assert len(before) + left + len(after) == len(text)
    assert set(before) == {"a"} and set(after) == {"b"} and len(before) + len(after) == report_lines.MAX_TEXT
    assert cut_text(text, True) == text and cut_text("a", False) == "a"


def test_previews_are_one_line() -> None:
    assert make_preview("a\n\n  b" + "c" * 1000) == "a b" + "c" * 87
