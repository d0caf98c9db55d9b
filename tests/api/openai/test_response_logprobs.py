"""Logprobs of prompts: the echo of a completion, and vLLM's prompt_logprobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mlxrun.api.choice import Choice
from mlxrun.api.openai.response import build_response
from mlxrun.api.prepared import PreparedRequest
from mlxrun.core.errors import InternalError
from mlxrun.core.request import FinishReason, TokenEvent, TokenLogprob
from tests.helpers.openai_api import CHAT, HI, MODEL_INFO, chat, complete, image_part, logged, make, refused
from tests.helpers.prompt_scores import make_prompt_logprobs
from tests.helpers.tokenizers import FakeModelInfo, byte_tokenizer, ids_of

BEGIN = byte_tokenizer().convert_tokens_to_ids("<|begin|>")


def answer(prepared: PreparedRequest, text: str = "", model_info: FakeModelInfo = MODEL_INFO) -> Any:
    """The response body with the same answer for each choice."""
    choices = []
    for index, request in enumerate(prepared.requests):
        choice = Choice(prepared, index, model_info)
        scores = make_prompt_logprobs(request)
        choice.feed(TokenEvent("r", prompt_logprobs=scores[:2]))
        choice.feed(TokenEvent("r", prompt_logprobs=scores[2:]))
        logprobs = logged(text) if request.params.logprobs is not None else ()
        choice.feed(TokenEvent("r", ids_of(text), logprobs, finish=FinishReason.LENGTH))
        choices.append(choice)
    body = build_response(prepared, choices, "x", 5)
    json.dumps(body, allow_nan=False)
    return body


def scores_of(prompt: Sequence[int], count: int) -> list[TokenLogprob]:
    """The logprobs that the fake engine has for a prompt, from its second token on."""
    (request,) = complete(prompt=list(prompt), prompt_logprobs=count).requests
    return [score for score in make_prompt_logprobs(request) if score is not None]


def test_the_echo_of_a_text() -> None:
    """OpenAI's four lists, of the prompt and then of the answer; nothing comes before the first token."""
    text = "a \u4f60b"
    (choice,) = answer(complete(prompt=text, echo=True, logprobs=2, max_tokens=2), "xy")["choices"]
    found = choice["logprobs"]
    scores = scores_of((BEGIN, *ids_of(text)), 2)
    assert choice["text"] == text + "xy"
    assert found["tokens"] == [
        *("<|begin|>", "a", " ", "bytes:\\xe4", "bytes:\\xbd", "bytes:\\xa0", "b", "x", "y")
    ]
    assert found["token_logprobs"] == [None, *(score.logprob for score in scores), -0.5, -1.5]
    assert found["text_offset"] == [0, 0, 1, 2, 2, 2, 3, 4, 5]
    assert found["top_logprobs"][0] is None
    assert found["top_logprobs"][1] == {"a": scores[0].top[0][1], "b": scores[0].top[1][1]}
    assert found["top_logprobs"][2] == {
        **{"a": scores[1].top[0][1], "b": scores[1].top[1][1]},
        " ": scores[1].logprob,  # the token itself, if it is none of the likeliest
    }
    assert {len(values) for values in found.values()} == {9}


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_prompts_of_every_kind(max_tokens: int) -> None:
    """A text, token ids, and lists of both: one choice each, with the same logprobs for the same tokens."""
    ids = [BEGIN, *ids_of("hello")]
    prompts: list[Any] = ["hello", ids, ["hello"], [ids], ["hello", "hello"], [ids, ids]]
    text = "z" * max_tokens
    for prompt in prompts:
        body = answer(complete(prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens), text)
        for choice in body["choices"]:
            found = choice["logprobs"]
            assert found["token_logprobs"] == [None, scores_of(ids, 1)[0].logprob, *[-0.5] * max_tokens]
            assert choice["text"].removeprefix("<|begin|>") == "hello" + text
            shift = len("<|begin|>") if choice["text"].startswith("<") else 0
            assert found["text_offset"] == [0, shift, *[shift + 5] * max_tokens]
    assert answer(complete(prompt="hello", max_tokens=0))["choices"][0]["text"] == ""


def end_by_token(prepared: PreparedRequest) -> Any:
    """The logprobs of an answer `x` that a stop token ends."""
    choice = Choice(prepared, 0, MODEL_INFO)
    choice.feed(TokenEvent("r", prompt_logprobs=make_prompt_logprobs(prepared.requests[0])))
    end = {"stop_id": BEGIN, "stop_logprob": TokenLogprob(-0.25, ((BEGIN, -0.25),))}
    choice.feed(TokenEvent("r", ids_of("x"), logged("x"), finish=FinishReason.STOP, **end))
    (found,) = build_response(prepared, [choice], "x", 5)["choices"]
    return found


