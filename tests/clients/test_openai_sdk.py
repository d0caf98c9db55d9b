"""OpenAI's own client on the embedded model: every endpoint, stream and not, sync and async, tools, images.

Sampling and job parity are here too, as they need the same server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from pathlib import Path
from typing import Any, Literal

import aiohttp
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from mlxrun.cli.main import main
from mlxrun.server.http.access import CONFIG_HASH
from tests.helpers.served_model import (
    DUBLIN,
    HELLO,
    LONG,
    THINK,
    WEATHER,
    ModelServer,
    check_same,
    make_image_messages,
    summarize,
)


def ask(client: OpenAI, messages: Any, **fields: Any) -> Any:
    return client.chat.completions.create(model="gpt-4o", messages=messages, **fields)


def streamed(client: OpenAI, messages: Any, **fields: Any) -> Any:
    """The completion that the client's own accumulator makes of a stream."""
    with client.chat.completions.stream(model="gpt-4o", messages=messages, **fields) as stream:
        for _ in stream:
            pass
        try:
            return stream.get_final_completion()
        except openai.LengthFinishReasonError as error:  # its helper wants whole answers
            return error.completion


def test_models(openai_client: OpenAI) -> None:
    """A model without names answers to any: the response says which it is."""
    (listed,) = openai_client.models.list().data
    assert (listed.id, listed.object, listed.owned_by) == ("embedded", "model", "mlxrun")
    assert listed.max_model_len == 4096
    for name in ("embedded", "claude-sonnet-5", "Qwen/Qwen3-0.6B"):
        assert openai_client.models.retrieve(name).id == "embedded"


def test_chat(openai_client: OpenAI, served: ModelServer) -> None:
    whole = ask(openai_client, HELLO)
    (choice,) = whole.choices
    assert choice.message.content == "42" and choice.finish_reason == "stop"
    assert whole.id.startswith("chatcmpl-") and whole.object == "chat.completion"
    assert whole.system_fingerprint == f"fp_{served.app[CONFIG_HASH][:10]}"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    again = ask(openai_client, HELLO)
    assert again.id != whole.id and again.usage.prompt_tokens_details.cached_tokens > 0
    check_same(whole, again)
    check_same(whole, streamed(openai_client, HELLO))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 5},
        {"max_completion_tokens": 5, "n": 3, "temperature": 1.5, "seed": 7},
        {"stop": ["word3"], "user": "u"},
        {"logprobs": True, "top_logprobs": 3, "max_tokens": 12},
        {"logit_bias": {"100": 5}, "presence_penalty": 0.5, "frequency_penalty": 0.5, "max_tokens": 12},
        {"temperature": 1, "seed": 3, "top_p": 0.9, "extra_body": {"top_k": 9, "min_p": 0.02}},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
def test_a_stream_says_what_the_response_says(openai_client: OpenAI, fields: Any) -> None:
    """With every kind of setting; seeds make drawn answers the same."""
    fields = {"max_tokens": 40, **fields} if "max_completion_tokens" not in fields else fields
    whole = ask(openai_client, LONG, **fields)
    other = streamed(openai_client, LONG, stream_options={"include_usage": True}, **fields)
    assert whole.usage.completion_tokens == other.usage.completion_tokens > 0
    check_same(whole, other)


def test_logprobs(openai_client: OpenAI) -> None:
    (choice,) = ask(openai_client, HELLO, logprobs=True, top_logprobs=2).choices
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == choice.message.content
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)
    assert tokens[0].token == tokens[0].top_logprobs[0].token and math.exp(tokens[0].logprob) > 0.5


