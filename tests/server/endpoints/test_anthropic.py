"""/v1/messages before a scripted engine: events in their exact order, errors, pings.

`MLXRUN_GOLDEN=write pytest tests/server/endpoints/test_anthropic.py` rewrites
tests/helpers/golden.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from anthropic import APIStatusError, AsyncAnthropic, AuthenticationError, BadRequestError, NotFoundError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxrun.api.parsers.registry import choose_formats
from mlxrun.config.settings import ApiSettings, Config, ServerSettings
from mlxrun.core.errors import EngineDead, Overloaded
from mlxrun.core.request import FinishReason, HitKind, TokenEvent
from mlxrun.server.endpoints.anthropic import SURFACE
from mlxrun.server.http.json_bodies import encode_json
from tests.helpers.anthropic_api import ADD, TOOL_MODEL_INFO, USER, body, user
from tests.helpers.anthropic_bodies import BILLING, FIELDS, SEEDS, VALUE, claude_code, nodes
from tests.helpers.raw_clients import until
from tests.helpers.server_fakes import Reply, Script, Serving, make_script, run_server, server_config

Json = dict[str, Any]

URL, COUNT = "/v1/messages", "/v1/messages/count_tokens"
GOLDEN = Path(__file__).parents[2] / "helpers" / "golden"
WRITE = os.environ.get("MLXRUN_GOLDEN") == "write"
FORMATS = choose_formats(None, [], "hermes", "think")
REASONING = ("<think>", "hm", ", 1", "</think>")
CALL = ("<tool_call>", '{"name": "add", "arguments": {"a": 1, ', '"b": "x"}}', "</tool_call>")
MULTIPLY = {"name": "multiply", "input_schema": {"type": "object"}}
TOOLS = {"tools": [ADD, MULTIPLY]}
OTHER = '<tool_call>{"name": "multiply", "arguments": {}}</tool_call>'
ONE = {"type": "auto", "disable_parallel_tool_use": True}

# Each with what the engine does and what is asked for.
CASES: dict[str, tuple[Script, Json]] = {
    "text": (make_script("Hello", " wörld", "!"), {}),
    "empty": (make_script(), {}),
    "thought": (make_script(*REASONING, "\n\n", "Three", "."), {}),
    "hidden": (make_script(*REASONING, "Three"), {"thinking": {"type": "adaptive", "display": "omitted"}}),
    "calls": (make_script(*REASONING, "Let me ", "see.\n", *CALL, "\n", OTHER), TOOLS),
    "one_call": (make_script(*CALL, OTHER), TOOLS | {"tool_choice": ONE}),
    "stop": (make_script("one two", " three", " four"), {"stop_sequences": ["zzz", " thr"]}),
    "length": (make_script("one two three"), {"max_tokens": 4}),
    "window": (make_script("x" * 99), {"max_tokens": 32_000}),
    "cut_thought": (make_script("<think>", "so long a thought"), {"max_tokens": 9}),
    "cut_call": (make_script(*CALL), TOOLS | {"max_tokens": 48}),
    "cached": (make_script(TokenEvent("", num_cached_tokens=7, hit_kind=HitKind.PREFIX), "Hi"), {}),
    "edits": (make_script("Hi"), {"context_management": {"edits": []}}),
}


def plain(text: str) -> str:
    """Without what differs in each run."""
    text = re.sub(r"msg_[0-9a-f]+", "msg_1", text)
    ids: dict[str, str] = {}
    for found in re.findall(r"toolu_[0-9a-f]{8,}", text):
        ids.setdefault(found, f"toolu_{len(ids) + 1}")
        text = text.replace(found, ids[found])
    return text


def golden(name: str, text: str) -> None:
    path = GOLDEN / f"anthropic_{name}"
    if WRITE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


async def ask(s: Serving, given: Json, **headers: str) -> Reply:
    return await s.post(URL, given, **({"x_request_id": "req_1"} | headers))


def rebuilt(events: list[tuple[str | None, Any]]) -> Json:
    """The message that the events of a stream make: what a client does, and what it relies on."""
    names = [name for name, _ in events if name != "ping"]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    message: Json = copy.deepcopy(events[0][1]["message"])
    open_at = None
    for name, data in events:
        assert data["type"] == name
        if name == "content_block_start":
            assert open_at is None and data["index"] == len(message["content"])
            open_at = data["index"]
            message["content"].append(data["content_block"])
            text = ""
        elif name == "content_block_delta":
            assert data["index"] == open_at
            block, delta = message["content"][open_at], data["delta"]
            key = {"thinking_delta": "thinking", "signature_delta": "signature", "text_delta": "text"}
            if delta["type"] == "input_json_delta":
                text += delta["partial_json"]
            else:
                assert delta[key[delta["type"]]], "no delta is empty"
                block[key[delta["type"]]] += delta[key[delta["type"]]]
        elif name == "content_block_stop":
            assert data["index"] == open_at
            if message["content"][open_at]["type"] == "tool_use":
                message["content"][open_at]["input"] = json.loads(text or "{}")
            open_at = None
        elif name == "message_delta":
            message |= data["delta"]
            message["usage"] |= data["usage"]
    return message


def joined(raw: bytes) -> str:
    """A stream as it came, but with neighbouring deltas of one block as one: how many there are is chance."""
    merged: list[Json] = []
    for event in raw.decode().removesuffix("\n\n").split("\n\n"):
        found = re.fullmatch(r"event: (\w+)\ndata: (.*)", event)
        assert found is not None, event
        data = json.loads(found[2])
        assert found[1] == data["type"] and found[2] == encode_json(data), "compact JSON, and its own name"
        delta, last = data.get("delta", {}), merged[-1].get("delta", {}) if merged else {}
        if "index" in data and "type" in delta and delta["type"] == last.get("type"):
            key = next(key for key in delta if key != "type")
            last[key] += delta[key]
        else:
            merged.append(data)
    return "".join(f"event: {data['type']}\ndata: {encode_json(data)}\n\n" for data in merged)


@pytest.mark.parametrize("name", CASES)
async def test_golden(name: str) -> None:
    """The events of a stream, and a message with the same blocks."""
    script, more = CASES[name]
    host = replace(TOOL_MODEL_INFO, context_length=64) if name == "window" else TOOL_MODEL_INFO
    async with run_server(script=script, model_info=host, formats=FORMATS) as s:
        stream = await ask(s, body(**{"max_tokens": 500, **more, "stream": True}))
        whole = await ask(s, body(**{"max_tokens": 500, **more}))
        await s.settle()
    assert stream.headers["Content-Type"].startswith("text/event-stream")
    assert stream.headers["request-id"] == whole.headers["request-id"] == "req_1"
    golden(f"{name}.sse", plain(joined(stream.body)))
    shown = json.loads(plain(whole.body.decode()))
    golden(f"{name}.json", json.dumps(shown, indent=1, ensure_ascii=False) + "\n")
    assert json.loads(plain(json.dumps(rebuilt(stream.events)))) == shown


async def test_the_twin_of_the_golden_files() -> None:
    """An event that is out of order does not pass."""
    async with run_server(script=CASES["calls"][0], model_info=TOOL_MODEL_INFO, formats=FORMATS) as s:
        events = (await ask(s, body(max_tokens=500, stream=True, **TOOLS))).events
    assert rebuilt(events)["stop_reason"] == "tool_use"
    for at in range(1, len(events)):
        if "ping" not in (events[at][0], events[at - 1][0]) and events[at][0] != events[at - 1][0]:
            mixed = [*events[: at - 1], events[at], events[at - 1], *events[at + 1 :]]
            with pytest.raises((AssertionError, KeyError, TypeError, IndexError, ValueError)):
                rebuilt(mixed)


@pytest.mark.parametrize("stream", [False, True])
async def test_control_tokens_are_no_text(stream: bool) -> None:
    """The model's end token ends the answer where it spells it in pieces; another one is left out."""
    for parts in (("Hi<|im", "_end|>", "x"), ("H<|im_start|>", "i")):
        async with run_server(script=make_script(*parts)) as s:
            reply = await ask(s, body(stream=stream, max_tokens=99))
        message = rebuilt(reply.events) if stream else reply.json
        assert message["content"] == [{"type": "text", "text": "Hi"}]
        assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)


