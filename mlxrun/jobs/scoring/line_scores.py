"""Scores the response of a job line: each of its choices, and the metrics of all together.

Scoring that may take long is called in a child process (scorer_process.py). A line that has ended its scorer
twice, by a limit or a crash, is not scored any more: its answers get a note.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ParamSpec, TypeVar

from mlxrun.core.workers import Lane, end_by
from mlxrun.jobs.scoring.answer_text import extract_answers, strip_reasoning
from mlxrun.jobs.scoring.eval_spec import EvalSpec, count_choices
from mlxrun.jobs.scoring.likeliest import score_likeliest
from mlxrun.jobs.scoring.matching import match_answer, normalize_extracted, votes_by_score
from mlxrun.jobs.scoring.measure import ScoreMeasure, describe_measure
from mlxrun.jobs.scoring.perplexity import PERPLEXITY, score_perplexity
from mlxrun.jobs.scoring.scorer_process import ScorerEnded, ScorerLimits, ScorerPool, end_scorers_by
from mlxrun.jobs.scoring.verdict import ScoredAnswer, Verdict, compute_metric, list_default_metrics

MOST_ENDS = 2  # of the scorer of one line: the machine may have been too busy for the first one
SLOW_MATCHES = ("regex", "json_schema", "ter")
OWN = ScorerPool(ScorerLimits(seconds=10.0, memory=1_000_000_000))

T = TypeVar("T")
P = ParamSpec("P")

# Each thread may wait for a process that takes a whole CPU. Work that may not run long needs none of them.
SCORES = Lane("scores", max(2, min(4, (os.cpu_count() or 1) // 2)))


class LineTries:
    """Counts how often one line has ended its scorer."""

    def __init__(self) -> None:
        self._ends: list[str] = []

    def call(self, function: Callable[[T], Verdict], answer: T) -> Verdict:
        """Return the verdict on an answer, or one with a note if the line has ended its scorer too often."""
        while len(self._ends) < MOST_ENDS:
            try:
                return function(answer)
            except ScorerEnded as error:
                self._ends.append(str(error))
        return Verdict(0, note=f"the scorer was ended {len(self._ends)} times: {self._ends[-1]}")


def runs_long(spec: EvalSpec) -> bool:
    """Whether scoring by `spec` may wait for a child process."""
    return spec.scorer is not None or spec.match in SLOW_MATCHES


def match_limited(spec: EvalSpec, answer: str) -> Verdict:
    """Call `match_answer` within limits. ScorerEnded if it takes too much time or memory."""
    if not runs_long(spec):
        return match_answer(spec, answer)
    fields: dict[str, Any] = {name: getattr(spec, name) for name in ("expected", "match", "after")}
    fields["options"] = {**spec.options}
    return Verdict.read(OWN.call(f"{__name__}:match_fields", fields, answer))


def match_fields(fields: Mapping[str, Any], answer: str) -> dict[str, Any]:
    """Match an answer in the child, for `match_limited`."""
    try:
        verdict = match_answer(EvalSpec(**fields), answer)
    except MemoryError:
        raise  # this process cannot go on with what is left
    except Exception as error:  # of a library
        verdict = Verdict(0, note=f"the answer cannot be scored: {type(error).__name__}: {error}"[:500])
    return asdict(verdict)


async def run_scorers(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a function that scores answers, in a thread. If this call is cancelled, scorers' processes are
    killed, and the function ends by Abandoned."""

    def run() -> T:
        with end_scorers_by(end_by):
            return function(*args, **kwargs)

    return await SCORES.run(run)


NO_LINE: Mapping[str, Any] = {"body": {}}
NO_TALK: Mapping[str, Any] = {}