def test_the_token_that_ends_the_answer_has_a_logprob_behind_an_echo() -> None:
    """Harnesses take as many logprobs from the end of the list as tokens were to be generated."""
    found = end_by_token(complete(prompt="ab", echo=True, logprobs=1, max_tokens=2))
    assert (found["text"], found["finish_reason"]) == ("abx", "stop")
    assert found["logprobs"]["tokens"][-2:] == ["x", "<|begin|>"]
    assert found["logprobs"]["token_logprobs"][-2:] == [-0.5, -0.25]
    assert found["logprobs"]["top_logprobs"][-1] == {"<|begin|>": -0.25}
    assert found["logprobs"]["text_offset"][-1] == 3
    plain = end_by_token(complete(prompt="ab", logprobs=1, max_tokens=2))
    assert plain["logprobs"]["tokens"] == ["x"]


def test_tokens_of_a_stop_string_have_logprobs_behind_an_echo() -> None:
    prepared = complete(prompt="ab", echo=True, logprobs=1, max_tokens=1, stop=["y"])
    (choice,) = answer(prepared, "y")["choices"]
    assert (choice["text"], choice["logprobs"]["tokens"]) == ("ab", ["<|begin|>", "a", "b", "y"])


def test_without_alternatives_only_the_token_itself_is_shown() -> None:
    (choice,) = answer(complete(prompt="ab", echo=True, logprobs=0, max_tokens=0))["choices"]
    scores = scores_of((BEGIN, *ids_of("ab")), 0)
    assert choice["logprobs"]["top_logprobs"] == [None, {"a": scores[0].logprob}, {"b": scores[1].logprob}]
    assert choice["finish_reason"] == "length"


def test_tokens_may_be_named_by_their_ids() -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": 0, "return_tokens_as_token_ids": True}
    (choice,) = answer(complete(prompt="b", **fields))["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{BEGIN}", "token_id:98"]
    assert list(choice["logprobs"]["top_logprobs"][1]) == ["token_id:97", "token_id:98"]


def test_the_same_prompt_with_more_choices_and_ids() -> None:
    """Each choice has the echo; `return_token_ids` adds the ids."""
    body = answer(
        complete(prompt=["a", "bc"], n=2, echo=True, logprobs=1, max_tokens=1, return_token_ids=True), "x"
    )
    assert [choice["text"] for choice in body["choices"]] == ["ax", "ax", "bcx", "bcx"]
    for choice in body["choices"]:
        ids = choice["prompt_token_ids"]
        assert len(choice["logprobs"]["tokens"]) == len(ids) + 1
        assert choice["logprobs"]["token_logprobs"][1 : len(ids)] == [s.logprob for s in scores_of(ids, 1)]
        assert choice["token_ids"] == list(ids_of("x"))


def test_prompt_logprobs_of_a_completion() -> None:
    """vLLM's shape, in each choice: by id, the token itself first."""
    body = answer(complete(prompt="za", prompt_logprobs=2, max_tokens=1, n=2), "x")
    scores = scores_of((BEGIN, *ids_of("za")), 2)
    first, second = ([p for _, p in score.top] for score in scores)
    wanted = [
        None,
        {
            "122": {"logprob": scores[0].logprob, "rank": 3, "decoded_token": "z"},
            "97": {"logprob": first[0], "rank": 1, "decoded_token": "a"},
            "98": {"logprob": first[1], "rank": 2, "decoded_token": "b"},
        },
        {
            "97": {"logprob": second[0], "rank": 1, "decoded_token": "a"},
            "98": {"logprob": second[1], "rank": 2, "decoded_token": "b"},
        },
    ]
    for choice in body["choices"]:
        assert choice["prompt_logprobs"] == wanted
        assert choice["logprobs"] is None and choice["text"] == "x"
    assert list(body["choices"][0]["prompt_logprobs"][2]) == ["97", "98"]
    assert "prompt_logprobs" not in answer(complete(prompt="za"), "x")["choices"][0]


