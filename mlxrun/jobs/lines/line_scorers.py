"""Loads the scorers that the lines of a job file name, before anything else is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mlxrun.core.errors import JobError
from mlxrun.jobs.lines.job_file import open_job, parse_line, read_lines
from mlxrun.jobs.run.progress import pluralize
from mlxrun.jobs.scoring.custom_scorer import load_scorer
from mlxrun.jobs.scoring.eval_spec import EvalReader
from mlxrun.jobs.scoring.verdict import Scorer, UnloadedScorer

NO_CHANGES: Mapping[str, Any] = MappingProxyType({})


def make_eval_reader(
    job: Path, scorer: str | None = None, changes: Mapping[str, Any] = NO_CHANGES
) -> EvalReader:
    """How a command reads the `eval` of a job's lines. `scorer`: scores all of them, as module:function;
    `changes`: keys that replace those of the lines. JobError if a scorer cannot be loaded."""
    own = None if scorer is None else load_scorer(scorer)
    return EvalReader(load_line_scorers(job), changes, own)


def report_likelihood_lines(job: Path, name: str, say: Callable[[str], None]) -> bool:
    """Name the lines of a job that compare likelihoods, which no other match, scorer or judge can score.
    Whether there are other lines."""
    left, lines = _count_likelihood_lines(job)
    if left:
        count = pluralize(lines, "line") if left == lines else f"{left} of {pluralize(lines, 'line')}"
        say(f"{name}: {count} with `match: likeliest` left as they are: they have no answer text")
    return left < lines or not lines


def _count_likelihood_lines(job: Path) -> tuple[int, int]:
    found = lines = 0
    with open_job(job) as file:
        for raw in read_lines(file):
            lines += 1
            if b'"likeliest"' in raw.data:
                wanted = parse_line(raw, evals=EvalReader(scorers=None)).eval
                found += wanted is not None and wanted.name == "likeliest"
    return found, lines


def load_line_scorers(job: Path) -> dict[str, Scorer]:
    """The scorers that lines name in `eval`, by name; JobError with the line for one that cannot be loaded.
    Only commands call this: it runs code that the job file names."""
    found: dict[str, Scorer] = {}
    with open_job(job) as file:
        for raw in read_lines(file):
            if b'"scorer"' not in raw.data:  # spares parsing most lines
                continue
            wanted = parse_line(raw, evals=EvalReader(scorers=None)).eval
            scorer = None if wanted is None else wanted.scorer
            if isinstance(scorer, UnloadedScorer) and scorer.name not in found:
                try:
                    found[scorer.name] = load_scorer(scorer.name)
                except JobError as error:
                    raise JobError(f"{job}:{raw.number}: eval.scorer: {error}") from error
    return found
