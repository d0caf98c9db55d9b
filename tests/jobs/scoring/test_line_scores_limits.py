"""Schemas, patterns and other scorers that may run long: same results, and ended by limits."""

from __future__ import annotations

import time
from typing import Any

import pytest

from mlxrun.jobs.scoring import line_scores
from mlxrun.jobs.scoring.eval_spec import EvalSpec, parse_eval
from mlxrun.jobs.scoring.line_scores import LineTries, match_limited, runs_long, score_response
from mlxrun.jobs.scoring.matching import match_answer
from mlxrun.jobs.scoring.scorer_process import ScorerEnded
from mlxrun.jobs.scoring.verdict import Verdict
from tests.helpers.command_processes import PATIENCE
from tests.helpers.scorer_bombs import make_bomb_schema, set_limits


def answer(*texts: str) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}} for text in texts]}


def read(**fields: Any) -> EvalSpec:
    spec = parse_eval(fields, {})
    assert spec is not None
    return spec


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        (
            {"match": "json_schema", "expected": {"type": "object", "required": ["a"]}},
            ['{"a": 1}', "{}", "x"],
        ),
        ({"match": "json_schema", "expected": {"type": "string", "pattern": "^a+$"}}, ['"aa"', '"b"']),
        ({"match": "json_schema", "expected": {"$ref": "#/nowhere"}}, ["{}"]),
        ({"match": "json_schema", "expected": {"$ref": "#"}}, ["{}"]),
        ({"match": "json_schema", "expected": {}}, ['{"big": 1e400}', '[1, 2.5, null, "\\ud800 \u00e9"]']),
        ({"match": "regex", "expected": ["a+", "b(c)"]}, ["xaa", "bc", "", "\ud800"]),
        (
            {"match": "regex", "pattern": r"is (\w+)", "expected": "\u00e9t\u00e9", "after": ">"},
            ["a> is e\u0301t\u00e9"],
        ),
        ({"match": "exact", "expected": "a"}, ["a", "b"]),
    ],
)
def test_the_same_as_in_this_process(fields: dict[str, Any], texts: list[str]) -> None:
    spec = read(**fields)
    for text in texts:
        assert match_limited(spec, text) == match_answer(spec, text)


def test_only_what_may_run_long_has_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(line_scores.OWN, "call", lambda target, *_: calls.append(target) or {"score": 1})
    for spec in (read(expected="a"), read(expected=1, match="number"), read(expected=[1], match="json")):
        match_limited(spec, "a 1")
        assert not runs_long(spec)
    assert not calls
    for spec in (read(expected="a", match="regex"), read(expected={}, match="json_schema")):
        assert runs_long(spec) and match_limited(spec, "a").score == 1
    assert len(calls) == 2


def test_a_bomb_gets_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """After two tries, also if the line has many choices; the next lines are scored."""
    set_limits(monkeypatch, 0.5)
    spec, before = read(expected=make_bomb_schema(), match="json_schema"), time.monotonic()
    found = score_response(spec, answer(*["{}"] * 50), {"body": {"n": 50}})
    assert found["score"] == 0
    assert found["note"] == "the scorer was ended 2 times: it took more than 0.5 s"
    assert len(found["choices"]) == 50
    assert time.monotonic() - before < 20
    assert score_response(read(expected=make_bomb_schema(3), match="json_schema"), answer("{}"))["score"] == 1


@pytest.mark.parametrize("pattern", [r"(a|aa)+$", r"(?:a+a+)+b", r"(?:abcdefghij){e<=8}"])
def test_patterns_that_backtrack(pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have a limit of their own, whose note is the same as ever, and one try."""
    set_limits(monkeypatch, PATIENCE)  # that limit is of processor time, of which a busy machine gives little
    note = "the pattern was searched for 1 s without a result"
    text = "a" * 50_000 + "c"
    assert score_response(read(expected=pattern, match="regex"), answer(text))["note"] == note


def test_limits_of_memory_of_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(monkeypatch, 60.0, 200_000_000)
    text = '{"a": [' + "[]," * 10_000_000 + "[]]}"
    spec = read(expected={"required": ["a"]}, match="json_schema")
    assert "memory" in score_response(spec, answer(text))["note"]
    assert score_response(spec, answer('{"a": 1}'))["score"] == 1


def test_a_try_that_is_repeated() -> None:
    """A machine that is too busy once changes no score."""
    fails = ["first"]

    def score(text: str) -> Verdict:
        if fails:
            raise ScorerEnded(fails.pop())
        return Verdict(1, text)

    tries = LineTries()
    assert tries.call(score, "a") == Verdict(1, "a")
    fails.append("second")
    note = "the scorer was ended 2 times: second"
    assert tries.call(score, "b") == tries.call(score, "c") == Verdict(0, note=note)


def test_a_bug_of_a_library_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Verdict:
        raise KeyError("lost")

    monkeypatch.setattr(line_scores, "match_answer", fail)
    note = line_scores.match_fields({"expected": "a"}, "a")["note"]
    assert note == "the answer cannot be scored: KeyError: 'lost'"
