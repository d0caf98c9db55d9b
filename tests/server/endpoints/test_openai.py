"""OpenAI's surface on a scripted engine: golden events, errors and their places, odd bodies."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrun.api.openai.fields import BODIES
from mlxrun.config.settings import ApiSettings, SchedulerSettings
from mlxrun.core.errors import EngineDead, Overloaded, PromptTooLong
from mlxrun.core.request import FinishReason, HitKind, TokenEvent
from mlxrun.server.http.access import CONFIG_HASH
from tests.helpers.bracket_formats import TOOL, Brackets
from tests.helpers.examples import count_examples
from tests.helpers.server_fakes import FakeEngine, Reply, Serving, make_script, run_server, server_config
from tests.helpers.tokenizers import TOOLS, FakeModelInfo

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
GOLDEN = Path(__file__).parents[2] / "helpers" / "golden"
HOST = FakeModelInfo(chat_template=TOOLS)
SAYS = make_script("[y] a~b(", '{"x":1}', ")", FinishReason.STOP)


class Slow(FakeEngine):
    """Waits until each token is taken, so that none merge."""

    def __init__(self) -> None:
        super().__init__(HOST, self.act)

    def act(self, request: Any) -> Any:
        async def taken() -> None:
            while self.running[request.id]._event is not None:
                await asyncio.sleep(0)

        for char in "[y] a~b({1})":
            yield char
            yield taken


def normal(text: str) -> str:
    """Without what differs from run to run: ids, times, and how the choices' chunks are interleaved."""
    text = re.sub(r'"(chatcmpl|cmpl)-[0-9a-f]{24}"', r'"\1-ID"', text)
    text = re.sub(r'"fp_[0-9a-f]{10}"', '"fp_X"', text)
    text = re.sub(r'"created":\d+', '"created":0', text)
    blocks = text.split("\n\n")
    return "\n\n".join(sorted(blocks, key=choice_of)) if len(blocks) > 1 else text


def choice_of(block: str) -> int:
    found = re.search(r'"choices":\[\{"index":(\d+)', block)
    return int(found[1]) if found else 1000


def golden(name: str, text: str) -> None:
    """Compare with a file in tests/helpers/golden. A missing one is written, and the test fails once."""
    path = GOLDEN / name
    found = normal(text)
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
        pytest.fail(f"{name} was written: look at it, then run again")
    assert found == path.read_text(encoding="utf-8")


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {}),
    "chat_tools": (CHAT, {"tools": [TOOL], "stream_options": {"include_usage": True}}),
    "chat_n": (CHAT, {"n": 2, "max_tokens": 3}),
    "chat_logprobs": (CHAT, {"logprobs": True, "top_logprobs": 1, "max_tokens": 2}),
    "completion": (COMPLETION, {"prompt": ["x", "y"], "echo": True, "stop": "b"}),
    "completion_echo_logprobs": (
        COMPLETION,
        {
            "prompt": [[120, 121], [65]],
            "echo": True,
            "logprobs": 1,
            "max_tokens": 1,
            "return_token_ids": True,
        },
    ),
    "completion_scored": (COMPLETION, {"prompt": "xy", "echo": True, "logprobs": 2, "max_tokens": 0}),
    "completion_logprobs": (COMPLETION, {"prompt": "x", "logprobs": 1, "max_tokens": 2}),
}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("name", REQUESTS)
async def test_golden(name: str, stream: bool) -> None:
    """The bytes of every kind of answer."""
    url, fields = REQUESTS[name]
    body = {"messages": HI, "seed": 1, "stream": stream, **fields}
    if url == COMPLETION:
        del body["messages"]
    if not stream:
        body.pop("stream_options", None)
    async with run_server(engine=Slow(), formats=Brackets()) as s:
        reply = await s.post(url, body)
        assert reply.status == 200
        kind = "text/event-stream" if stream else "application/json"
        assert reply.headers["Content-Type"].startswith(kind)
        golden(f"openai_{name}{'.sse' if stream else '.json'}", reply.body.decode())
        await s.settle()


def deltas(reply: Reply) -> list[Any]:
    return [data["choices"][0] for _, data in reply.events if data != "[DONE]" and data["choices"]]