def test_the_chunks_of_a_stream(openai_client: OpenAI) -> None:
    chunks = list(ask(openai_client, HELLO, stream=True, stream_options={"include_usage": True}, n=2))
    assert [c.choices for c in chunks].count([]) == 1 and chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0 and all(c.usage is None for c in chunks[:-1])
    assert {c.object for c in chunks} == {"chat.completion.chunk"} and len({c.id for c in chunks}) == 1
    for index in range(2):
        parts = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert parts[0].delta.role == "assistant" and parts[-1].finish_reason == "stop"
        assert all(part.delta.role is None and part.finish_reason is None for part in parts[1:-1])


def test_reasoning_is_not_content(openai_client: OpenAI) -> None:
    fields = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    whole = ask(openai_client, THINK, **fields)
    (choice,) = whole.choices
    assert choice.message.reasoning_content and "think>" not in choice.message.content
    assert choice.message.content.endswith("47")
    assert 0 < whole.usage.completion_tokens_details.reasoning_tokens < whole.usage.completion_tokens
    text = reasoning = ""
    for chunk in ask(openai_client, THINK, stream=True, **fields):
        text += chunk.choices[0].delta.content or ""
        reasoning += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
    assert (text, reasoning) == (choice.message.content, choice.message.reasoning_content)


def test_tools(openai_client: OpenAI) -> None:
    """A call, whole and in pieces, and the answer to its result."""
    whole = ask(openai_client, DUBLIN, tools=[WEATHER], tool_choice="auto", parallel_tool_calls=True)
    (choice,) = whole.choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.function.name == "fetch_weather" and json.loads(call.function.arguments) == {
        "place": "Dublin"
    }
    check_same(whole, streamed(openai_client, DUBLIN, tools=[WEATHER]))
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"weather": "sunny", "degrees": 21}'}
    history = [*DUBLIN, choice.message.model_dump(exclude_none=True), result]
    after = ask(openai_client, history, tools=[WEATHER])
    assert after.choices[0].finish_reason == "stop" and "unny" in after.choices[0].message.content


def test_images(openai_client: OpenAI) -> None:
    for colour in ("red", "blue"):
        whole = ask(openai_client, make_image_messages(colour), max_tokens=8)
        assert colour in whole.choices[0].message.content
        check_same(whole, streamed(openai_client, make_image_messages(colour), max_tokens=8))


def test_completions(openai_client: OpenAI) -> None:
    """String, list, token ids, lists of token ids; several choices; echo; streams."""

    def complete(prompt: Any, **fields: Any) -> Any:
        return openai_client.completions.create(model="x", prompt=prompt, max_tokens=6, **fields)

    text = "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"
    one = complete(text)
    assert (one.choices[0].text, one.object) == ("42", "text_completion")
    ids = openai_client.post("/tokenize", body={"prompt": text}, cast_to=object)["tokens"]
    for prompt in ([text], ids, [ids]):
        assert complete(prompt).choices[0].text == "42"
    both = complete([text, text], n=2, logprobs=1)
    assert [(c.index, c.text) for c in both.choices] == [(i, "42") for i in range(4)]
    assert both.usage.prompt_tokens == 2 * one.usage.prompt_tokens
    chunks = list(complete([text, text], n=2, logprobs=1, stream=True))
    for choice in both.choices:
        parts = [c.choices[0] for c in chunks if c.choices[0].index == choice.index]
        assert "".join(part.text for part in parts) == "42" and parts[-1].finish_reason == "stop"
        logs = [log for part in parts if part.logprobs for log in part.logprobs.token_logprobs]
        assert logs == pytest.approx(choice.logprobs.token_logprobs, abs=1e-5)
    assert complete("a b", echo=True).choices[0].text.startswith("a b")
    assert next(iter(complete("a b", echo=True, stream=True))).choices[0].text == "a b"


