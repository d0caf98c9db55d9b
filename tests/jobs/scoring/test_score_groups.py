"""Scores by group, as data."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.jobs.scoring.score_groups import Scores, format_described, format_score


def test_scores_as_data() -> None:
    """What the table shows, and the answers that were cut, with and without an `eval`."""
    scores = Scores()
    body = {"choices": [{"text": "a", "finish_reason": "length"}]}
    for good in (1, 0):
        result = {"score": good, "match": "exact", "group": "a"}
        scores.add({"error": None, "response": {"body": body}, "eval": result})
    scores.add({"error": None, "response": {"body": body}})
    scores.add({"error": {}, "response": None, "eval": {"score": 0, "match": "exact", "group": "b"}})
    wilson = {"unscored": 0, "interval_method": "wilson"}
    a: dict[str, Any] = {"lines": 2, "correct": 1, "failed": 0, "cut_by_length": 2, "share": 0.5, **wilson}
    b: dict[str, Any] = {"lines": 1, "correct": 0, "failed": 1, "cut_by_length": 0, "share": 0.0, **wilson}
    total: dict[str, Any] = {
        "lines": 3,
        "correct": 1,
        "failed": 1,
        "cut_by_length": 2,
        "share": 0.3333333333,
        **wilson,
    }
    a["interval"], b["interval"] = [0.0945312057, 0.9054687943], [0.0, 0.7934506856]
    total["interval"] = [0.0614919447, 0.7923403992]
    assert scores.describe() == {"groups": {"a": a, "b": b}, "total": total}
    assert scores.cut_by_length == 3
    nothing: dict[str, Any] = {"lines": 0, "correct": 0, "failed": 0, "cut_by_length": 0, "share": 0.0}
    nothing |= {"unscored": 0, "interval": None, "interval_method": None}
    assert Scores().describe() == {"groups": {}, "total": nothing}


def test_fractions_metrics_and_answers_that_were_not_scored() -> None:
    """`share` is the mean score; metrics of choices are means over the lines that have them."""
    scores = Scores()
    body = {"choices": [{"text": "a", "finish_reason": "stop"}]}
    for result in (
        {"score": 0.2, "group": "a", "scores": {"pass@2": 1}},
        {"score": 1, "group": "a", "scores": {"pass@2": 0}, "cluster": "c"},
        {"score": 0, "group": "a", "note": "the scorer failed", "cluster": "c"},
        {"score": 0.5, "group": "b"},
    ):
        scores.add({"error": None, "response": {"body": body}, "eval": result})
    found = scores.describe()["groups"]["a"]
    assert (found["lines"], found["correct"], found["share"], found["unscored"]) == (3, 1, 0.4, 1)
    assert found["metrics"] == {"pass@2": 0.5} and found["interval_method"] == "clustered"
    total = scores.compute_total()
    assert (total.lines, total.unscored, round(total.value or 0, 9)) == (4, 1, 0.425)
    assert total.compute_metrics() == {"pass@2": 0.5}
    assert total.interval is not None and total.interval.method == "clustered"
    assert scores.groups["b"].interval is None


def test_lost_lines_count_as_0_in_the_scores_of_a_scorer() -> None:
    """As in the score. The twin: lines of another match have no such score."""
    scores = Scores()
    body = {"choices": [{"text": "a", "finish_reason": "stop"}]}
    for group in ("a", "b"):
        for match, failed, named in (
            ("likeliest", False, {"acc": 1, "acc_norm": 0}),
            ("likeliest", False, {"acc": 1, "acc_norm": 1}),
            ("likeliest", True, {}),
            ("exact", True, {}),
            ("exact", False, {}),
        ):
            result = {"score": named.get("acc", 0), "match": match, "group": group, "scores": named}
            error, response = ({}, None) if failed else (None, {"body": body})
            scores.add({"error": error, "response": response, "eval": result})
    broken = {"score": 0, "match": "likeliest", "group": "b", "note": "no logprobs"}
    scores.add({"error": None, "response": {"body": body}, "eval": broken})
    found = scores.describe()
    assert found["groups"]["a"]["metrics"] == {"acc": 0.6666666667, "acc_norm": 0.3333333333}
    assert found["groups"]["b"]["metrics"] == {"acc": 0.5, "acc_norm": 0.25}
    assert found["total"]["metrics"] == {"acc": 0.5714285714, "acc_norm": 0.2857142857}
    assert scores.groups["b"].metrics["acc"].count == 4


def test_a_score_that_is_shown_with_fewer_digits_is_rounded_once() -> None:
    """The bound for none of 5 is 43.448 %: with 4 digits it would be shown as 43.5."""
    scores = Scores()
    for _ in range(5):
        body = {"choices": [{"text": "a", "finish_reason": "stop"}]}
        scores.add({"error": None, "response": {"body": body}, "eval": {"score": 0}})
    assert f"{100 * scores.describe()['total']['interval'][1]:.1f}" == "43.4"


SECONDS = {"unit": "s", "better": "lower", "aggregate": "mean"}


def measure(score: float, **more: Any) -> dict[str, Any]:
    """A record whose score is a number of seconds."""
    body = {"choices": [{"text": "a", "finish_reason": "stop"}]}
    result = {"score": score, "match": "m.py:f", "group": "a", "measure": SECONDS, **more}
    return {"error": None, "response": {"body": body}, "eval": result}


def test_scores_with_a_unit() -> None:
    """A line that failed, or could not be scored, has none; as 0 it would be the best of all."""
    scores = Scores()
    for each in (2.0, 4.0, 3.0):
        scores.add(measure(each))
    scores.add({"error": {}, "response": None, "eval": {"score": 0, "match": "m.py:f", "group": "a"}})
    body = {"choices": [{"text": "a", "finish_reason": "stop"}]}
    broken = {"score": 0, "match": "m.py:f", "group": "a", "note": "it raised"}
    scores.add({"error": None, "response": {"body": body}, "eval": broken})
    found = scores.describe()["groups"]["a"]
    assert (found["lines"], found["failed"], found["unscored"], found["correct"]) == (5, 1, 1, 0)
    assert (found["value"], found["share"], found["measure"]) == (3.0, None, SECONDS)
    assert found["interval"] == [pytest.approx(3 - 4.302652730 / 3**0.5), pytest.approx(5.4841377118)]
    assert format_score(scores.groups["a"]) == "3.000 s [0.516, 5.484]" == format_described(found)


def test_lines_that_all_failed_have_no_score() -> None:
    scores = Scores()
    for _ in range(3):
        scores.add({"error": {}, "response": None, "eval": {"score": 0, "match": "perplexity", "group": "a"}})
    group = scores.groups["a"]
    assert group.is_unscored and format_score(group) == "not scored" == format_described(group.describe())


def test_lines_with_several_measures_have_no_figure() -> None:
    scores = Scores()
    scores.add(measure(2.0))
    scores.add(measure(1, measure=None, group="b"))
    assert format_score(scores.groups["a"]) == "2.000 s"
    total = scores.compute_total()
    assert total.is_mixed and total.value is None and total.interval is None
    assert format_score(total) == "several units" == format_described(total.describe())
