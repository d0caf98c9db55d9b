"""The `eval` of a record: all choices, their metrics, and reasoning that never reaches a scorer."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from mlxrun.jobs.scoring.eval_spec import EvalSpec, parse_eval
from mlxrun.jobs.scoring.line_scores import score_response
from mlxrun.jobs.scoring.verdict import ScoredAnswer, Verdict


def chats(*texts: str | None) -> dict[str, Any]:
    """The body of a chat completion."""
    return {"choices": [{"index": at, "message": {"content": text}} for at, text in enumerate(texts)]}


def line(count: int | None = None) -> dict[str, Any]:
    return {"custom_id": "a", "body": {} if count is None else {"n": count}}


def test_one_choice_has_no_metrics() -> None:
    assert score_response(EvalSpec("a"), chats("a"), line()) == {
        "score": 1,
        "match": "exact",
        "group": "all",
        "expected": "a",
        "extracted": "a",
    }


def test_all_choices_are_scored() -> None:
    found = score_response(EvalSpec("a", cluster="c"), chats("a", "b", "a", "a"), line(4))
    assert found == {
        "score": 0.75,
        "match": "exact",
        "group": "all",
        "expected": "a",
        "extracted": "a",
        "cluster": "c",
        "scores": {"mean": 0.75, "pass@4": 1, "pass^4": 0, "majority": 1},
        "choices": [1, 0, 1, 1],
    }
    json.dumps(found)


def test_the_first_metric_is_the_score() -> None:
    spec = parse_eval({"expected": "a", "metrics": ["pass@2", "majority"]}, {})
    found = score_response(spec, chats("b", "b", "a"), line(3))
    assert (found["score"], found["scores"]) == (
        pytest.approx(2 / 3),
        {"pass@2": pytest.approx(2 / 3), "majority": 0},
    )


def test_failed_lines_count_in_every_metric() -> None:
    found = score_response(EvalSpec("a"), None, line(2))
    assert found["score"] == 0 and found["scores"] == {"mean": 0, "pass@2": 0, "pass^2": 0, "majority": 0}
    assert "choices" not in found


def test_choices_that_are_missing_score_nothing() -> None:
    found = score_response(EvalSpec("a"), chats("a"), line(2))
    assert found["score"] == 0.5 and found["choices"] == [1, 0]


def test_of_several_prompts_the_first_is_scored() -> None:
    body = {"choices": [{"text": "a"}, {"text": "b"}]}
    assert score_response(EvalSpec("b"), body, {"body": {"prompt": ["x", "y"]}})["score"] == 0
    assert score_response(EvalSpec("a"), body, {"body": {"prompt": ["x", "y"]}})["score"] == 1


def test_votes_of_matches_without_wrong_answers() -> None:
    """`contains` finds nothing in a wrong answer, so that those are counted too. The twin: `exact`."""
    found = score_response(EvalSpec("a", "contains"), chats("a", "b", "c"), line(3))
    assert found["scores"]["majority"] == 0
    found = score_response(EvalSpec("a", "exact"), chats("a", "b", "c", "a"), line(4))
    assert found["scores"]["majority"] == 1


@pytest.mark.parametrize(
    ("spec", "answers"),
    [
        ({"expected": 42, "match": "number"}, ["42", "42", "It is 42.", "It is 42.", "41", "41", "41"]),
        ({"expected": "Paris", "ignore_case": True}, ["Paris", "paris ", "PARIS", "Rome", "Rome"]),
        ({"expected": "caf\u00e9"}, ["caf\u00e9", "cafe\u0301", "tea", "milk"]),
        ({"expected": "B", "match": "regex", "pattern": r"is( \w)"}, ["is B", "is B", "is A", "is C"]),
        (
            {"expected": "B", "match": "regex", "pattern": r"is (\w)", "ignore_case": True},
            ["is B", "is b", "is A", "is C"],
        ),
        ({"expected": {"a": 1}, "match": "json"}, ['{"a": 1}', '{"a": 1.0}', '{"a": 2}', '{"a": 3}']),
    ],
)
def test_answers_vote_as_they_are_compared(spec: dict[str, object], answers: list[str]) -> None:
    found = score_response(parse_eval(spec, {}), chats(*answers), line(len(answers)))
    assert found["scores"]["majority"] == 1


def test_case_tells_answers_apart_where_it_is_compared() -> None:
    """Two answers of three vote against each other without `ignore_case`."""
    found = score_response(parse_eval({"expected": "Paris"}, {}), chats("Paris", "paris", "PARIS"), line(3))
    assert found["scores"]["majority"] == pytest.approx(1 / 3)


def test_text_behind_a_marker() -> None:
    """For raw completions of reasoning models, whose text is not parsed."""
    spec = parse_eval({"expected": "4", "after": "</think>"}, {})
    for text, score in (("5</think> 4", 1), ("4</think> 5", 0), ("4", 0), ("a</think>b</think>4", 1)):
        assert score_response(spec, {"choices": [{"text": text}]})["score"] == score


REASONED = [
    {
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "no", "reasoning_content": "SECRET"},
                "logprobs": {"content": [{"token": "SECRET"}]},
                "token_ids": [83],
            },
            {"index": 1, "message": {"content": None, "reasoning": "SECRET, and cut"}, "logprobs": None},
        ]
    },
    {
        "output": [
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "SECRET"}]},
            {"type": "message", "content": [{"type": "output_text", "text": "no"}]},
        ]
    },
    {
        "type": "message",
        "content": [
            {"type": "thinking", "thinking": "SECRET", "signature": "SECRET"},
            {"type": "redacted_thinking", "data": "SECRET"},
            {"type": "text", "text": "no"},
        ],
    },
]


class Recorder:
    """A scorer that keeps what it gets."""

    name = "recorder"
    digest = ""

    def __init__(self) -> None:
        self.seen: list[ScoredAnswer] = []

    def score(self, answer: ScoredAnswer) -> Verdict:
        self.seen.append(answer)
        return Verdict(1)


@pytest.mark.parametrize("body", REASONED, ids=["chat", "responses", "messages"])
def test_reasoning_reaches_no_scorer(body: dict[str, Any]) -> None:
    """On no surface, neither as text nor in the response; and the response that is written keeps it."""
    before, scorer = copy.deepcopy(body), Recorder()
    score_response(EvalSpec(None, scorer=scorer), body, line(2 if "choices" in body else 1))
    assert scorer.seen and scorer.seen[0].text == "no"
    assert [answer.index for answer in scorer.seen] == list(range(len(scorer.seen)))
    assert "SECRET" not in str([(answer.text, answer.body) for answer in scorer.seen])
    assert body == before
    for match, expected in (("contains", "SECRET"), ("regex", "SECRET"), ("choice", "S")):
        found = score_response(EvalSpec(expected, match), body)
        assert (found["score"], found["extracted"]) == (0, None)


def test_a_response_without_reasoning_keeps_its_logprobs() -> None:
    """The twin: only what reasoning is in is taken out."""
    scorer, body = Recorder(), chats("no")
    body["choices"][0]["logprobs"] = {"content": [{"token": "no"}]}
    score_response(EvalSpec(None, scorer=scorer), body, line())
    assert scorer.seen[0].body == body


def test_further_scores_are_means_of_the_choices() -> None:
    class Lengths(Recorder):
        def score(self, answer: ScoredAnswer) -> Verdict:
            note = "too short" if len(answer.text) < 2 else None
            return Verdict(0.5, answer.text, note, {"length": len(answer.text) / 10}, f"saw {answer.text}")

    found = score_response(EvalSpec(None, scorer=Lengths()), chats("abcd", "a"), line(2))
    assert found["match"] == "recorder" and found["note"] == "too short"
    assert found["comment"].startswith("saw ")
    assert found["scores"]["length"] == pytest.approx(0.25) and found["scores"]["pass@2"] == 0


def test_a_refused_line_may_have_fewer_choices_than_its_metric_needs() -> None:
    """It scores 0 in every metric, whatever its `n` is."""
    spec = parse_eval({"expected": "a", "metrics": ["pass^3", "pass@8"]}, {})
    for body in ({}, {"n": 2}, {"n": "4"}, {"n": 10**9}):
        found = score_response(spec, None, {"custom_id": "a", "body": body})
        assert (found["score"], found["scores"]) == (0, {"pass^3": 0, "pass@8": 0})