def test_tokens_are_what_the_engine_gets(openai_client: OpenAI) -> None:
    """Counts of text, tools and images are those of usage; and the way back."""

    def post(path: str, **body: Any) -> Any:
        return openai_client.post(path, body=body, cast_to=object)

    for messages, more in ((HELLO, {}), (DUBLIN, {"tools": [WEATHER]}), (make_image_messages(), {})):
        counted = post("/tokenize", messages=messages, **more)
        assert counted["count"] == len(counted["tokens"]) and counted["max_model_len"] == 4096
        assert counted["count"] == ask(openai_client, messages, max_tokens=1, **more).usage.prompt_tokens
    text = "Hello, w\u00f6rld \U0001f600 <|im_end|>"
    tokens = post("/tokenize", prompt=text, return_token_strs=True)
    assert post("/detokenize", tokens=tokens["tokens"])["prompt"] == text
    assert len(tokens["token_strs"]) == tokens["count"]


async def test_the_async_client(served: ModelServer) -> None:
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["embedded"]
        whole = await client.chat.completions.create(model="m", messages=HELLO)
        text = ""
        stream = await client.chat.completions.create(
            model="m",
            messages=HELLO,
            stream=True,
        )
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
        assert text == whole.choices[0].message.content == "42"
        calls = await client.chat.completions.create(
            model="m",
            messages=DUBLIN,
            tools=[WEATHER],
            stream=True,
        )
        functions = [c.function async for part in calls for c in part.choices[0].delta.tool_calls or []]
        assert functions[0].name == "fetch_weather"
        arguments = "".join(function.arguments or "" for function in functions if function)
        assert json.loads(arguments) == {"place": "Dublin"}
        seen = await client.completions.create(model="m", prompt="a", max_tokens=2, stream=True)
        assert [part async for part in seen][-1].choices[0].finish_reason == "length"


def test_errors_are_what_the_client_expects(openai_client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(openai_client, HELLO, temperature=3)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="did you mean 'temperature'"):
        ask(openai_client, HELLO, extra_body={"tempature": 1})
    with pytest.raises(openai.BadRequestError) as caught:
        ask(openai_client, [{"role": "user", "content": "word " * 5000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="does not exist"):
        schema = {"$ref": "#/nowhere"}
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
        ask(openai_client, HELLO, response_format=form)


def test_response_formats_are_enforced(openai_client: OpenAI) -> None:
    """A schema through the openai_client's own model class, and a call where none is asked for."""

    class Age(BaseModel):
        age: Literal[1, 2, 3]

    parsed = openai_client.chat.completions.parse(
        model="m", messages=HELLO, response_format=Age, max_tokens=40, temperature=0
    )
    assert parsed.choices[0].message.parsed is not None
    forced = ask(openai_client, HELLO, tools=[WEATHER], tool_choice="required", max_tokens=80)
    calls = forced.choices[0].message.tool_calls
    assert forced.choices[0].finish_reason == "tool_calls" and calls
    assert calls[0].function.name == "fetch_weather"
    assert isinstance(json.loads(calls[0].function.arguments), dict)


MIXED: list[dict[str, Any]] = [
    {"messages": HELLO},
    {"messages": make_image_messages("blue"), "max_tokens": 8},
    {"messages": DUBLIN, "tools": [WEATHER]},
]


async def together(served: ModelServer, bodies: list[dict[str, Any]]) -> list[Any]:
    """The first choice of each, all asked at once."""
    async with AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        made = await asyncio.gather(*(client.chat.completions.create(model="m", **body) for body in bodies))
    return [summarize(one) for one in made]


async def test_three_different_requests_at_once(served: ModelServer) -> None:
    """A text, an image and a tools prompt, each as it is alone."""
    alone = [(await together(served, [body]))[0] for body in MIXED]
    assert alone == [
        ("42", [], "stop"),
        ("blue", [], "stop"),
        (None, [("fetch_weather", '{"place": "Dublin"}')], "tool_calls"),
    ]
    for _ in range(3):
        assert await together(served, MIXED) == alone
    assert await together(served, MIXED[::-1]) == alone[::-1]


SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 2, "seed": 1},
    {"temperature": 1.5, "seed": 2, "top_p": 0.8, "frequency_penalty": 1},
    {"temperature": 1.5, "seed": 2, "extra_body": {"top_k": 3, "repetition_penalty": 1.3}},
]


