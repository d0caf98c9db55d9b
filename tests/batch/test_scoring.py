"""How answers are compared, and the table."""

from __future__ import annotations

import io
from typing import Any

import pytest

from mlxrun.batch.score_table import print_scores
from mlxrun.batch.scoring import EvalSpec, Scores, extract_answer, score


@pytest.mark.parametrize(
    "match, expected, right, wrong",
    [
        ("exact", " a b ", ["a b", "\na b\n"], ["a  b", "A b", "a b."]),
        ("contains", "b c", ["a b cd"], ["bc", ""]),
        ("regex", r"^\d+$", ["12", "12\n"], ["a12", ""]),
        ("regex", r"(?i)yes\b", ["oh YES!"], ["yesterday"]),
        (
            "json",
            {"a": 1, "b": [True, None, "x"]},
            ['{"b": [true, null, "x"], "a": 1.0}', '1 of 2: ```json\n{"a": 1, "b": [true, null, "x"]}``` {}'],
            ['{"a": 1}', '{"a": true, "b": [true, null, "x"]}', '{"a": 1, "b": [1, null, "x"]}', "", "{{{"],
        ),
        ("json", [1, 2], ["x [1, 2.0] [3]"], ["[2, 1]", "[1, 2, 3]", "[[1, 2]]", "[" * 5000]),
        ("json", "yes", ['the answer: "yes"'], ["yes", '"no" "yes"']),
        ("json", True, ["It is true."], ["1", "it is so"]),
        ("json", 0.5, ["5e-1"], ["0.51"]),
        ("number", 1234.5, ["so 12 and 1,234.5.", "1234.50", "+1.2345e3"], ["1234.5 of 7", "", "-1234.5"]),
        ("number", -4, ["= -4", "\u22124"], ["10-4", "4"]),
        ("number", "7", ["3 + 4 = 7", "7.0"], ["7.000001", "77"]),
        ("number", 0, ["0", "-0.0"], ["0.0000001"]),
        ("number", 10**15 + 1, ["1000000000000001"], ["1000000010000001"]),
        ("number", 5, ["v1.5.5 5", ".5e1"], [".5", "1.2.5"]),
    ],
)  # fmt: skip
def test_matches(match: str, expected: Any, right: list[str], wrong: list[str]) -> None:
    wanted = EvalSpec(expected, match)
    assert [score(wanted, answer) for answer in right] == [1] * len(right)
    assert [score(wanted, answer) for answer in wrong] == [0] * len(wrong)


def test_answer_text() -> None:
    assert extract_answer({"choices": [{"message": {"content": "a"}}, {"message": {"content": "b"}}]}) == "a"
    assert extract_answer({"choices": [{"message": {"content": None}}]}) == ""
    assert extract_answer({"choices": [{"text": "c"}]}) == "c"


def test_the_table() -> None:
    """Failed lines count as 0 and are shown; lines without eval do not count; plain text in a pipe."""
    scores = Scores()
    for group, good, error in (("b", 1, None), ("b", 0, None), ("b", 0, {}), ("a", 1, None)):
        scores.add({"error": error, "eval": {"score": good, "match": "exact", "group": group}})
    scores.add({"error": None})
    out = io.StringIO()
    print_scores(scores, out)
    assert out.getvalue().splitlines() == [
        "group  lines  correct   share  failed",
        "a          1        1  100.0%       0",
        "b          3        1   33.3%       1",
        "total      4        2   50.0%       1",
    ]
    out = io.StringIO()
    print_scores(Scores(), out)
    assert out.getvalue() == ""