def test_both_kinds_in_one_request() -> None:
    """Each with its own number of alternatives."""
    fields = {"echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 0}
    (choice,) = answer(complete(prompt="z", **fields))["choices"]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2 and len(choice["prompt_logprobs"][1]) == 4
    fields |= {"logprobs": 3, "prompt_logprobs": 0}
    (choice,) = answer(complete(prompt="z", **fields))["choices"]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 4 and len(choice["prompt_logprobs"][1]) == 1


def test_prompt_logprobs_of_a_chat() -> None:
    """Beside the choices, as the ids are; null for the first token."""
    prepared = chat(prompt_logprobs=1, return_token_ids=True, n=2)
    body = answer(prepared, "x")
    prompt = prepared.requests[0].prompt
    assert body["prompt_token_ids"] == list(prompt)
    assert body["prompt_logprobs"][0] is None and len(body["prompt_logprobs"]) == len(prompt)
    scores = scores_of(prompt, 1)
    for token, found, score in zip(prompt[1:], body["prompt_logprobs"][1:], scores, strict=True):
        assert found[str(token)]["logprob"] == score.logprob
    assert "prompt_logprobs" not in body["choices"][0]
    assert "prompt_logprobs" not in answer(chat(), "x")


def test_tokens_of_images_have_none() -> None:
    model_info = FakeModelInfo(vision=True)
    messages = [{"role": "user", "content": [image_part("red"), {"type": "text", "text": "hi"}]}]
    prepared = make(CHAT, {"messages": messages, "prompt_logprobs": 0}, model_info)
    ((start, stop),) = prepared.requests[0].image_spans
    found = answer(prepared, "x", model_info)["prompt_logprobs"]
    assert [at for at, each in enumerate(found) if each is None] == [0, *range(start, stop)]


def test_impossible_tokens_are_json() -> None:
    """A probability of zero is OpenAI's -9999."""
    prepared = complete(prompt="a", echo=True, logprobs=1, prompt_logprobs=1, max_tokens=0)
    choice = Choice(prepared, 0, MODEL_INFO)
    score = TokenLogprob(float("-inf"), ((98, -0.0),))
    choice.feed(TokenEvent("r", prompt_logprobs=(score,), finish=FinishReason.LENGTH))
    (found,) = build_response(prepared, [choice], "x", 5)["choices"]
    assert found["logprobs"]["token_logprobs"] == [None, -9999.0]
    assert found["prompt_logprobs"][1]["97"]["logprob"] == -9999.0
    json.dumps(found, allow_nan=False)


def test_missing_logprobs_are_an_error() -> None:
    """An engine that returned too few or too many: no list is ever shifted."""
    for fields in ({"echo": True, "logprobs": 1}, {"prompt_logprobs": 1}):
        prepared = complete(prompt="abc", **fields)
        scores = make_prompt_logprobs(prepared.requests[0])
        for wrong in (scores[:-1], (*scores, scores[0]), ()):
            choice = Choice(prepared, 0, MODEL_INFO)
            choice.feed(TokenEvent("r", prompt_logprobs=wrong, finish=FinishReason.LENGTH))
            with pytest.raises(InternalError, match="incomplete"):
                build_response(prepared, [choice], "x", 5)


def test_of_two_tokens_with_one_text_the_likelier_is_shown() -> None:
    """Else a client that compares a token with the likeliest one would think that it is the same."""
    prepared = complete(prompt="a", echo=True, logprobs=2, max_tokens=0)
    request = prepared.requests[0]
    unknown = len(byte_tokenizer()) + 1, len(byte_tokenizer()) + 2  # both without text
    choice = Choice(replace(prepared, requests=(replace(request, prompt=(65, unknown[1])),)), 0, MODEL_INFO)
    score = TokenLogprob(-2.0, ((unknown[0], -1.0), (unknown[1], -2.0)))
    choice.feed(TokenEvent("r", prompt_logprobs=(score,), finish=FinishReason.LENGTH))
    prepared = replace(prepared, requests=(replace(request, prompt=(65, unknown[1])),))
    (found,) = build_response(prepared, [choice], "x", 5)["choices"]
    assert found["logprobs"]["top_logprobs"][1] == {"": -1.0}


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions"])
def test_streams_have_no_prompt_logprobs(url: str) -> None:
    body = {"messages" if url == CHAT else "prompt": HI if url == CHAT else "a", "prompt_logprobs": 1}
    assert make(url, body).prompt_logprobs == 1
    error = refused(url, {**body, "stream": True}, stream=True)
    assert (error.param, error.code) == ("prompt_logprobs", "unsupported_parameter")


def test_windows_are_joined_to_one_choice() -> None:
    """Each token once, in order, with the logprob of its own window."""
    windows = {"size": 4, "stride": 2}
    prepared = complete(prompt="abcdefg", prompt_windows=windows, echo=True, logprobs=0, max_tokens=0)
    body = answer(prepared)
    wanted = [each.logprob for request in prepared.requests for each in make_prompt_logprobs(request) if each]
    (found,) = body["choices"]
    assert found["logprobs"] == {"tokens": list("abcdefg"), "token_logprobs": wanted}
    assert (found["text"], found["finish_reason"]) == ("abcdefg", "length")
    assert body["usage"]["prompt_tokens"] == sum(len(each.prompt) for each in prepared.requests)
    lost = replace(
        prepared, requests=(*prepared.requests[:2], replace(prepared.requests[2], logprobs_from=3))
    )
    choice = Choice(prepared, 2, MODEL_INFO)
    choice.feed(TokenEvent("r", prompt_logprobs=make_prompt_logprobs(prepared.requests[2])))
    with pytest.raises(RuntimeError, match="logprobs of"):
        build_response(lost, [choice], "x", 5)