async def test_four_rows_with_four_settings(served: ModelServer) -> None:
    """Each is what it is alone; without a seed two draws differ."""
    bodies = [{"messages": LONG, "max_tokens": 30, **settings} for settings in SETTINGS]
    alone = [(await together(served, [body]))[0] for body in bodies]
    assert len({text for text, _, _ in alone}) == 4
    assert await together(served, bodies) == alone
    free = {"messages": LONG, "max_tokens": 30, "temperature": 2}
    assert len({text for text, _, _ in await together(served, [free] * 3)}) == 3


def test_a_job_gives_the_same_answers(
    served: ModelServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same body through `mlxrun batch` and through the server."""
    bodies = [*MIXED, {"messages": LONG, "max_tokens": 20, "temperature": 2, "seed": 5}]
    bodies.append({"messages": [*HELLO, {"role": "assistant", "content": "The res"}], "extra_body": BEGUN})
    job = tmp_path / "job.jsonl"
    url = "/v1/chat/completions"
    sent = [{key: b[key] for key in b if key != "extra_body"} | b.get("extra_body", {}) for b in bodies]
    lines = [{"custom_id": f"{i}", "method": "POST", "url": url, "body": b} for i, b in enumerate(sent)]
    job.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["batch", str(job), "--set", "batch.order=input"]) == 0
    logging.getLogger().handlers.clear()  # it writes to where this test's errors go
    records = [json.loads(line) for line in (tmp_path / "job.out.jsonl").read_text().splitlines()]
    answers = [ChatCompletion.model_validate(record["response"]["body"]) for record in records]
    assert [summarize(answer) for answer in answers] == asyncio.run(together(served, bodies))


BEGUN = {"continue_final_message": True, "add_generation_prompt": False}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


def test_continuation_of_an_assistant_message(openai_client: OpenAI, served: ModelServer) -> None:
    """It goes on as the whole answer did, as a stream too, also within a thought. Without
    the two fields the text is a turn that is over, and the answer begins anew."""
    for received, more in ((HELLO, {}), (THINK, THINKING)):
        whole = ask(openai_client, received, extra_body=more).choices[0].message
        reasoning = getattr(whole, "reasoning_content", "")
        given = {"role": "assistant", "content": whole.content[:6]}
        rest = (whole.content[6:], "")
        if reasoning:
            given["content"] = f"<think>\n{reasoning[:9]}"
            rest = (whole.content, reasoning[9:])
        turns = [*received, given]
        made = ask(openai_client, turns, extra_body=BEGUN | more)
        message = made.choices[0].message
        assert (message.content, getattr(message, "reasoning_content", "")) == rest
        counted = served.call(_tokenize(served, {"messages": turns, **BEGUN, **more}))
        assert counted["count"] == made.usage.prompt_tokens
        check_same(streamed(openai_client, turns, extra_body=BEGUN | more), made)
        anew = ask(openai_client, turns, extra_body=more)
        assert anew.usage.prompt_tokens > made.usage.prompt_tokens
    assert reasoning  # of the second: it was begun within one


async def _tokenize(served: ModelServer, body: dict[str, Any]) -> Any:
    async with aiohttp.ClientSession() as session, session.post(f"{served.url}/tokenize", json=body) as reply:
        return await reply.json()


def test_nothing_is_left_over(openai_client: OpenAI, served: ModelServer) -> None:
    """A stream that is closed early, and all before, leave no request behind."""
    with ask(openai_client, LONG, stream=True, max_tokens=100) as stream:
        next(iter(stream))

    async def idle() -> None:
        while len(served.live):
            await asyncio.sleep(0.01)

    served.call(asyncio.wait_for(idle(), 60))
    assert not served.active