async def test_the_count_is_what_the_engine_gets() -> None:
    """Whatever else the body holds."""
    async with run_server(model_info=TOOL_MODEL_INFO) as s:
        for given in (body(), body(system="be brief"), claude_code("fa690")):
            await ask(s, given)
            counted = {k: given[k] for k in given if k in ("model", "messages", "system", "tools")}
            reply = await s.post(COUNT, counted)
            assert reply.json == {"input_tokens": len(s.engine.requests[-1].prompt)}
        assert (await s.post(COUNT, body())).json["error"]["message"].startswith("max_tokens: Extra inputs")


async def test_two_requests_that_differ_in_their_billing_line_are_one_prompt() -> None:
    """The same text from a user stays."""
    async with run_server(model_info=TOOL_MODEL_INFO) as s:
        for cch in ("fa690", "00bb1"):
            assert (await ask(s, claude_code(cch))).status == 200
        assert s.engine.requests[0].prompt == s.engine.requests[1].prompt
        for cch in ("fa690", "00bb1"):
            await ask(s, body(user({"type": "text", "text": BILLING.format(cch)})))
        assert s.engine.requests[2].prompt != s.engine.requests[3].prompt


async def test_headers_of_agents() -> None:
    headers = {"anthropic_version": "2023-06-01", "anthropic_beta": "claude-code-20250219,effort-2025-11-24"}
    async with run_server() as s:
        reply = await s.post(f"{URL}?beta=true", body(), **headers, x_api_key="anything")
        assert reply.status == 200 and reply.json["id"].startswith("msg_")