async def test_choices_are_streamed_as_they_are_generated() -> None:
    """n > 1: the second choice speaks while the first waits, and each ends once."""
    go = asyncio.Event()

    def script(request: Any) -> Any:
        slow = request.id.endswith("-0")
        yield "a"
        if slow:
            yield go.wait
        yield "b"
        if not slow:
            go.set()

    async with run_server(model_info=HOST, script=script) as s:
        reply = await s.post(CHAT, {"messages": HI, "n": 2, "stream": True})
        order = [
            (c["index"], c["delta"].get("content"), c["finish_reason"])
            for c in deltas(reply)
            if "role" not in c["delta"]
        ]
        assert sorted(order, key=lambda row: row[0]) == [
            *((0, "a", None), (0, "b", None), (0, None, "stop")),
            *((1, "a", None), (1, "b", None), (1, None, "stop")),
        ]
        assert order.index((1, "b", None)) < order.index((0, "b", None))
        assert reply.events[-1][1] == "[DONE]"


async def test_the_response_has_cached_tokens_and_the_fingerprint() -> None:
    hit = TokenEvent("", num_computed_tokens=4, num_cached_tokens=3, hit_kind=HitKind.PREFIX)
    async with run_server(script=make_script(hit, "x")) as s:
        body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
        *_, last, usage, done = [data for _, data in (await s.post(CHAT, body)).events]
        assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 3} and done == "[DONE]"
        (request,) = s.engine.requests
        assert last["mlxrun"] == {"seed": request.params.seed}
        whole = (await s.post(CHAT, {"messages": HI, "seed": 9})).json
        assert whole["mlxrun"] == {"seed": 9} and s.engine.requests[-1].params.seed == 9
        assert whole["system_fingerprint"] == f"fp_{s.app[CONFIG_HASH][:10]}"


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_before_the_first_token_has_its_status(stream: bool) -> None:
    cases = ((Overloaded("full"), 429), (PromptTooLong("long"), 400), (EngineDead("gone"), 503))
    for error, status in cases:
        async with run_server(script=make_script(error)) as s:
            reply = await s.post(CHAT, {"messages": HI, "stream": stream})
            assert reply.status == status and reply.json["error"]["code"] == error.code
            await s.settle()


async def test_an_error_in_a_stream_is_its_last_event() -> None:
    """And the others' choices are aborted."""

    def script(request: Any) -> Any:
        yield "ab"
        yield EngineDead("gone") if request.id.endswith("-0") else asyncio.Event().wait

    async with run_server(script=script) as s:
        reply = await s.post(CHAT, {"messages": HI, "stream": True, "n": 2})
        assert reply.status == 200
        assert reply.events[-1][1]["error"] == {
            "message": "gone",
            "type": "server_error",
            "param": None,
            "code": "engine_unavailable",
        }
        assert "[DONE]" not in [data for _, data in reply.events]
        await s.settle()
        assert [rid[-2:] for rid in s.engine.aborted] == ["-1"]


async def test_a_stop_string_ends_the_row() -> None:
    async with run_server(script=make_script("one", " two three", asyncio.Event().wait)) as s:
        for stream in (True, False):
            reply = await s.post(CHAT, {"messages": HI, "stop": " two", "stream": stream})
            choices = deltas(reply) if stream else reply.json["choices"]
            assert choices[-1]["finish_reason"] == "stop"
            await s.settle()
        assert reply.json["choices"][0]["message"]["content"] == "one"
        assert len(s.engine.aborted) == 2


async def test_names() -> None:
    """With names in the config only these are served; the response has the model's own."""
    host = FakeModelInfo(name="m", names=("alias", "org/other"))
    async with run_server(server_config(), model_info=host) as s:
        listed = (await s.get("/v1/models")).json
        assert [model["id"] for model in listed["data"]] == ["m", "alias", "org/other"]
        assert (await s.get("/v1/models/org/other")).json["id"] == "org/other"
        assert (await s.get("/v1/models/org%2Fother")).json["id"] == "org/other"
        assert (await s.post(CHAT, {"messages": HI, "model": "alias"})).json["model"] == "m"
        for reply in (
            await s.get("/v1/models/gpt-4o"),
            await s.post(CHAT, {"messages": HI, "model": "gpt-4o"}),
            await s.post(COMPLETION, {"prompt": "x", "model": "gpt-4o", "stream": True}),
            await s.post("/tokenize", {"prompt": "x", "model": "gpt-4o"}),
        ):
            error = reply.json["error"]
            assert (reply.status, error["code"], error["param"]) == (404, "model_not_found", "model")
            assert "m, alias, org/other" in error["message"]
        page = (await s.get("/v1/models", anthropic_version="2023-06-01")).json
        one = (await s.get("/v1/models/org/other", anthropic_version="2023-06-01")).json
        assert one == page["data"][2] and one["type"] == "model"


