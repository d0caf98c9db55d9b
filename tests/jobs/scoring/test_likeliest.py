"""Multiple choice by logprob, from the response to a completion of several prompts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mlxrun.jobs.scoring.eval_spec import check_line_eval, parse_eval
from mlxrun.jobs.scoring.likeliest import score_likeliest, sum_continuations
from mlxrun.jobs.scoring.line_scores import score_response

CONTEXT = "Capital of France:"


def choice(tokens: list[str], logprobs: list[float | None]) -> dict[str, Any]:
    """A choice as the completions endpoint answers with `echo`."""
    offsets = [sum(map(len, tokens[:at])) for at in range(len(tokens))]
    found = {"tokens": tokens, "token_logprobs": logprobs, "text_offset": offsets}
    return {"text": "".join(tokens), "logprobs": found, "finish_reason": "length"}


HEAD, HEAD_LOGPROBS = ["Capital", " of", " France", ":"], [None, -3.0, -1.0, -0.5]


def options(*parts: tuple[list[str], list[float]]) -> list[dict[str, Any]]:
    return [choice(HEAD + tokens, [*HEAD_LOGPROBS, *logprobs]) for tokens, logprobs in parts]


def test_sums_and_lengths() -> None:
    """Only the continuation's tokens count; its length is without the space before it."""
    found = sum_continuations(
        options(([" Par", "is"], [-0.5, -0.25]), ([" \N{SNOWMAN}"], [-2])), len(CONTEXT)
    )
    assert [(each.logprob, each.chars, each.bytes) for each in found] == [(-0.75, 5, 5), (-2, 1, 3)]


def test_white_space_that_only_some_begin_with_counts() -> None:
    """It belongs to a choice, and what all begin with to the context."""
    found = sum_continuations(options((["  ab"], [-1.0]), ([" c"], [-1.0])), len(CONTEXT))
    assert [(each.chars, each.bytes) for each in found] == [(3, 3), (1, 1)]
    found = sum_continuations(options((["\n\nab"], [-1.0]), (["\n\nc"], [-1.0])), len(CONTEXT))
    assert [each.chars for each in found] == [2, 1]


def test_a_token_across_the_border_counts() -> None:
    """A context that ends with a space shares a token with its continuation."""
    found = sum_continuations(options(([" Paris"], [-0.5])), [len(CONTEXT) + 1])
    assert (found[0].logprob, found[0].chars) == (-0.5, 5)


def test_the_normalizations() -> None:
    """Each may find another option likeliest: by sum, per character, per byte."""
    choices = options(([" a"], [-1.0]), ([" bcdef"], [-3.0]), ([" \N{SNOWMAN}\N{SNOWMAN}"], [-1.5]))
    for name, index in (("none", 0), ("chars", 1), ("bytes", 2)):
        found = score_likeliest(choices, index, {"context_chars": len(CONTEXT), "normalize": name})
        assert (found.score, found.extracted) == (1, index), name
    assert found.scores == {"acc": 0, "acc_norm": 0, "acc_bytes": 1}


def test_the_mass_of_what_is_right() -> None:
    """The share in the probability of all; sums that are too small for a float are no problem."""
    few = [math.log(part) - 2000 for part in (0.1, 0.3, 0.4)]
    choices = options(*(([f" {name}"], [value]) for name, value in zip("abc", few, strict=True)))
    found = score_likeliest(choices, [0, 1], {"context_chars": len(CONTEXT), "normalize": "mass"})
    assert found.score == found.scores["mass"] == pytest.approx(0.5)
    assert (found.extracted, found.scores["acc"]) == (2, 0)
    assert "mass" not in score_likeliest(choices, 0, {"context_chars": len(CONTEXT)}).scores


def test_ties_and_alternatives() -> None:
    choices = options(([" a"], [-1.0]), ([" b"], [-1.0]))
    assert score_likeliest(choices, 0, {"context_chars": 18}).score == 1
    assert score_likeliest(choices, 1, {"context_chars": 18}).score == 0
    assert score_likeliest(choices, [1, 0], {"context_chars": 18}).score == 1


def test_minus_infinity_is_no_problem() -> None:
    choices = options(([" a"], [-math.inf]), ([" b"], [-9999.0]))
    assert score_likeliest(choices, 1, {"context_chars": 18}).score == 1


@pytest.mark.parametrize(
    ("choices", "starts", "reason"),
    [
        ([{"text": "ab", "logprobs": None}], 1, "no logprobs"),
        (options(([" a"], [-1.0])), 20, "no logprobs of a continuation"),
        (options(([" a"], [-1.0])), 0, "the first token has no logprob"),
        (options(([" a"], [-1.0])), [1, 2], "there are 1 choices, and eval.context_chars has 2"),
    ],
)
def test_responses_that_cannot_be_scored(choices: Any, starts: Any, reason: str) -> None:
    found = score_likeliest(choices, 0, {"context_chars": starts})
    assert found.score == 0 and found.note is not None and reason in found.note


def test_the_record() -> None:
    spec = parse_eval({"match": "likeliest", "expected": 1, "context_chars": 18, "group": "g"}, {})
    body = {"choices": options(([" a"], [-2.0]), ([" b"], [-1.0]))}
    assert score_response(spec, body, {"body": {"prompt": ["x", "y"]}}) == {
        "score": 1,
        "match": "likeliest",
        "group": "g",
        "expected": 1,
        "extracted": 1,
        "scores": {"acc": 1, "acc_norm": 1, "acc_bytes": 1},
    }


GOOD = {"prompt": ["ab c", "ab d"], "echo": True, "logprobs": 1, "max_tokens": 0}


@pytest.mark.parametrize(
    ("changes", "url", "reason"),
    [
        ({}, "/v1/chat/completions", "needs a completion whose prompt is a list"),
        ({"prompt": "ab c"}, "/v1/completions", "needs a completion whose prompt is a list"),
        ({"echo": False}, "/v1/completions", "echo: true"),
        ({"max_tokens": 1}, "/v1/completions", "max_tokens: 0"),
        ({"logprobs": None}, "/v1/completions", "logprobs: 1"),
        ({"n": 2}, "/v1/completions", "n: 1"),
        ({"prompt": ["ab", "ab d"]}, "/v1/completions", r"eval.context_chars is 2, but prompt\[0\] has 2"),
        ({"prompt": ["ab c"] * 3}, "/v1/completions", None),
    ],
)
def test_lines_that_give_no_such_logprobs(changes: Any, url: str, reason: str | None) -> None:
    spec = parse_eval({"match": "likeliest", "expected": 1, "context_chars": 2}, {})
    check_line_eval(spec, "/v1/completions", GOOD)
    if reason is None:
        check_line_eval(spec, url, GOOD | changes)
        return
    with pytest.raises(ValueError, match=reason):
        check_line_eval(spec, url, GOOD | changes)


def test_indices_and_contexts_fit_the_prompts() -> None:
    for wanted, reason in (
        ({"expected": 2, "context_chars": 2}, "eval.expected must be below 2"),
        ({"expected": 0, "context_chars": [2, 2, 2]}, "eval.context_chars has 3 numbers for 2 prompts"),
        ({"expected": 0, "context_chars": 2, "normalize": "mass"}, "needs a list of right continuations"),
    ):
        with pytest.raises(ValueError, match=reason):
            check_line_eval(parse_eval({"match": "likeliest", **wanted}, {}), "/v1/completions", GOOD)
