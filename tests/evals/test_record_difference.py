"""Where two records begin to differ, in words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from mlxrun.evals.record_difference import find_difference
from mlxrun.evals.replay import LineDifference

Json = dict[str, Any]


def make_record(content: str = "The answer is 42, of course.") -> Json:
    logprobs = {"content": [{"token": "The", "logprob": -0.5}, {"token": " answer", "logprob": -0.25}]}
    choice = {"index": 0, "message": {"content": content}, "logprobs": logprobs, "finish_reason": "stop"}
    body = {"id": "req_1", "choices": [choice], "usage": {"completion_tokens": 9}}
    response = {"status_code": 200, "request_id": "req_1", "body": body}
    return {"id": "batch_req_1", "custom_id": "a", "response": response, "error": None, "eval": {"score": 1}}


def fail(message: str = "no image") -> Json:
    return {"id": "batch_req_1", "custom_id": "a", "response": None, "error": {"message": message, "line": 3}}


def choice(record: Json) -> Json:
    found: Json = record["response"]["body"]["choices"][0]
    return found


CHANGES: list[tuple[Callable[[Json], object], str]] = [
    (
        lambda r: choice(r)["message"].update(content="The answer is 41, of course."),
        "choices[0].message.content differs from character 15 on: 'The answer is 41, of course.', "
        "was 'The answer is 42, of course.'",
    ),
    (
        lambda r: choice(r)["message"].update(content="x" * 99 + "y" * 99),
        "choices[0].message.content differs from character 0 on: 'xxxxxxxxxxxxxxxxxxxx'..., "
        "was 'The answer is 42, of'...",
    ),
    (
        lambda r: choice(r)["logprobs"]["content"][1].update(logprob=-0.2500001),
        "choices[0].logprobs.content[1].logprob is -0.2500001, was -0.25",
    ),
    (
        lambda r: choice(r)["logprobs"]["content"].pop(),
        "choices[0].logprobs.content[1] is missing, was {'token': ' answer', 'logprob': -0.25}",
    ),
    (
        lambda r: choice(r)["message"].update(tool_calls=[]),
        "choices[0].message.tool_calls is [], was missing",
    ),
    (lambda r: choice(r).update(finish_reason=None), "choices[0].finish_reason is None, was 'stop'"),
    (
        lambda r: r["response"]["body"]["usage"].update(completion_tokens=9.0),
        "usage.completion_tokens is 9.0, was 9",
    ),
    (
        lambda r: r.update(id="batch_req_2"),
        "record.id differs from character 10 on: 'batch_req_2', was 'batch_req_1'",
    ),
    (
        lambda r: r["response"]["body"].update(usage=r["response"]["body"].pop("usage"), id="req_1"),
        "",
    ),
]


@pytest.mark.parametrize("change, text", CHANGES)
def test_the_first_difference_is_named(change: Callable[[Json], object], text: str) -> None:
    new = copy.deepcopy(make_record())
    change(new)
    assert (find_difference(make_record(), new) or "") == text


def test_scores_are_not_compared() -> None:
    assert find_difference(make_record(), make_record() | {"eval": {"score": 0}}) is None


def test_the_name_of_the_model_is_not_compared() -> None:
    """Its digest identifies it. The same word anywhere else is compared."""
    old, new = make_record(), make_record()
    old["response"]["body"]["model"], new["response"]["body"]["model"] = "folder", "another"
    assert find_difference(old, new) is None
    choice(new)["message"]["model"] = "another"
    found = find_difference(old, new)
    assert found == "choices[0].message.model is 'another', was missing"


def test_the_order_of_keys_is_part_of_the_bytes() -> None:
    """Equal values in other bytes are a difference too."""
    old, new = make_record(), make_record()
    body = new["response"]["body"]
    new["response"]["body"] = {key: body[key] for key in reversed(body)}
    text = find_difference(old, new)
    assert text is not None and text.startswith("the same values are written differently from byte ")


def test_an_error_on_one_side() -> None:
    assert find_difference(make_record(), fail()) == "it was answered, and fails now: no image"
    assert find_difference(fail(), make_record()) == "it is answered now, and failed before: no image"
    text = "record.error.message differs from character 3 on: 'no text', was 'no image'"
    assert find_difference(fail(), fail("no text")) == text
    assert find_difference(fail(), fail()) is None


def test_a_line_is_named_with_its_number() -> None:
    assert str(LineDifference("a", 3, "it differs")) == "'a' (line 3 of the job): it differs"
    assert str(LineDifference("a", None, "it differs")) == "'a': it differs"
