"""Verdicts in the answers of judges."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mlxrun.evals.judge_verdict import VerdictError, build_reader, find_verdict_problems

LETTERS = {"choices": {"A": 1, "B": 0.5, "C": 0}}
WORDS = {"choices": {"correct": 1, "incorrect": 0, "not sure": 0.5}}
SCALE = {"number": {"min": 1, "max": 10}}
OBJECT = {"json": "grade", "choices": {"good": 1, "bad": 0}}


@pytest.mark.parametrize(
    ("verdict", "answer", "score", "found"),
    [
        (LETTERS, "B", 0.5, "B"),
        (LETTERS, "It says the same. The answer is **A**.", 1, "A"),
        (WORDS, "Correct.", 1, "correct"),
        (WORDS, "The answer is correct in parts.\nVerdict: INCORRECT", 0, "incorrect"),
        (WORDS, "I am not sure", 0.5, "not sure"),
        (SCALE, "10", 1, 10),
        (SCALE, "I give it 4 out of 10, as 3 things are missing.", 1 / 3, 4),
        (SCALE, "Rating: [[7]] (of 10)", 2 / 3, 7),
        (SCALE, "5.5/10", 0.5, 5.5),
        ({"number": {}}, "0.25", 0.25, 0.25),
        (OBJECT, 'So: {"reason": "x", "grade": "good"}', 1, "good"),
        ({"json": "ok"}, '{"ok": true}', 1, True),
        ({"json": "ok"}, '{"ok": 0.5}', 0.5, 0.5),
        ({"json": "x", **SCALE}, '{"x": 10}', 1, 10),
        ({**LETTERS, "after": "Verdict:"}, "A is wrong. Verdict: C", 0, "C"),
    ],
)
def test_verdicts(verdict: Any, answer: str, score: float, found: Any) -> None:
    got, value = build_reader(verdict).read(answer)
    assert got == pytest.approx(score) and value == found


@pytest.mark.parametrize(
    ("verdict", "answer", "reason"),
    [
        (LETTERS, "", "it was to choose one of A, B, C, and its answer has none of them"),
        (LETTERS, "A or B", "several of them: A, B"),
        (LETTERS, "D", "none of them"),
        (WORDS, "correct or incorrect", "several of them: correct, incorrect"),
        (SCALE, "eleven", "its answer has no number"),
        (SCALE, "11", "its verdict 11 is no number from 1 to 10"),
        (OBJECT, "good", "has no JSON object"),
        (OBJECT, '{"grades": "good"}', "its JSON object has no 'grade'"),
        (OBJECT, '{"grade": "fair"}', "its verdict 'fair' is none of good, bad"),
        ({"json": "ok"}, '{"ok": "yes"}', "its verdict 'yes' is no number from 0 to 1"),
        (
            {"json": "ok", "schema": {"required": ["why"]}},
            '{"ok": true}',
            r"does not fit verdict.schema: \$: 'why' is a required",
        ),
        ({**LETTERS, "after": "Verdict:"}, "A", "its answer has no 'Verdict:'"),
    ],
)
def test_answers_without_a_verdict(verdict: Any, answer: str, reason: str) -> None:
    with pytest.raises(VerdictError, match=reason):
        build_reader(verdict).read(answer)


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (None, "j: verdict must be an object"),
        ({}, "j: verdict must be an object"),
        ({"letters": {}}, "j: verdict.letters is not known; verdict takes choices, number"),
        ({"after": "x"}, "j: verdict needs choices, number or json"),
        ({**LETTERS, **SCALE}, "j: verdict takes one of choices and number"),
        ({"choices": []}, "j: verdict.choices must be an object"),
        ({"choices": {"A": 1}}, "j: verdict.choices has 'A' alone; a judge needs two choices or more"),
        ({"choices": {"A": 2}}, "j: verdict.choices.A must be a score from 0 to 1, not 2"),
        ({"choices": {"A": 1, "B": 2}}, "j: verdict.choices.B must be a score from 0 to 1, not 2"),
        ({"choices": {"A": 1, "**": 0}}, "j: verdict.choices has an empty choice"),
        ({"number": 10}, "j: verdict.number must be an object with min and max"),
        ({"number": {"min": 3, "max": 3}}, "j: verdict.number needs numbers, and min below max"),
        ({**LETTERS, "schema": {}}, "j: verdict.schema needs verdict.json"),
        ({"json": "x", "schema": {"type": "y"}}, "j: verdict.schema is not a valid JSON Schema"),
        ({"json": ""}, "j: verdict.json must be a string"),
    ],
)
def test_verdicts_that_are_refused(verdict: Any, reason: str) -> None:
    texts = [f"j: {text}" for _, text in find_verdict_problems(verdict)]
    assert any(re.search(reason, text) for text in texts)


@pytest.mark.parametrize("verdict", [LETTERS, WORDS, SCALE, OBJECT])
def test_good_verdicts_have_no_problems(verdict: Any) -> None:
    assert list(find_verdict_problems(verdict)) == []
