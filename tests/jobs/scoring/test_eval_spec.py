"""The keys of `eval`: which are known, which values they take, and what stands for them in a digest."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.jobs.scoring.eval_spec import EvalReader, check_line_eval, find_option, parse_eval
from mlxrun.jobs.scoring.verdict import ScoredAnswer, UnloadedScorer, Verdict


class Half:
    """A scorer that gives every answer half."""

    name = "half"
    digest = "d"

    def score(self, answer: ScoredAnswer) -> Verdict:
        return Verdict(0.5, answer.text)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (3, "eval must be an object, not int"),
        ({"match": "exact"}, "eval.expected is missing"),
        ({"expected": "x", "match": "fuzzy"}, "eval.match must be one of exact, contains"),
        ({"expected": "x", "match": ["exact"]}, "eval.match must be one of exact, contains"),
        (
            {"expected": "x", "mach": "exact"},
            "eval.mach is not known .did you mean 'match'.*; eval takes expected",
        ),
        ({"expected": "x", "tolerance": 1}, "eval.tolerance belongs to the match number, not to exact"),
        ({"expected": "x", "group": ""}, "eval.group must be a string"),
        ({"expected": "x", "group": None}, "eval.group must be a string"),
        ({"expected": "x", "cluster": 3}, "eval.cluster must be a string"),
        ({"expected": "x", "after": ""}, "eval.after must be a string"),
        ({"expected": "x", "ignore_case": 1}, "eval.ignore_case must be true or false"),
        ({"expected": "x", "metrics": "pass@0"}, "eval.metrics: 'pass@0' is not one of"),
        ({"expected": "x", "metrics": []}, "eval.metrics must be a list"),
        ({"expected": 1, "match": "number", "tolerance": "x"}, "eval.tolerance must be a number"),
        ({"expected": "one", "match": "number"}, "eval.expected must be a number, or a list of numbers"),
        (
            {"expected": [], "match": "contains"},
            "eval.expected is an empty list; it must be a string, or a l",
        ),
        ({"expected": ["a", 1], "match": "exact"}, "eval.expected must be a string, or a list of strings"),
        ({"expected": "(", "match": "regex"}, "eval.expected is not a regular expression"),
        ({"expected": "x", "match": "regex", "pattern": "("}, "eval.pattern is not a regular expression"),
        ({"expected": "x", "match": "regex", "pattern": 3}, "eval.pattern must be a string"),
        ({"expected": "x", "match": "regex", "capture": 1}, "eval.capture needs eval.pattern"),
        (
            {"expected": "x", "match": "regex", "pattern": "(?<a>x)", "capture": "b"},
            r"eval.capture is 'b', and eval.pattern has the groups \[0, 1, 'a'\]",
        ),
        ({"expected": "x", "match": "json_schema"}, "eval.expected must be a JSON Schema"),
        ({"expected": {"type": "x"}, "match": "json_schema"}, "eval.expected is not a valid JSON Schema"),
        ({"expected": "?", "match": "choice"}, "eval.expected must be a letter"),
        ({"expected": "C", "match": "choice", "options": ["x", "y"]}, "eval.expected must be a letter"),
        (
            {"expected": "a", "match": "choice", "options": ["the", "a"]},
            "eval.expected 'a' is the text of one option and the letter or index of another; give its index",
        ),
        ({"expected": "A", "match": "choice", "options": ["x"]}, "eval.options must be a list of 2 to 26"),
        ({"expected": "A", "match": "choice", "options": ["x", 3]}, "eval.options must be a list"),
        ({"expected": 0, "match": "likeliest"}, "eval.context_chars must be"),
        ({"expected": "A", "match": "likeliest", "context_chars": 3}, "eval.expected must be a number, or"),
        (
            {"expected": 0, "match": "likeliest", "context_chars": 3, "normalize": "words"},
            "eval.normalize must be one of none, chars, bytes",
        ),
        (
            {"expected": 0, "match": "likeliest", "context_chars": 3, "normalize": []},
            "eval.normalize must be one of none, chars, bytes",
        ),
        (
            {"expected": 0, "match": "likeliest", "context_chars": 3, "normalize": "char"},
            r"eval.normalize must be one of none, chars, bytes, mass \(did you mean 'chars'\?\)",
        ),
        ({"expected": "x", "scorer": 3}, "eval.scorer must be a string"),
        ({"expected": "x", "scorer": "os:system"}, "eval.scorer 'os:system' is not loaded"),
    ],
)
def test_what_is_refused(value: Any, reason: str) -> None:
    """By name, before anything is run."""
    with pytest.raises(ValueError, match=reason):
        parse_eval(value, {})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({"scorer": "half", "grup": "a"}, r"eval.grup is not known .did you mean 'group'.*into expected$"),
        ({"match": "judge", "refrence": 1}, "eval.refrence is not known; eval takes expected, match and gr"),
        ({"scorer": "half", "pattern": "x"}, "eval.pattern belongs to the match regex, not to exact"),
        ({"match": "judge", "ignore_case": True}, "eval.ignore_case belongs to the match exact, contains"),
        ({"scorer": "half", "match": "exat"}, r"eval.match must be one of .* \(did you mean 'exact'\?\)"),
    ],
)
def test_unknown_keys_beside_a_scorer_or_a_judge(value: dict[str, Any], reason: str) -> None:
    """A mistyped `group` puts the line into another score, whoever gives it."""
    with pytest.raises(ValueError, match=reason):
        EvalReader({"half": Half()}).read(value)
    if "scorer" in value:  # also where the scorer is given for all lines
        with pytest.raises(ValueError, match=reason):
            EvalReader(scorer=Half()).read({key: each for key, each in value.items() if key != "scorer"})


def test_options_of_the_match_may_stay_beside_a_scorer() -> None:
    value = {"expected": 3, "match": "number", "tolerance": 1}
    for reader in (EvalReader(scorer=Half()), EvalReader({"half": Half()})):
        found = reader.read(value if reader.scorer else {**value, "scorer": "half"})
        assert found is not None and found.options == {"tolerance": 1} and found.name == "half"


def test_metrics_need_choices() -> None:
    spec = parse_eval({"expected": "x", "metrics": ["pass@4", "mean", "pass@4"]}, {})
    assert spec.metrics == ("pass@4", "mean")
    check_line_eval(spec, "/v1/chat/completions", {"n": 4})
    with pytest.raises(ValueError, match="pass@4 needs that many choices, and n is 1"):
        check_line_eval(spec, "/v1/chat/completions", {})


@pytest.mark.parametrize(
    ("value", "options", "index"),
    [
        ("B", None, 1),
        (" (b) ", None, 1),
        (1, None, 1),
        ("y", ["x", "y"], 1),
        ("B", ["C", "B"], 1),
        ("y", None, 24),
        ("1", None, 1),
        (" 1\n", ["x", "y"], 1),
        ("2", ["x", "y"], None),
        ("42", ["x", "42"], 1),
        (" y", ["x", "y"], 1),
        ("y", ["x", " y"], 1),
        (" y", ["y", " y"], 1),
        ("Y", ["x", "y"], None),
        ("z", ["x", "y"], None),
        (2, ["x", "y"], None),
        (True, ["x", "y"], None),
        (-1, None, None),
    ],
)
def test_expected_options(value: Any, options: list[str] | None, index: int | None) -> None:
    assert find_option(value, options) == index


def test_scorers_are_loaded_by_name_only() -> None:
    """A server has none, so that no client has code run; where lines are only read, any name stands."""
    value = {"scorer": "half", "expected": {"of": "any type"}}
    found = EvalReader({"half": Half()}).read(value)
    assert found is not None and found.scorer is not None and found.name == "half"
    with pytest.raises(ValueError, match="is not loaded"):
        EvalReader().read(value)
    found = EvalReader(None).read(value)
    assert found is not None and isinstance(found.scorer, UnloadedScorer) and found.name == "half"


def test_one_scorer_for_all_lines() -> None:
    """Also for lines without `eval`, and in place of a scorer that a line names."""
    reader = EvalReader(scorer=Half())
    alone = reader.read(None)
    assert alone is not None and (alone.name, alone.expected, alone.group) == ("half", None, "all")
    found = reader.read({"expected": 3, "match": "number", "group": "g", "cluster": "c", "scorer": "other"})
    assert found is not None and (found.name, found.expected) == ("half", 3)
    assert (found.group, found.cluster) == ("g", "c")
    assert EvalReader().read(None) is None


def test_changed_keys() -> None:
    """Another match drops the options of the former one."""
    value = {"expected": "3", "match": "exact", "ignore_case": True, "group": "g"}
    found = EvalReader(changes={"match": "number", "tolerance": 1}).read(value)
    assert found is not None and (found.match, found.group, found.options) == (
        "number",
        "g",
        {"tolerance": 1},
    )
    found = EvalReader(changes={"ignore_case": False}).read(value)
    assert found is not None and found.options == {"ignore_case": False}
    with pytest.raises(ValueError, match="eval.expected must be a JSON Schema"):
        EvalReader(changes={"match": "json_schema"}).read(value)


def test_everything_is_in_the_digest() -> None:
    base = {"expected": "x", "match": "exact"}
    variants: list[dict[str, Any]] = [
        base,
        {**base, "expected": "y"},
        {**base, "match": "contains"},
        {**base, "group": "g"},
        {**base, "cluster": "g"},
        {**base, "metrics": ["majority"]},
        {**base, "after": "x"},
        {**base, "ignore_case": True},
        {**base, "scorer": "half"},
    ]
    parts = [str(parse_eval(each, {"half": Half()}).list_digest_parts()) for each in variants]
    assert len(set(parts)) == len(parts)


def test_what_the_manifest_records() -> None:
    assert EvalReader().describe() == {}
    assert EvalReader({"half": Half()}).describe() == {"scorers": {"half": "d"}}
    assert EvalReader(scorer=Half()).describe() == {"scorer": "half", "scorers": {"half": "d"}}
    assert EvalReader(changes={"match": "json"}).describe() == {"changes": {"match": "json"}}
