"""OpenAI's response and error objects."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxrun.api.choice import Choice
from mlxrun.api.openai.response import build_error, build_response
from mlxrun.core.errors import (
    BodyTooLarge,
    EngineDead,
    Forbidden,
    NotFound,
    Overloaded,
    PromptTooLong,
    RequestError,
    Unauthorized,
)
from mlxrun.core.request import FinishReason, HitKind, TokenEvent
from tests.helpers.openai_api import (
    CHAT,
    COMPLETION,
    HI,
    MODEL_INFO,
    answer,
    chat,
    complete,
    join,
    logged,
    make,
)
from tests.helpers.tokenizers import (
    ids_of,
)


def test_chat_response() -> None:
    """The golden object."""
    prepared = chat(seed=1)
    (choice,) = answer(prepared, "hello")
    prompt = len(prepared.requests[0].prompt)
    tokens = len(ids_of("hello"))
    assert build_response(prepared, [choice], "abc", 5) == {
        "id": "chatcmpl-abc",
        "object": "chat.completion",
        "created": 5,
        "model": "fake",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "mlxrun": {"seed": 1},
    }


def test_completion_response_with_echo() -> None:
    prepared = complete(prompt=["one ", "two "], n=2, echo=True, seed=1)
    choices = answer(prepared, "a", "b", "c", "d", finish=FinishReason.LENGTH)
    choices[2].cached_tokens = 3
    choices[3].cached_tokens = 4
    body = build_response(prepared, choices, "abc", 5)
    assert (body["id"], body["object"]) == ("cmpl-abc", "text_completion")
    assert [c["text"] for c in body["choices"]] == ["one a", "one b", "two c", "two d"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert body["choices"][0] == {"index": 0, "text": "one a", "logprobs": None, "finish_reason": "length"}
    assert body["usage"]["prompt_tokens"] == 10
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    ids = complete(prompt=[104, 105], echo=True)
    assert build_response(ids, answer(ids, "!"), "x", 0)["choices"][0]["text"] == "hi!"


def test_chat_logprobs() -> None:
    prepared = chat(logprobs=True, top_logprobs=2)
    choice = Choice(prepared, 0, MODEL_INFO)
    choice.feed(TokenEvent("r", ids_of("a\u4f60"), logged("a\u4f60"), finish=FinishReason.STOP))
    body = build_response(prepared, [choice], "x", 0)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "\\xe4", "\\xbd", "\\xa0"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "a\u4f60"
    assert content[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "\\xe4", "logprob": -9999.0, "bytes": [228]},
        ],
    }
    json.dumps(body, allow_nan=False)


def test_completion_logprobs_end_with_the_text() -> None:
    """Tokens wholly behind the start of a stop string go; the text before it keeps its own."""
    prepared = complete(logprobs=2, stop="END")
    choice = Choice(prepared, 0, MODEL_INFO)
    text = "ab \u4f60END more"
    shown = join(choice.feed(TokenEvent("r", ids_of(text), logged(text))))
    assert (shown, choice.stopped, choice.stop, choice.finish_reason) == ("ab \u4f60", True, "END", "stop")
    assert choice.feed(TokenEvent("r", ids_of("x"), logged("x"), finish=FinishReason.LENGTH)) == []
    result = build_response(prepared, [choice], "x", 0)["choices"][0]["logprobs"]
    assert result == {
        "tokens": ["a", "b", " ", "bytes:\\xe4", "bytes:\\xbd", "bytes:\\xa0"],
        "token_logprobs": [-0.5, -1.5, -2.5, -3.5, -4.5, -5.5],
        "top_logprobs": [
            {"a": -0.5, "bytes:\\xe4": -9999.0},
            {"b": -1.5, "bytes:\\xe4": -9999.0},
            {" ": -2.5, "bytes:\\xe4": -9999.0},
            {"bytes:\\xe4": -3.5},  # of two with one text, the likelier one
            {"bytes:\\xbd": -4.5, "bytes:\\xe4": -9999.0},
            {"bytes:\\xa0": -5.5, "bytes:\\xe4": -9999.0},
        ],
        "text_offset": [0, 1, 2, 3, 3, 3],
    }
    assert choice.completion_tokens == len(ids_of("ab \u4f60END"))


@pytest.mark.parametrize("url", [CHAT, COMPLETION])
def test_token_ids_are_those_of_prompt_and_answer(url: str) -> None:
    """In the places where vLLM has them; the stop token is one of them, though usage does not count it."""
    body = {"messages": HI} if url == CHAT else {"prompt": ["a", "hi"]}
    prepared = make(url, {**body, "return_token_ids": True, "stop": "E", "n": 2})
    ended = Choice(prepared, 0, MODEL_INFO)
    ended.feed(TokenEvent("r", ids_of("ab")))
    ended.feed(TokenEvent("r", finish=FinishReason.STOP, stop_id=7))
    stopped = Choice(prepared, 1, MODEL_INFO)
    stopped.feed(TokenEvent("r", ids_of("aEb"), finish=FinishReason.STOP, stop_id=7))
    found = build_response(prepared, [ended, stopped], "x", 5)
    assert [c["token_ids"] for c in found["choices"]] == [[*ids_of("ab"), 7], [*ids_of("aE")]]
    assert found["usage"]["completion_tokens"] == 4
    prompt = list(prepared.requests[0].prompt)
    if url == CHAT:
        assert found["prompt_token_ids"] == prompt and "prompt_token_ids" not in found["choices"][0]
    else:
        assert [c["prompt_token_ids"] for c in found["choices"]] == [prompt, prompt]
        assert "prompt_token_ids" not in found
    plain = build_response(make(url, body), answer(make(url, body), "ab"), "x", 5)
    assert "prompt_token_ids" not in json.dumps(plain) and "token_ids" not in plain["choices"][0]


def test_logprobs_may_name_tokens_by_their_ids() -> None:
    prepared = chat(logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)
    choice = Choice(prepared, 0, MODEL_INFO)
    choice.feed(TokenEvent("r", ids_of("a"), logged("a"), finish=FinishReason.STOP))
    (token,) = build_response(prepared, [choice], "x", 5)["choices"][0]["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("token_id:97", [97])
    assert [each["token"] for each in token["top_logprobs"]] == ["token_id:97", "token_id:228"]
    prepared = complete(logprobs=2, return_tokens_as_token_ids=True)
    choice = Choice(prepared, 0, MODEL_INFO)
    choice.feed(TokenEvent("r", ids_of("a"), logged("a"), finish=FinishReason.STOP))
    found = build_response(prepared, [choice], "x", 5)["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:97"]
    assert found["top_logprobs"] == [{"token_id:97": -0.5, "token_id:228": -9999.0}]


def test_what_was_found_in_the_cache_is_reported() -> None:
    """The first choice's of each prompt, as a prompt counts once; and how it was found."""
    for prepared, expected in ((chat(n=3), 5), (complete(prompt=["a", "b"], n=2), 5 + 7)):
        choices = []
        for index, cached in enumerate((5, 6, 7, 8)[: len(prepared.requests)]):
            choice = Choice(prepared, index, MODEL_INFO)
            choice.feed(TokenEvent("r", num_computed_tokens=3, num_cached_tokens=3))
            assert choice.hit is None
            choice.feed(TokenEvent("r", num_cached_tokens=3, hit_kind=HitKind.PREFIX))
            choice.feed(TokenEvent("r", num_cached_tokens=cached, hit_kind=HitKind.SUPERSEQUENCE))
            choice.feed(TokenEvent("r", ids_of("x"), finish=FinishReason.LENGTH))
            assert (choice.cached_tokens, choice.hit) == (cached, HitKind.SUPERSEQUENCE)
            choices.append(choice)
        usage = build_response(prepared, choices, "x", 0)["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": expected}


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RequestError("a: b", param="a"), ("a: b", "invalid_request_error", "a", "invalid_request")),
        (PromptTooLong("long"), ("long", "invalid_request_error", None, "context_length_exceeded")),
        (Unauthorized("key"), ("key", "invalid_request_error", None, "invalid_api_key")),
        (Forbidden("no"), ("no", "permission_error", None, "forbidden")),
        (NotFound("m", param="model"), ("m", "invalid_request_error", "model", "not_found")),
        (BodyTooLarge("big"), ("big", "invalid_request_error", None, "request_too_large")),
        (Overloaded("full"), ("full", "rate_limit_error", None, "overloaded")),
        (EngineDead("gone"), ("gone", "server_error", None, "engine_unavailable")),
        (KeyError("secret"), ("internal error (KeyError)", "server_error", None, "internal_error")),
    ],
)
def test_error_bodies(error: Exception, expected: tuple[Any, ...]) -> None:
    body = build_error(error)["error"]
    assert (body["message"], body["type"], body["param"], body["code"]) == expected