def score_response(
    spec: EvalSpec,
    response: Mapping[str, Any] | None,
    line: Mapping[str, Any] = NO_LINE,
    talk: Mapping[str, Any] = NO_TALK,
) -> dict[str, Any]:
    """Return the `eval` of a record.

    `response`: its body, None for a failed line, which scores 0; `line`: the job line as data; `talk`: as in
    ScoredAnswer. `score` is the first of `eval.metrics`; without metrics it is the mean of the choices'
    scores. With several choices, `choices` has the score of each, and `scores` the metrics. `note` and
    `comment` are of the first choice that has one; `extracted` is of the first choice. Of several prompts,
    the choices of the first are scored, except by `likeliest`. Scores with a measure have no metrics; choices
    without it do not count.
    """
    count = count_choices(line["body"])
    # A failed line has one verdict: `n` may be what was refused in it.
    verdicts = [Verdict(0)] if response is None else _score_choices(spec, response, line, count, talk)
    answers = verdicts
    measure, verdicts = _find_measure(spec, answers)
    metrics = () if measure is not None else spec.metrics or list_default_metrics(count)
    scores = {
        name: sum(each.scores.get(name, 0.0) for each in verdicts) / len(verdicts)
        for name in dict.fromkeys(key for each in verdicts for key in each.scores)
    }
    if response is None:
        scores = dict.fromkeys(metrics, 0.0)
    elif metrics:
        by_score = votes_by_score(spec)
        if len(verdicts) < count:  # fewer choices than were requested: the others score 0
            verdicts = [*verdicts, *[Verdict(0)] * (count - len(verdicts))]
        votes = [replace(each, extracted=normalize_extracted(spec, each.extracted)) for each in verdicts]
        scores |= {name: compute_metric(name, votes, by_score) for name in metrics}
    mean = sum(float(each.score) for each in verdicts) / len(verdicts)
    note = next((each.note for each in (*verdicts, *answers) if each.note is not None), None)
    comment = next((each.comment for each in verdicts if each.comment is not None), None)
    result: dict[str, Any] = {
        "score": _shorten(scores[metrics[0]] if metrics else mean),
        "match": spec.name,
        "group": spec.group,
        "expected": spec.expected,
        "extracted": verdicts[0].extracted,
    }
    if spec.cluster is not None:
        result["cluster"] = spec.cluster
    if note is not None:
        result["note"] = note
    if comment is not None:
        result["comment"] = comment
    if scores:
        result["scores"] = {name: _shorten(value) for name, value in scores.items()}
    if measure is not None:
        result["measure"] = describe_measure(measure)
    if any(each.sums for each in verdicts):
        names = dict.fromkeys(name for each in verdicts for name in each.sums)
        result["sums"] = {name: sum(each.sums.get(name, 0) for each in verdicts) for name in names}
    if count > 1 and response is not None:
        result["choices"] = [_shorten(float(each.score)) for each in verdicts]
    return result


def _find_measure(spec: EvalSpec, verdicts: list[Verdict]) -> tuple[ScoreMeasure | None, list[Verdict]]:
    """The measure of the choices, and their verdicts; without a measure if they have several, or if the line
    wants metrics."""
    measures = {each.measure for each in verdicts if each.note is None}
    if not measures - {None}:
        return None, verdicts
    if len(measures) > 1 or spec.metrics:
        why = (
            "its choices have several measures"
            if len(measures) > 1
            else "eval.metrics are of scores from 0 to 1"
        )
        return None, [Verdict(0, note=f"the score has a measure, and {why}")]
    (measure,) = measures
    return measure, [each for each in verdicts if each.measure is not None]


def _score_choices(
    spec: EvalSpec,
    response: Mapping[str, Any],
    line: Mapping[str, Any],
    count: int,
    talk: Mapping[str, Any],
) -> list[Verdict]:
    if spec.scorer is None and spec.match == "likeliest":
        return [score_likeliest(response["choices"], spec.expected, spec.options)]
    if spec.scorer is None and spec.match == PERPLEXITY:
        return [score_perplexity(response, str(line["body"]["prompt"]))]
    texts, tries = extract_answers(response)[:count], LineTries()
    if spec.scorer is None:
        return [tries.call(partial(match_limited, spec), text) for text in texts]
    body = strip_reasoning(response)
    answers = (ScoredAnswer(text, at, spec.expected, line, body, talk) for at, text in enumerate(texts))
    return [tries.call(spec.scorer.score, answer) for answer in answers]


def _shorten(value: float) -> float:
    """The number as records have it: 0 and 1 are integers."""
    return int(value) if value in (0, 1) else value
