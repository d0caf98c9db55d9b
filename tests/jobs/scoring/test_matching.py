"""How answers are compared, and the table."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxrun.jobs.scoring.eval_spec import EvalSpec, parse_eval
from mlxrun.jobs.scoring.line_scores import score_response


def build_result(wanted: EvalSpec, answer: str | None) -> dict[str, Any]:
    """The `eval` of the record of a completion; None: of a failed line."""
    return score_response(wanted, None if answer is None else {"choices": [{"text": answer}]})


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
        ("exact", ["yes", "y"], ["yes", " y "], ["yes y", "", "no"]),
        ("contains", ["Prague", "Praha"], ["in Praha", "Prague or Praha"], ["in Brno"]),
        ("contains_all", ["red", "blue"], ["blue and red"], ["red", "blue", ""]),
        ("contains_all", "red", ["red"], ["blue"]),
        ("regex", [r"^a+$", r"^b+$"], ["aa", "b"], ["ab"]),
        ("number", [4, "5"], ["= 4", "5.0"], ["6", ""]),
        ("json", ["a", "b"], ['["a", "b"]'], ['"a"', '["b", "a"]']),
    ],
)  # fmt: skip
def test_matches(match: str, expected: Any, right: list[str], wrong: list[str]) -> None:
    wanted = EvalSpec(expected, match)
    assert [build_result(wanted, answer)["score"] for answer in right] == [1] * len(right)
    assert [build_result(wanted, answer)["score"] for answer in wrong] == [0] * len(wrong)


@pytest.mark.parametrize(
    "match, expected, answer, extracted",
    [
        ("exact", "a", " b\n", "b"),
        ("contains", ["x", "b"], "a b", "b"),
        ("contains", "x", "a b", None),
        ("contains_all", ["x", "b", "a"], "a b", ["b", "a"]),
        ("regex", r"\d+", "it is 12, not 13", "12"),
        ("regex", r"\d+", "none", None),
        ("json", {"a": 1}, 'So: {"a": 2.0} {"a": 1}', {"a": 2.0}),
        ("json", {"a": 1}, "no object", None),
        ("json", {"a": 1}, '{"a": NaN} {"a": 1e999} {"a": -Infinity}', None),
        ("json", [1], "[" * 100 + "]" * 100, None),  # too deep to be written again
        ("number", 3, "1, 2 and 1,234.50", 1234.5),
        ("number", 3, "12345678901234567890", 12345678901234567890),
        ("number", 3, "none", None),
        ("number", 3, "9" * 400, None),  # no finite number
    ],
)
def test_what_was_compared(match: str, expected: Any, answer: str, extracted: Any) -> None:
    """A record names the expected answer and what was found in its place, of the same type."""
    found = build_result(EvalSpec(expected, match, "g"), answer)
    assert {**found, "score": None, "extracted": None} == {
        "score": None,
        "match": match,
        "group": "g",
        "expected": expected,
        "extracted": None,
    }
    assert type(found["extracted"]) is type(extracted) and found["extracted"] == extracted
    json.dumps(found, allow_nan=False)


def test_a_failed_line_scores_nothing() -> None:
    found = build_result(EvalSpec("", "contains"), None)
    assert (found["score"], found["extracted"]) == (0, None)


@pytest.mark.parametrize(
    "match, expected",
    [
        ("exact", []),
        ("contains", ["a", 1]),
        ("contains_all", 3),
        ("contains", ""),
        ("contains", ["a", ""]),
        ("contains_all", ["", "a"]),
        ("regex", ""),
        ("number", ["x"]),
        ("regex", ["a", "("]),
        ("regex", "((a{1000}){1000}){1000}"),
        ("regex", "(?x)(a{1000}) #\n{1000}"),
        ("regex", "a" * 5 + "{9" + "9" * 20 + "}"),
    ],
)
def test_expected_answers_that_fit_no_match(match: str, expected: Any) -> None:
    with pytest.raises(ValueError, match="eval.expected"):
        parse_eval({"expected": expected, "match": match}, {})


def test_an_answer_may_be_expected_to_be_empty() -> None:
    wanted = parse_eval({"expected": ["", "none"]}, {})
    assert [build_result(wanted, answer)["score"] for answer in ("", " none", "x")] == [1, 1, 0]


def test_patterns_that_need_too_long() -> None:
    """They score 0 after a second, and would never end; a pattern that matches before them counts."""
    answer = "a" * 400 + "!"
    found = build_result(EvalSpec(["(a|aa)+$", "(aa|a)+$", "!"], "regex"), answer)
    assert (found["score"], found["extracted"]) == (0, None) and "for 1 s" in found["note"]
    found = build_result(EvalSpec(["!", "(a|aa)+$"], "regex"), answer)
    assert found["score"] == 1 and "note" not in found
    assert build_result(EvalSpec("(a+)+$", "regex"), "a" * 40 + "!")["score"] == 0


def test_patterns_with_many_counts() -> None:
    for pattern in (r"\d{4}-\d{2}-\d{2} " * 20, r"(?:\d{4} ){12}", "x{1000}", "(a{2,}){3,}"):
        assert parse_eval({"expected": pattern, "match": "regex"}, {}).expected == pattern


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        ({"expected": "B", "match": "regex", "pattern": r"is (\w+)", "capture": 1}, ["It is B!"], ["B"]),
        ({"expected": "B", "match": "regex", "pattern": r"Answer: (\w+)"}, ["Answer: B"], ["Answer: C B"]),
        ({"expected": ["B", "C"], "match": "regex", "pattern": "= (?<x>.)", "capture": "x"}, ["= C"], ["D"]),
        ({"expected": "= B", "match": "regex", "pattern": "= ."}, ["a = B"], ["B"]),
        ({"expected": "b", "match": "regex", "pattern": "= (.)", "ignore_case": True}, ["= B"], ["= c"]),
        ({"expected": "", "match": "regex", "pattern": "=(.*)"}, ["a="], ["a=b", "a"]),
        ({"expected": "x", "match": "regex", "pattern": "(a)?b", "capture": 1}, [], ["b", "ab"]),
        ({"expected": "Stra\u00dfe", "ignore_case": True}, ["STRASSE", "stra\u00dfe"], ["Strase"]),
        ({"expected": "Stra\u00dfe"}, ["Stra\u00dfe"], ["STRASSE"]),
        ({"expected": "caf\u00e9"}, ["cafe\u0301", "caf\u00e9 "], ["cafe"]),
        ({"expected": "cafe\u0301", "match": "contains"}, ["a caf\u00e9."], ["a cafe."]),
        ({"expected": ["x\u00b2", "Y"], "match": "contains_all", "ignore_case": True}, ["x\u00b2y"], ["x2y"]),
        ({"expected": 100, "match": "number", "tolerance": "1%"}, ["= 99"], ["= 98"]),
        ({"expected": 2.5, "match": "number", "tolerance": 0.1}, ["2.4", "2.6"], ["2.39"]),
        ({"expected": "B", "match": "choice"}, ["The answer is (B)."], ["A", "A or B", "none"]),
        ({"expected": 1, "match": "choice", "options": ["x1", "x2"]}, ["x2", "b"], ["x1", "x1 or x2"]),
        ({"expected": ["A", "x2"], "match": "choice", "options": ["x1", "x2", "x3"]}, ["x2", "A"], ["C"]),
        (
            {"expected": {"type": "object", "required": ["a"]}, "match": "json_schema"},
            ['```json\n{"a": 1}\n```', '5 {"a": null}'],
            ['{"b": 1}', "a", "[1]"],
        ),
        ({"expected": {"type": "integer"}, "match": "json_schema"}, ["it is 5"], ['"5"', "none"]),
        ({"expected": "4", "after": "####"}, ["2+2\n#### 4", "#### 5 #### 4"], ["4", "#### 5"]),
    ],
)  # fmt: skip
def test_options_of_matches(wanted: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    spec = parse_eval(wanted, {})
    assert [build_result(spec, answer)["score"] for answer in right] == [1] * len(right)
    assert [build_result(spec, answer)["score"] for answer in wrong] == [0] * len(wrong)


def test_what_new_matches_extract() -> None:
    spec = parse_eval({"expected": "A", "match": "choice"}, {})
    found = [build_result(spec, answer)["extracted"] for answer in ("(A)", "A or B", "?")]
    assert found == ["A", ["A", "B"], None]
    spec = parse_eval({"expected": "b", "match": "regex", "pattern": "= (.*)"}, {})
    assert build_result(spec, "x =  b ")["extracted"] == " b "
    spec = parse_eval({"expected": {"$ref": "http://127.0.0.1:9/x"}, "match": "json_schema"}, {})
    assert "which is not in it" in build_result(spec, "{}")["note"]


@pytest.mark.parametrize(
    ("expected", "answer", "score"),
    [
        ("The Eiffel Tower", "the  eiffel-tower!", 0.0),  # one word, as SQuAD's evaluation has it
        ("The Eiffel Tower", "It is the Eiffel Tower.", 2 * 2 / (2 + 4)),
        (["Paris", "Paris, France"], "France: Paris", 1),
        ("to be or not to be", "to be to be", 2 * 4 / (6 + 4)),
        ("the", "an", 1),
        ("a cat", "", 0),
    ],
)
def test_f1_of_words(expected: Any, answer: str, score: float) -> None:
    """Precision and recall of words, as of SQuAD: 2 * common / (words + words), of the best alternative."""
    assert build_result(parse_eval({"match": "f1", "expected": expected}, {}), answer)["score"] == score
