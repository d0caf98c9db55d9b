"""The conditions of `--fail-if`: what is allowed, what holds, and the reasons that they give."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxrun.core.errors import JobError
from mlxrun.evals.comparisons.compared_group import ComparedGroup
from mlxrun.evals.comparisons.comparison import Comparison
from mlxrun.evals.comparisons.comparison_conditions import parse_condition
from mlxrun.evals.comparisons.pairing import CellPair, Mismatches
from mlxrun.evals.statistics import compare_scores, compute_equivalence


def make_group(name: str, worse: int, lines: int = 100, better: int = 0) -> ComparedGroup:
    first = [1.0] * (lines - better) + [0.0] * better
    second = [0.0] * worse + [1.0] * (lines - worse)
    result = compare_scores(first, second)
    equivalence = compute_equivalence(first, second, 0.05)
    return ComparedGroup(name, result, None, None, better, worse, 1, 2, equivalence, result.p)


def make_comparison(worse: int, name: str = "", **numbers: int) -> Comparison:
    """10 of 100 lines are worse by default in the group `sums`, none in `rest`."""
    groups = [make_group("sums", worse), make_group("rest of it", 0)]
    cell = CellPair(name, ())
    return Comparison(cell, make_group("total", worse, **numbers), groups, [], [], 0, 0, Mismatches(), [])


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("score < 0.95", True),
        ("score<.85", False),
        ("score < 90 %", False),
        ("score <= 90 %", True),
        ("difference < -2 points", True),
        ("difference < -0.2", False),
        ("difference == -0.1", True),
        ("worse > 9", True),
        ("flips >= 11", False),
        ("better != 0", False),
        ("failed > 0", True),
        ("unscored > 1", True),
        ("p < 0.01", True),
        ("regression", True),
        ("not regression", False),
        ("different", True),
        ("equivalent", False),
        ("not equivalent", True),
        ("regression in sums", True),
        ("regression in rest of it", False),
        ("equivalent in rest of it", True),
        ("score < 100% in rest of it", False),
    ],
)
def test_a_condition_holds_or_not(text: str, holds: bool) -> None:
    reasons = list(parse_condition(text).find_reasons([make_comparison(10)]))
    assert len(reasons) == holds and all(reason.startswith(f"{text}: ") for reason in reasons)


def test_a_gain_is_no_regression_and_a_chance_drop_neither() -> None:
    gain = replace(make_comparison(0), total=make_group("total", 0, better=10))
    assert not list(parse_condition("regression").find_reasons([gain]))
    assert list(parse_condition("different").find_reasons([gain]))
    assert not list(parse_condition("regression").find_reasons([make_comparison(3)]))


def test_reasons_have_the_cell_and_the_value() -> None:
    cells = [make_comparison(0, "m/add"), make_comparison(10, "m/sub")]
    assert list(parse_condition("score < 0.95").find_reasons(cells)) == ["m/sub: score < 0.95: score is 0.9"]
    [reason] = parse_condition("regression").find_reasons(cells)
    assert reason == "m/sub: regression: the score changed by -10.0 points (p = 0.00098)"
    [reason] = parse_condition("not equivalent").find_reasons(cells)
    assert reason.startswith("m/sub: not equivalent: the 90 % interval of the difference is -15.0 to -5.0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("regresion", r"'regresion' is no condition; a condition is a value \(score, difference, flips"),
        ("", "is no condition"),
        ("not", "is no condition"),
        ("score", "is no condition"),
        ("scor < 1", "'scor' is no value"),
        ("score =< 1", "is no condition"),
        ("score < high", "is no condition"),
        ("worse > 3 %", "worse is a number of lines, without %"),
    ],
)
def test_what_is_no_condition_says_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_condition(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("score < 80", "score is never beyond 1; for percent or points, write 80 %"),
        ("difference < -2", "difference is never beyond 1; for percent or points, write -2 %"),
    ],
)
def test_a_share_beyond_one_is_a_slip(text: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        list(parse_condition(text).find_reasons([make_comparison(10)]))


@pytest.mark.parametrize(
    ("place", "cells"),
    [("m/sub", ["m/sub"]), ("*/sub", ["m/sub"]), ("m/*", ["m/add", "m/sub"]), ("*", ["m/add", "m/sub"])],
)
def test_a_condition_of_cells_of_a_suite(place: str, cells: list[str]) -> None:
    comparisons = [make_comparison(0, "m/add"), make_comparison(10, "m/sub")]
    reasons = parse_condition(f"score <= 1 in {place}").find_reasons(comparisons)
    assert [reason.partition(":")[0] for reason in reasons] == cells
    in_group = list(parse_condition(f"not equivalent in {place}:sums").find_reasons(comparisons))
    assert all(reason.partition(":")[0] in cells for reason in in_group) and in_group
    with pytest.raises(JobError, match=r"no cell 'm/mul' \(cells: m/add, m/sub\)"):
        list(parse_condition("regression in m/mul").find_reasons(comparisons))
    with pytest.raises(JobError, match=r"no group 'sum' \(groups: rest of it, sums\)"):
        list(parse_condition(f"regression in {place}:sum").find_reasons(comparisons))
    with pytest.raises(JobError, match=r"no cell 'm/add' \(cells: these are two runs\)"):
        list(parse_condition("regression in m/add").find_reasons([make_comparison(10)]))


def test_cells_of_two_models_are_found_by_a_pattern_of_the_model() -> None:
    comparisons = [make_comparison(0, "add"), make_comparison(10, "sub")]
    [reason] = parse_condition("score < 0.95 in */sub").find_reasons(comparisons)
    assert reason == "sub: score < 0.95 in */sub: score is 0.9"
    with pytest.raises(JobError, match=r"no cell 'm/sub' \(cells: add, sub\)"):
        list(parse_condition("regression in m/sub").find_reasons(comparisons))
    with pytest.raises(JobError, match=r"no cell '\*/sub' \(cells: these are two runs\)"):
        list(parse_condition("regression in */sub").find_reasons([make_comparison(10)]))


def test_a_group_that_is_not_there_is_named() -> None:
    with pytest.raises(JobError, match=r"there is no group 'sum' \(groups: rest of it, sums\)"):
        list(parse_condition("worse > 3 in sum").find_reasons([make_comparison(10)]))
    assert parse_condition("not equivalent").needs_margin and not parse_condition("different").needs_margin
