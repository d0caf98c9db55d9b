"""OpenAI's own client with vLLM's fields of generation, which go into `extra_body`, and with `suffix`."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import OpenAI

from mlxrun.server.engine_state import ENGINE
from tests.helpers.served_model import HELLO, ModelServer


def chat(client: OpenAI, **fields: Any) -> Any:
    extra = {key: fields.pop(key) for key in tuple(fields) if key not in ("stream", "stream_options", "stop")}
    return client.chat.completions.create(
        model="m", messages=HELLO, temperature=0, extra_body=extra, **fields
    )  # type: ignore[arg-type]


def complete(client: OpenAI, prompt: Any, **extra: Any) -> Any:
    return client.completions.create(
        model="m", prompt=prompt, max_tokens=extra.pop("max_tokens", 8), temperature=0, extra_body=extra
    )


def test_min_tokens(openai_client: OpenAI) -> None:
    """The answer of two digits goes on; without a minimum, and with one that it has anyway, it does not."""
    plain = chat(openai_client)
    count = plain.usage.completion_tokens
    assert plain.choices[0].message.content == "42"
    assert chat(openai_client, min_tokens=count).choices[0].message.content == "42"
    longer = chat(openai_client, min_tokens=count + 5, max_tokens=40)
    assert longer.usage.completion_tokens >= count + 5
    assert longer.choices[0].message.content.startswith("42")
    stopped = chat(openai_client, min_tokens=count + 5, max_tokens=40, stop="2")
    assert stopped.usage.completion_tokens >= count + 5
    streamed = chat(openai_client, min_tokens=count + 5, max_tokens=40, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == longer.choices[0].message.content
    with pytest.raises(openai.BadRequestError) as caught:
        chat(openai_client, min_tokens=5, max_tokens=4)
    assert caught.value.param == "min_tokens"


def test_a_response_format_ends_the_answer_before_the_minimum(openai_client: OpenAI) -> None:
    body = {"structured_outputs": {"choice": ["yes", "no"]}, "min_tokens": 30, "max_tokens": 40}
    answer = chat(openai_client, **body)
    assert answer.choices[0].message.content in ("yes", "no") and answer.choices[0].finish_reason == "stop"


def test_token_ids(openai_client: OpenAI, served: ModelServer) -> None:
    """Of prompt and answer; they decode to what was asked and answered, and a stream adds up to the same."""
    model = served.app[ENGINE].model
    answer = chat(openai_client, return_token_ids=True)
    prompt = model.tokenizer.decode(answer.prompt_token_ids)
    assert HELLO[0]["content"] in prompt and len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    *ids, stop = answer.choices[0].token_ids
    assert stop in model.eos_ids and len(ids) == answer.usage.completion_tokens
    assert model.tokenizer.decode(ids) == answer.choices[0].message.content
    chunks = list(chat(openai_client, return_token_ids=True, stream=True))
    assert chunks[0].prompt_token_ids == answer.prompt_token_ids
    streamed = [i for chunk in chunks for i in getattr(chunk.choices[0], "token_ids", [])]
    assert streamed == answer.choices[0].token_ids
    (choice,) = complete(openai_client, "Once", return_token_ids=True).choices
    again = complete(openai_client, choice.prompt_token_ids, return_token_ids=True).choices[0]
    assert (again.text, again.token_ids) == (choice.text, choice.token_ids)
    assert not hasattr(chat(openai_client), "prompt_token_ids")


def test_logprobs_with_token_ids(openai_client: OpenAI) -> None:
    fields = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 1}
    (choice,) = complete(openai_client, "Once", **fields).choices
    names = [f"token_id:{token}" for token in choice.token_ids]
    assert choice.logprobs.tokens == names[: len(choice.logprobs.tokens)]


def test_token_counts_in_every_chunk(openai_client: OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(openai_client, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == counts[-2] > 0
    assert all(chunk.usage.prompt_tokens == chunks[-1].usage.prompt_tokens for chunk in chunks)


def test_a_suffix_needs_a_model_for_it(openai_client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="vocabulary") as caught:
        openai_client.completions.create(model="m", prompt="def f():", suffix="\nf()")
    assert caught.value.param == "suffix"
    assert openai_client.completions.create(model="m", prompt="a", suffix="", max_tokens=2).choices