# -- errors ---------------------------------------------------------------------------------------------


def wrong(reply: Reply, status: int, kind: str) -> str:
    """The message of an error object, which has nothing else but what the SDK reads about a thread."""
    assert reply.status == status
    assert reply.headers["Content-Type"].startswith("application/json")
    error = reply.json
    text = error["error"]["message"]
    about_thread = {"details": {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}}
    assert error == {
        "type": "error",
        "error": {"type": kind, "message": text, **(about_thread if text.startswith("thread:") else {})},
        "request_id": reply.headers["x-request-id"],
    }
    return str(text)


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_answer(stream: bool) -> None:
    """Their own status, streaming or not, in Anthropic's shape."""
    config = Config(server=ServerSettings(port=0, max_body_bytes=2000))
    async with run_server(config, script=make_script(Overloaded("the queue is full"))) as s:
        assert "queue" in wrong(await ask(s, body(stream=stream)), 429, "rate_limit_error")
        text = wrong(await ask(s, body(stream=stream, foo=1)), 400, "invalid_request_error")
        assert text == "foo: Extra inputs are not permitted"
        long = body(user({"type": "text", "text": "x" * 3000}), stream=stream)
        assert "2000" in wrong(await ask(s, long), 413, "request_too_large")
        assert "not JSON" in wrong(await s.post(URL, b'{"a"'), 400, "invalid_request_error")
        assert "UTF-8" in wrong(await s.post(URL, b'{"a": "\xff"}'), 400, "invalid_request_error")
        assert "POST" in wrong(await s.get(URL), 405, "invalid_request_error")
        await s.settle()
        s.state.draining = True
        reply = await ask(s, body(stream=stream))
        assert "shutting down" in wrong(reply, 529, "overloaded_error")
        s.state.draining = False
        s.engine.die()
        assert "stopped" in wrong(await ask(s, body(stream=stream)), 503, "api_error")


async def test_keys() -> None:
    """x-api-key and Bearer."""
    async with run_server(Config(server=ServerSettings(port=0, api_keys={"alice": "k1"}))) as s:
        for headers in ({"x_api_key": "k1"}, {"Authorization": "Bearer k1"}):
            assert (await ask(s, body(), **headers)).status == 200
        for headers in ({}, {"x_api_key": "k2"}, {"Authorization": "Bearer k2"}):
            wrong(await ask(s, body(), **headers), 401, "authentication_error")


async def test_switched_off() -> None:
    async with run_server(Config(server=ServerSettings(port=0), apis=ApiSettings(anthropic=False))) as s:
        assert (await ask(s, body())).status == 404
        assert "apis.anthropic" in (await s.post(COUNT, {})).json["error"]["message"]


