"""The texts of lines whose scores differ: prompt, expected answer and both answers."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass

from mlxrun.evals.comparisons.comparison import Comparison
from mlxrun.evals.prompt_messages import list_messages
from mlxrun.evals.run_folders.run_folder import RunFolder
from mlxrun.evals.run_folders.run_folder_lines import RunLine
from mlxrun.jobs.lines.job_file import JobLine


@dataclass(frozen=True, slots=True)
class FlipAnswers:
    """Texts of one line. `prompt`: its last message, None if the job file no longer has the line; `first` and
    `second`: the answers (of the first pair of runs, where there are several), or why the line failed."""

    prompt: str | None
    expected: str | None
    first: str
    second: str


def read_flip_answers(comparison: Comparison, most: int) -> dict[str, FlipAnswers]:
    """The texts of the first `most` lines that are better, and of as many that are worse, by id. The runs are
    read once more, so that a comparison keeps no texts."""
    ids = {flip.id for flips in (comparison.better, comparison.worse) for flip in flips[:most]}
    if not ids:
        return {}
    first, second = (_read_lines(run, ids) for run in comparison.cell.runs[0])
    return {
        custom_id: _collect_texts(first[custom_id], second[custom_id])
        for custom_id in first
        if custom_id in second
    }


def _read_lines(run: RunFolder, ids: Collection[str]) -> dict[str, RunLine]:
    return {line.id: line for line in run.read_lines() if line.id in ids}


def _collect_texts(first: RunLine, second: RunLine) -> FlipAnswers:
    messages = list_messages(second.line.body) if isinstance(second.line, JobLine) else []
    expected = second.eval.get("expected")
    return FlipAnswers(
        prompt=messages[-1].text if messages else None,
        expected=expected if isinstance(expected, str) else json.dumps(expected, ensure_ascii=False),
        first=_describe_answer(first),
        second=_describe_answer(second),
    )


def _describe_answer(line: RunLine) -> str:
    if line.error is not None:
        return f"(failed: {line.error})"
    return line.answer or f"(empty; finish: {line.finish})"
