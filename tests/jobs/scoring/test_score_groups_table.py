"""The score table."""

from __future__ import annotations

import io

from mlxrun.jobs.scoring.score_groups import Scores, format_score, print_scores


def test_the_table() -> None:
    """Failed lines count as 0 and are shown; lines without eval do not count; plain text in a pipe."""
    scores = Scores()
    for group, good, error in (("b", 1, None), ("b", 0, None), ("b", 0, {}), ("a", 1, None)):
        body = {"choices": [{"text": "a", "finish_reason": "length" if group == "a" else "stop"}]}
        result = {"score": good, "match": "exact", "group": group}
        scores.add({"error": error, "response": {"body": body}, "eval": result})
    scores.add({"error": None, "response": {"body": body}})
    out = io.StringIO()
    print_scores(scores, out)
    assert out.getvalue().splitlines() == [
        "group  lines  correct           score [95 %]  failed",
        "a          1        1  100.0 % [20.7, 100.0]       0",
        "b          3        1     33.3 % [6.1, 79.2]       1",
        "total      4        2    50.0 % [15.0, 85.0]       1",
    ]
    out = io.StringIO()
    print_scores(Scores(), out)
    assert out.getvalue() == ""


def test_columns_that_are_needed() -> None:
    """Metrics, and answers that could not be scored; a group of one fraction has no interval."""
    scores = Scores()
    body = {"choices": [{"text": "a", "finish_reason": "stop"}]}
    results = [
        {"score": 0.5, "group": "a", "note": "x"},
        {"score": 1, "group": "b", "scores": {"pass@2": 0.25}},
    ]
    for result in results:
        scores.add({"error": None, "response": {"body": body}, "eval": result})
    out = io.StringIO()
    print_scores(scores, out)
    assert out.getvalue().splitlines() == [
        "group  lines  correct           score [95 %]  failed  unscored  pass@2",
        "a          1        0                 50.0 %       0         1        ",
        "b          1        1  100.0 % [20.7, 100.0]       0         0  25.0 %",
        "total      2        1    75.0 % [0.0, 100.0]       0         1  25.0 %",
        "pass@2: of 1 of 2 lines; the others do not have it",
    ]
    assert format_score(scores.groups["a"]) == "50.0 %"


def test_a_group_of_which_nothing_was_scored_has_no_score() -> None:
    scores = Scores()
    body = {"choices": [{"text": "a", "finish_reason": "stop"}]}
    for group, note in (("a", {"note": "x"}), ("b", {})):
        scores.add({"error": None, "response": {"body": body}, "eval": {"score": 0, "group": group, **note}})
    assert format_score(scores.groups["a"]) == "not scored"
    assert format_score(scores.groups["b"]) == "0.0 % [0.0, 79.3]"


def test_metrics_of_some_lines_are_named_with_their_number() -> None:
    """Those with the same number together; the twin has them in all lines."""
    several = {"mean": 1, "pass@2": 1}
    for results, says in [
        ([several, several, {}], ["mean, pass@2: of 2 of 3 lines; the others do not have them"]),
        ([several, {"mean": 0}], ["pass@2: of 1 of 2 lines; the others do not have it"]),
        ([several, several], []),
        ([{}, {}], []),
    ]:
        scores = Scores()
        for found in results:
            record = {"error": None, "response": {"body": {"choices": [{}]}}}
            scores.add({**record, "eval": {"score": 1, **({"scores": found} if found else {})}})
        out = io.StringIO()
        print_scores(scores, out)
        assert out.getvalue().splitlines()[2:] == says