async def test_an_error_in_the_middle_is_an_event() -> None:
    """The stream ends with it; what has come stays."""
    async with run_server(script=make_script("Hello", EngineDead("the engine has stopped"))) as s:
        reply = await ask(s, body(stream=True))
        await s.settle()
    names = [name for name, _ in reply.events]
    assert names[0] == "message_start" and names[-1] == "error" and "message_stop" not in names
    assert reply.events[-1][1] == {
        "type": "error",
        "error": {"type": "api_error", "message": "the engine has stopped"},
        "request_id": "req_1",
    }


# -- the life of a stream -------------------------------------------------------------------------------


async def test_pings_while_the_prompt_is_computed() -> None:
    """The first event goes out first whatever is late, then pings; the answer follows as always."""
    gate = asyncio.Event()
    async with run_server(server_config(keepalive=0.1), script=make_script(gate.wait, "Hi")) as s:
        text = ""
        async with s.http.post(s.url + URL, json=body(stream=True)) as response:
            async for line in response.content:
                text += line.decode()
                if text.count("event: ping\n") == 2:
                    gate.set()
        await s.settle()
    assert text.startswith("event: message_start\n")
    names = re.findall(r"event: (\w+)", text)
    assert names.count("message_start") == 1 and names[1:3] == ["ping", "ping"]
    assert names[-2:] == ["message_delta", "message_stop"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away(stream: bool) -> None:
    """The engine is told, and nothing stays."""
    gate = asyncio.Event()
    async with run_server(script=make_script("Hello", gate.wait, " again")) as s:
        task = asyncio.create_task(ask(s, body(stream=stream)))
        await until(lambda: s.engine.requests)
        task.cancel()
        await asyncio.wait([task])
        await s.settle()
        assert s.engine.aborted == [s.engine.requests[0].id]


async def test_the_clients_errors() -> None:
    """The package's own classes, with our ids in them; an error in a stream too."""
    host = TOOL_MODEL_INFO
    config = Config(server=ServerSettings(port=0, api_keys={"alice": "k1"}))
    async with run_server(config, script=make_script("Hello", EngineDead("gone")), model_info=host) as s:
        client = AsyncAnthropic(base_url=s.url, api_key="k1", max_retries=0)
        with pytest.raises(BadRequestError) as caught:
            await client.messages.create(**body(thinking={"type": "enabled", "budget_tokens": 5}))
        assert caught.value.body["error"]["message"].startswith("thinking.budget_tokens: ")  # type: ignore[index]
        with pytest.raises(AuthenticationError):
            await client.with_options(api_key="k2").messages.create(**body())
        with pytest.raises(NotFoundError):
            await client.post("/v1/nothing", cast_to=object, body={})
        with pytest.raises(APIStatusError, match="gone"):
            async with client.messages.stream(**body()) as stream:
                async for _ in stream:
                    pass
        await client.close()


def test_the_surface_says_what_it_takes() -> None:
    """For /openapi.json: shapes, required fields and nothing else."""
    assert [(e.method, e.path) for e in SURFACE.endpoints] == [("POST", URL), ("POST", COUNT)]
    schemas = [endpoint.body for endpoint in SURFACE.endpoints]
    assert [schema["required"] for schema in schemas if schema] == [
        ["model", "max_tokens", "messages"],
        ["model", "messages"],
    ]


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_no_body_is_a_server_error(data: st.DataObject) -> None:
    """200 or 4xx in our shape, and nothing stays; each example sends ten bodies to one server."""

    async def run() -> None:
        async with run_server(model_info=TOOL_MODEL_INFO, script=make_script("ok", FinishReason.STOP)) as s:
            for _ in range(10):
                made = copy.deepcopy(data.draw(st.sampled_from(SEEDS + [{"messages": [USER]}])))
                holder, key = data.draw(st.sampled_from(nodes(made)))
                holder[key] = data.draw(VALUE)
                made |= data.draw(st.dictionaries(FIELDS, VALUE, max_size=1))
                reply = await ask(s, made) if data.draw(st.booleans()) else await s.post(COUNT, made)
                assert reply.status in (200, 400), (reply.status, made)
                if reply.status == 400:
                    wrong(reply, 400, "invalid_request_error")
            await s.settle()

    asyncio.run(run())