async def test_a_surface_that_is_off_is_not_found() -> None:
    config = replace(server_config(), apis=ApiSettings(openai=False, tokenize=False))
    async with run_server(config) as s:
        for path in (CHAT, COMPLETION, "/tokenize", "/v1/detokenize"):
            assert (await s.post(path, {})).status == 404
        assert (await s.get("/v1/models")).status == 404


async def test_errors_name_the_field() -> None:
    cases: list[tuple[str, Any, str | None, str]] = [
        (CHAT, [], "body", "expected an object"),
        (CHAT, {}, "messages", "missing"),
        (CHAT, {"messages": []}, "messages", "at least one message"),
        (CHAT, {"messages": HI, "tempature": 1}, "tempature", "did you mean 'temperature'"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "robot"),
        (CHAT, {"messages": HI, "stop": ["x"] * 10_000}, "stop", "at most 16"),
        (CHAT, {"messages": HI, "response_format": {"type": "jsn"}}, "response_format.type", "json_object"),
        (CHAT, '{"messages": [], "messages": []}', None, "occurs twice"),
        (CHAT, '{"temperature": NaN}', None, "NaN"),
        (CHAT, b"\xff\xfe", None, "not UTF-8"),
        (CHAT, "", None, "empty"),
        (COMPLETION, {"prompt": [[1], [99_999]]}, "prompt[1][0]", "vocabulary"),
        (COMPLETION, {"prompt": "x", "logprobs": 30}, "logprobs", "maximum"),
    ]
    async with run_server() as s:
        for url, body, param, words in cases:
            reply = await s.post(url, body)
            error = reply.json["error"]
            assert (reply.status, error["param"]) == (400, param) and words in error["message"]
            assert error["type"] == "invalid_request_error"
        assert s.engine.requests == []


async def test_several_prompts_and_priority_reach_the_engine() -> None:
    async with run_server() as s:
        await s.post(COMPLETION, {"prompt": ["a", "b"], "n": 2, "user": "u"})
        assert len({r.id for r in s.engine.requests}) == 4 and {
            r.fairness_key for r in s.engine.requests
        } == {"u"}
        reply = await s.post(CHAT, {"messages": HI, "priority": 1})
        assert reply.status == 200 and s.engine.requests[-1].priority == 0
    config = server_config()
    strict = replace(config, server=replace(config.server, strict_fields=True))
    async with run_server(config=strict) as s:
        reply = await s.post(CHAT, {"messages": HI, "priority": 1})
        assert reply.status == 400 and "scheduler.policy" in reply.json["error"]["message"]
    async with run_server(config=replace(config, scheduler=SchedulerSettings(policy="priority"))) as s:
        await s.post(CHAT, {"messages": HI, "priority": 3})
        assert s.engine.requests[-1].priority == 3


async def test_more_choices_than_the_queue_holds() -> None:
    """A 429 would ask the client to try again for ever."""
    config = replace(server_config(), scheduler=SchedulerSettings(max_queue=3))
    async with run_server(config) as s:
        assert (await s.post(CHAT, {"messages": HI, "n": 3})).status == 200
        reply = await s.post(COMPLETION, {"prompt": ["a", "b"], "n": 2})
        error = reply.json["error"]
        assert (reply.status, error["param"]) == (400, "n") and "max_queue (3)" in error["message"]
        error = (await s.post(COMPLETION, {"prompt": ["a", "b", "c", "d"]})).json["error"]
        assert error["param"] == "prompt" and "4 choices" in error["message"]


CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
RECORDED: dict[str, dict[str, Any]] = {
    "opencode": {
        "model": "local",
        "max_tokens": 2000,
        "temperature": 0,
        "messages": [
            {"role": "system", "content": "You are a coding agent."},
            {"role": "system", "content": "<env>linux</env>"},
            {"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "text", "text": "here"}]},
            {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "I look."},
            {"role": "tool", "tool_call_id": "call_1", "content": "file.py"},
        ],
        "tools": [TOOL],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "open-webui": {
        "model": "local",
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}, *HI],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "continue": {
        "model": "local",
        "messages": [{"role": "system", "content": "edit"}, *HI],
        "max_tokens": 2048,
        "stream": True,
        "tools": [TOOL],
        "parallel_tool_calls": False,
        "stop": ["<|im_end|>"],
    },
    "langchain": {
        "model": "local",
        "messages": [
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_1", "content": "1"},
        ],
        "tools": [TOOL],
        "stream": False,
        "n": 1,
        "max_completion_tokens": 20,
    },
    "developer": {
        "model": "gpt-5",
        "messages": [{"role": "developer", "content": "be brief"}, *HI, *HI],
        "reasoning_effort": None,
        "store": False,
        "metadata": {"session": "1"},
        "user": "u",
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
    },
}


@pytest.mark.parametrize("name", RECORDED)
async def test_bodies_that_clients_send(name: str) -> None:
    """Shapes of agents and chat programs, after their documentation, are taken and reach the model."""
    body = RECORDED[name]
    async with run_server(model_info=HOST, script=make_script("ok")) as s:
        reply = await s.post(CHAT, body)
        assert reply.status == 200
        (request,) = s.engine.requests
        prompt = HOST.tokenizer.decode(request.prompt)
        for message in body["messages"]:
            content = message["content"] or ""
            texts = [content] if isinstance(content, str) else [part["text"] for part in content]
            assert all(text in prompt for text in texts)
        assert ("<tool_call>f(a=1;)</tool_call>" in prompt) == (
            CALL in body["messages"][-2].get("tool_calls", [])
        )
        if body.get("stream"):
            assert "".join(c["delta"].get("content", "") for c in deltas(reply)) == "ok"


CHAT_BODY = BODIES["chat"]
FIELDS = sorted(
    {*CHAT_BODY.honoured, *BODIES["completion"].honoured, *CHAT_BODY.harmless, *CHAT_BODY.refused, "tokens"}
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "developer"]) | VALUES},
        optional={"content": st.text(max_size=4) | VALUES, "tool_calls": VALUES, "name": VALUES},
    ),
    max_size=4,
)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "messages": st.just(HI) | MESSAGES | VALUES,
        "prompt": st.text(max_size=4) | st.lists(st.integers(0, 400), max_size=3) | VALUES,
        "stream": st.booleans(),
        **{name: VALUES for name in FIELDS if name not in ("messages", "prompt", "stream")},
    },
)
URLS = st.sampled_from([CHAT, COMPLETION, "/tokenize", "/v1/detokenize"])


@settings(max_examples=count_examples(60))
@given(st.lists(st.tuples(URLS, BODIES | VALUES, st.integers(0, 8)), min_size=1, max_size=6))
def test_no_body_is_a_5xx(received: list[tuple[str, Any, int]]) -> None:
    """Whatever is sent, the answer is right or a 4xx in OpenAI's shape, and nothing is left over."""

    async def one(s: Serving, url: str, body: Any, keep: int) -> int:
        if isinstance(body, dict):
            good = "prompt" if url != CHAT else "messages"
            body = dict(list(body.items())[:keep]) | ({good: body[good]} if good in body else {})
        reply = await s.post(url, json.dumps(body))
        assert reply.status == 200 or 400 <= reply.status < 500, (reply.status, body)
        if reply.status >= 400:
            error = reply.json["error"]
            assert isinstance(error["message"], str) and set(error) == {"message", "type", "param", "code"}
        return reply.status

    async def run() -> None:
        async with run_server(model_info=HOST, script=SAYS, formats=Brackets()) as s:
            await asyncio.gather(*(one(s, *row) for row in received))
            await s.settle()

    asyncio.run(run())


async def test_the_fuzzer_would_see_a_5xx() -> None:
    """Mutation: a handler that fails is a 500 in OpenAI's shape, and names no more than the class."""

    class Broken(FakeEngine):
        def generate(self, request: Any) -> Any:
            raise KeyError("a secret")

    async with run_server(engine=Broken()) as s:
        reply = await s.post(CHAT, {"messages": HI})
        assert reply.status == 500 and reply.json["error"]["code"] == "internal_error"
        assert b"secret" not in reply.body
