"""/v1/responses before a scripted engine: events in order, what is stored, cancelling, errors.

`GOLDEN=write pytest tests/server/endpoints/test_responses.py` writes the files of tests/helpers/golden anew.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mlxrun.server.endpoints.responses as module
from mlxrun.api.parsers.answer_parser import ModelFormats
from mlxrun.api.parsers.delta import Delta, Parser
from mlxrun.api.parsers.registry import choose_formats
from mlxrun.config.settings import SamplingSettings
from mlxrun.core.errors import EngineDead, Overloaded
from mlxrun.core.request import FinishReason, Request, TokenEvent
from mlxrun.server.responses import response_runs
from mlxrun.server.responses.response_runs import RESPONSES
from tests.helpers.raw_clients import until
from tests.helpers.responses_api import ADD, BODIES, PNG, ScriptedDelta
from tests.helpers.server_fakes import (
    FakeEngine,
    Serving,
    make_script,
    run_server,
    server_config,
    tokens_of,
)
from tests.helpers.tokenizers import TOOLS, FakeModelInfo

GOLDEN = Path(__file__).parents[2] / "helpers" / "golden"
HOST = FakeModelInfo(chat_template=TOOLS)
URL = "/v1/responses"


class Marks(ModelFormats):
    """Formats of a model that writes `<think>a</think>` and `<tool_call>name(arguments)</tool_call>`."""

    def make_parser(self, tools: Any, prompt: str, name: str = "", held_calls: int = 0) -> Parser:
        return _MarksParser()


class _MarksParser:
    markers: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._kind, self._text, self._calls = "content", "", -1

    def feed(self, text: str) -> Sequence[Delta]:
        """Each marker is in a piece of its own, as the fake engine's tokens are."""
        found: list[Delta] = []
        self._text += text
        for mark, kind in (
            ("<think>", "reasoning"),
            ("</think>", "content"),
            ("<tool_call>", "call"),
            ("</tool_call>", "content"),
        ):
            if self._text == mark:
                self._kind, self._text = kind, ""
                self._calls += kind == "call"
                return []
        if self._kind == "call":
            if "(" in self._text:
                name, _, self._text = self._text.partition("(")
                found = [ScriptedDelta("call", "", self._calls, f"call_{self._calls}", name)]
                self._kind = "arguments"
            else:
                return []
        if self._kind == "arguments":
            found.append(ScriptedDelta("call", self._text.removesuffix(")"), self._calls, "", ""))
        elif self._text:
            found.append(ScriptedDelta(self._kind, self._text, 0, "", ""))
        self._text = ""
        return found

    def finish(self, stopped: bool = False) -> Sequence[Delta]:
        return []


@pytest.fixture(autouse=True)
def _same_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids count up, time stands still, and nobody waits for a first token."""
    numbers = iter(range(10**6))
    fixed = SimpleNamespace(token_hex=lambda size: f"{next(numbers):04x}")
    monkeypatch.setattr(response_runs, "secrets", fixed)
    monkeypatch.setattr(response_runs, "time", SimpleNamespace(time=lambda: 1_700_000_000.5))
    monkeypatch.setattr(module, "FIRST_EVENT_SECONDS", 0.0)


async def ask(s: Serving, body: Mapping[str, Any], **headers: str) -> dict[str, Any]:
    reply = await s.post(URL, body, **headers)
    assert reply.status == 200, reply.body
    found: dict[str, Any] = reply.json
    return found


async def stream(s: Serving, body: Mapping[str, Any]) -> list[tuple[str | None, Any]]:
    reply = await s.post(URL, {**body, "stream": True})
    assert reply.status == 200, reply.body
    return reply.events


def golden(name: str, found: Any) -> None:
    """`found` is what the file has."""
    path = GOLDEN / name
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(text)


REASONING_TEXT_CALLS = make_script(
    "<think>", "Let me ", "see.", "</think>", "I ", "add \u00e9\u4f60.",
    "<tool_call>", "add(", '{"a": 1', ', "b": 2})', "</tool_call>",
    "<tool_call>", "patch(", '{"input": "*** Begin"})', "</tool_call>",
)  # fmt: skip
EVERYTHING = {
    "input": "add 1 and 2",
    "instructions": "Be brief.",
    "tools": [ADD, {"type": "custom", "name": "patch", "description": "Edit files."}],
    "metadata": {"a": "b"},
    "temperature": 0.5,
    "seed": 3,
    "include": ["reasoning.encrypted_content"],
}


# Streams.


async def test_the_events_of_reasoning_content_and_calls() -> None:
    """As in the file, and [DONE] at the end."""
    async with run_server(script=REASONING_TEXT_CALLS, model_info=HOST, formats=Marks()) as s:
        events = await stream(s, EVERYTHING)
        assert events.pop() == (None, "[DONE]")
        assert all(name == data["type"] for name, data in events)
        golden("responses_events.json", [data for _, data in events])
        await s.settle()


async def test_a_response_equals_that_of_its_stream() -> None:
    async with run_server(script=REASONING_TEXT_CALLS, model_info=HOST, formats=Marks()) as s:
        whole = await ask(s, EVERYTHING)
        events = await stream(s, EVERYTHING)
        streamed = events[-2][1]["response"]
        token, other = whole["id"].removeprefix("resp_"), streamed["id"].removeprefix("resp_")
        assert token != other
        assert json.loads(json.dumps(streamed).replace(other, token)) == whole
        golden("responses_whole.json", whole)


async def test_deltas_join_to_the_text() -> None:
    """Whatever the tokens are."""
    async with run_server(script=make_script("He", "llo w\u00f6", "rld \U0001f642")) as s:
        events = [data for _, data in await stream(s, {"input": "hi"}) if isinstance(data, dict)]
    deltas = [data["delta"] for data in events if data["type"] == "response.output_text.delta"]
    assert len(deltas) > 1
    done = next(data for data in events if data["type"] == "response.output_text.done")
    assert "".join(deltas) == done["text"] == "Hello w\u00f6rld \U0001f642"
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == done["text"]


async def test_the_first_events_do_not_wait_for_the_first_token() -> None:
    """So that a client knows the id while its prompt is read."""
    go = asyncio.Event()
    async with run_server(script=make_script(go.wait, "a")) as s:
        async with s.http.post(s.url + URL, json={"input": "hi", "stream": True}) as response:
            first = await response.content.readuntil(b"\n\n")
            second = await response.content.readuntil(b"\n\n")
            assert b"response.created" in first and b"response.in_progress" in second
            go.set()
            assert b"response.completed" in await response.read()
        await s.settle()


async def test_an_answer_of_limited_length() -> None:
    async with run_server(script=make_script("abc")) as s:
        whole = await ask(s, {"input": "hi", "max_output_tokens": 2})
        events = await stream(s, {"input": "hi", "max_output_tokens": 2})
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["usage"]["output_tokens"] == 2
    assert events[-2][0] == "response.incomplete"


async def test_logprobs_are_those_of_the_text() -> None:
    script = make_script("<think>", "no", "</think>", "ab")
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    async with run_server(script=script, model_info=HOST, formats=Marks()) as s:
        whole = await ask(s, body)
        events = await stream(s, body)
        plain = await ask(s, {"input": "hi"})
    part = whole["output"][1]["content"][0]
    assert [token["token"] for token in part["logprobs"]] == ["a", "b"]
    assert all(len(token["top_logprobs"]) == 2 for token in part["logprobs"])
    done = next(data for name, data in events if name == "response.output_text.done")
    assert done["logprobs"] == part["logprobs"]
    deltas = [data["logprobs"] for name, data in events if name == "response.output_text.delta"]
    assert sum(deltas, []) == part["logprobs"] and len(deltas) == 2
    assert plain["output"][1]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(
    ("text", "logged"),
    [
        ('a<tool_call>{"name": "add", "arguments": {}}</tool_call>', "a"),
        ("a\n\n<tool_call>", "a\n\n<tool_call>"),
        ("a<<STOP", "a<<"),
    ],
)
async def test_logprobs_do_not_depend_on_how_events_were_merged(text: str, logged: str, merged: bool) -> None:
    """Nor on text that the parser still withholds."""

    def write(request: Request) -> list[TokenEvent]:
        events = tokens_of(text, request)
        tokens = tuple(token for event in events for token in event.tokens)
        whole = events[0]._replace(tokens=tokens, logprobs=sum((e.logprobs for e in events), ()))
        return [whole] if merged else events

    fields = {"include": ["message.output_text.logprobs"], "stop": ["STOP"], "tools": [ADD]}
    formats = choose_formats(None, [], "hermes", "think")
    async with run_server(script=write, model_info=HOST, formats=formats) as s:
        (message, *_) = (await ask(s, {"input": "hi", **fields}))["output"]
    assert "".join(token["token"] for token in message["content"][0]["logprobs"]) == logged


# Errors.


async def test_errors_before_the_stream_have_their_own_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that is full: not an event of a stream that began well."""
    monkeypatch.setattr(module, "FIRST_EVENT_SECONDS", 5.0)
    for error, status in ((Overloaded("full"), 429), (EngineDead("dead"), 503)):
        async with run_server(script=make_script(error)) as s:
            for streaming in (True, False):
                reply = await s.post(URL, {"input": "hi", "stream": streaming})
                assert reply.status == status
                assert reply.json["error"]["message"] == str(error)
            await s.settle()


async def test_an_error_in_a_stream_is_its_last_event() -> None:
    async with run_server(script=make_script("half", EngineDead("the engine has stopped"))) as s:
        events = await stream(s, {"input": "hi"})
        assert events.pop() == (None, "[DONE]")
        name, data = events[-1]
        assert name == "response.failed"
        assert data["response"]["error"] == {"code": "server_error", "message": "the engine has stopped"}
        assert data["response"]["output"][0]["content"][0]["text"] == "half"
        stored = await s.get(f"{URL}/{data['response']['id']}")
        assert stored.json == data["response"]
        await s.settle()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "poem"}]}]}, "input[0].content[0].type"),
        ({"input": "hi", "stop": 3}, "stop"),
        ({"input": "hi", "previous_response_id": "resp_no"}, "previous_response_id"),
        ({"input": "hi", "max_output_tokens": 10**7}, "max_output_tokens"),
        ({"inptu": "hi"}, "inptu"),
        ({"messages": []}, "messages"),
        ({"input": []}, "input"),
        ([], "body"),
    ],
)
async def test_bad_bodies(body: Any, param: str) -> None:
    """A 400 in OpenAI's shape that names the field."""
    async with run_server() as s:
        reply = await s.post(URL, body)
        assert (reply.status, reply.json["error"]["param"]) == (400, param)
        assert reply.json["error"]["type"] == "invalid_request_error"
        assert s.engine.requests == []
        await s.settle()


# What is stored.


async def test_a_retrieved_response_equals_the_sent_one() -> None:
    async with run_server(script=REASONING_TEXT_CALLS, model_info=HOST, formats=Marks()) as s:
        sent = await s.post(URL, EVERYTHING)
        got = await s.get(f"{URL}/{sent.json['id']}?include[]=reasoning.encrypted_content")
        assert got.body == sent.body
        streamed = (await stream(s, EVERYTHING))[-2][1]["response"]
        assert (await s.get(f"{URL}/{streamed['id']}")).json == streamed
        for query in ("?stream=true", "?starting_after=3", "?include=x", "?x=y"):
            assert (await s.get(f"{URL}/{streamed['id']}{query}")).status == 400


async def test_store_false_is_honoured() -> None:
    async with run_server() as s:
        sent = await ask(s, {"input": "hi", "store": False})
        assert sent["store"] is False
        assert (await s.get(f"{URL}/{sent['id']}")).status == 404
        reply = await s.post(URL, {"input": "hi", "previous_response_id": sent["id"]})
        assert reply.json["error"]["code"] == "previous_response_not_found"
        assert len(s.app[RESPONSES].store) == 0


async def test_a_conversation_continues() -> None:
    """The prompt is that of the whole conversation; instructions are not carried on."""
    async with run_server(script=make_script("Bob")) as s:
        first = await ask(s, {"input": "I am Bob.", "instructions": "Be kind."})
        second = await ask(s, {"input": "Who am I?", "previous_response_id": first["id"]})
        whole = [
            {"role": "user", "content": "I am Bob."},
            *first["output"],
            {"role": "user", "content": "Who am I?"},
        ]
        await ask(s, {"input": whole})
        assert s.engine.requests[1].prompt == s.engine.requests[2].prompt
        assert second["previous_response_id"] == first["id"]
        third = await ask(s, {"input": [{"type": "item_reference", "id": first["output"][0]["id"]}]})
        assert (await s.get(f"{URL}/{third['id']}/input_items")).json["data"] == first["output"]
        # Deleting the first leaves the second what it is.
        assert (await s.request("DELETE", f"{URL}/{first['id']}")).json["deleted"] is True
        assert (await s.get(f"{URL}/{first['id']}")).status == 404
        assert (await s.request("DELETE", f"{URL}/{first['id']}")).status == 404
        await ask(s, {"input": "And?", "previous_response_id": second["id"]})
        assert len(s.engine.requests[4].prompt) > len(s.engine.requests[1].prompt)


async def test_input_items_come_in_pages() -> None:
    async with run_server(script=make_script("Bob")) as s:
        first = await ask(s, {"input": [{"role": "user", "content": f"m{i}"} for i in range(3)]})
        second = await ask(s, {"input": "last", "previous_response_id": first["id"]})
        path = f"{URL}/{second['id']}/input_items"
        rows = (await s.get(f"{path}?order=asc")).json
        texts = [item["content"][0]["text"] for item in rows["data"]]
        assert texts == ["m0", "m1", "m2", "Bob", "last"]
        assert rows["has_more"] is False and rows["first_id"] == rows["data"][0]["id"]
        page = (await s.get(f"{path}?limit=2")).json
        assert (page["data"], page["has_more"]) == (rows["data"][:2:-1], True)
        rest = (await s.get(f"{path}?after={page['last_id']}")).json
        assert page["data"] + rest["data"] == rows["data"][::-1]
        for query in ("limit=0", "limit=101", "limit=x", "order=up", "after=no", "bogus=1"):
            assert (await s.get(f"{path}?{query}")).status == 400


async def test_pages_of_input_items_end_though_an_item_came_twice() -> None:
    async with run_server(script=make_script("Bob")) as s:
        first = await ask(s, {"input": "hi"})
        again = [{"type": "item_reference", "id": first["output"][0]["id"]}, {"role": "user", "content": "b"}]
        second = await ask(s, {"input": again, "previous_response_id": first["id"]})
        page = {"has_more": True, "last_id": ""}
        found: list[str] = []
        while page["has_more"] and len(found) < 9:
            after = f"&after={page['last_id']}" if found else ""
            page = (await s.get(f"{URL}/{second['id']}/input_items?limit=1{after}")).json
            found.append(page["last_id"])
        assert len(found) == len(set(found)) == 3


async def test_a_response_is_visible_to_its_owner_only() -> None:
    config = server_config(api_keys={"ann": "sk-ann", "ben": "sk-ben"})
    async with run_server(config) as s:
        sent = await ask(s, {"input": "hi"}, x_api_key="sk-ann")
        path = f"{URL}/{sent['id']}"
        assert (await s.get(path, x_api_key="sk-ann")).status == 200
        for method, where in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            assert (await s.request(method, path + where, x_api_key="sk-ben")).status == 404
        item = [{"type": "item_reference", "id": sent["output"][0]["id"]}]
        for body in ({"input": "x", "previous_response_id": sent["id"]}, {"input": item}):
            assert (await s.post(URL, body, x_api_key="sk-ben")).status == 400
            assert (await s.post(URL, body, x_api_key="sk-ann")).status == 200


async def test_tokens_are_counted_as_the_engine_reads_them() -> None:
    host = FakeModelInfo(vision=True)
    parts = [{"type": "input_image", "image_url": PNG}, {"type": "input_text", "text": "what?"}]
    body = {"input": [{"role": "user", "content": parts}], "instructions": "x"}
    async with run_server(model_info=host) as s:
        counted = (await s.post(f"{URL}/input_tokens", body)).json
        sent = await ask(s, body)
    assert counted == {"object": "response.input_tokens", "input_tokens": sent["usage"]["input_tokens"]}
    assert len(s.engine.requests) == 1


async def test_a_server_that_stores_nothing_says_so() -> None:
    async with run_server(server_config(store_responses=0)) as s:
        sent = await ask(s, {"input": "hi"})
        assert sent["store"] is False
        assert (await s.get(f"{URL}/{sent['id']}")).status == 404


# Ending early.


async def test_cancelling_a_stream() -> None:
    """It ends as cancelled with what it has, and can be retrieved so."""
    never = asyncio.Event()
    async with run_server(script=make_script("half", never.wait)) as s:
        async with s.http.post(s.url + URL, json={"input": "hi", "stream": True}) as response:
            first = json.loads((await response.content.readuntil(b"\n\n")).split(b"data: ")[1])
            path = f"{URL}/{first['response']['id']}"
            assert (await s.get(path)).json["status"] == "in_progress"
            assert (await s.request("DELETE", path)).status == 400
            while b"output_text.delta" not in await response.content.readuntil(b"\n\n"):
                pass
            cancelled = await s.post(f"{path}/cancel", {})
            rest = await response.read()
        assert cancelled.json["status"] == "cancelled"
        assert b"event: response.cancelled" in rest and rest.endswith(b"data: [DONE]\n\n")
        assert (await s.get(path)).json == cancelled.json
        assert cancelled.json["output"][0]["status"] == "incomplete"
        assert (await s.post(f"{path}/cancel", {})).json == cancelled.json, "twice is as good as once"
        await s.settle()
        assert len(s.engine.aborted) == 1


async def test_cancelling_a_response_that_is_not_streamed() -> None:
    never = asyncio.Event()
    async with run_server(script=make_script("half", never.wait)) as s:
        asking = asyncio.create_task(s.post(URL, {"input": "hi"}))
        running = s.app[RESPONSES].running
        await until(lambda: s.engine.requests)
        cancelled = await s.post(f"{URL}/{next(iter(running))}/cancel", {})
        assert cancelled.json == (await asking).json
        assert cancelled.json["status"] == "cancelled"
        await s.settle()


async def test_a_finished_response_cannot_be_cancelled() -> None:
    async with run_server() as s:
        sent = await ask(s, {"input": "hi"})
        reply = await s.post(f"{URL}/{sent['id']}/cancel", {})
        assert reply.status == 400 and "completed" in reply.json["error"]["message"]
        assert (await s.post(f"{URL}/resp_no/cancel", {})).status == 404


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("script", [(), ("half",)])
@pytest.mark.parametrize("grace", [0.0, 5.0])
async def test_a_disconnected_client_leaves_nothing(
    streaming: bool, script: tuple[str, ...], grace: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborted, not stored, no entry left."""
    monkeypatch.setattr(module, "FIRST_EVENT_SECONDS", grace)
    never = asyncio.Event()
    async with run_server(script=make_script(*script, never.wait)) as s:
        asking = asyncio.create_task(s.post(URL, {"input": "hi", "stream": streaming}))
        await until(lambda: s.engine.requests)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await s.settle()
        state = s.app[RESPONSES]
        assert len(s.engine.aborted) == 1 and not state.running and len(state.store) == 0


# Real clients' bodies.

# What the Codex command-line program sends, by its sources: twelve fields, hosted tools among the tools, MCP
# servers as namespaces, and its own thoughts back.
CODEX: dict[str, Any] = {
    "model": "fake",
    "instructions": "You are a coding agent running in a terminal.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "<permissions instructions>read-only"}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "# AGENTS.md"},
                {"type": "input_text", "text": "<environment_context><cwd>/src</cwd></environment_context>"},
            ],
        },
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list the files"}]},
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec_command",
            "description": "Runs a command in a PTY.",
            "strict": False,
            "parameters": {
                "type": "object",
                "properties": {"cmd": {"type": "string"}, "yield_time_ms": {"type": "number"}},
                "required": ["cmd"],
                "additionalProperties": False,
            },
        },
        {"type": "web_search", "external_web_access": False},
        {
            "type": "custom",
            "name": "apply_patch",
            "description": "Use the `apply_patch` tool to edit files. This is a FREEFORM tool.",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"},
        },
        {
            "type": "namespace",
            "name": "mcp__files",
            "description": "Tools in the mcp__files namespace.",
            "tools": [
                {
                    "type": "function",
                    "name": "read",
                    "description": "Read.",
                    "strict": False,
                    "parameters": {"type": "object", "properties": {}},
                }
            ],
        },
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "client_metadata": {"x-codex-installation-id": "550e8400-e29b-41d4-a716-446655440000"},
}


async def test_bodies_of_codex_are_answered() -> None:
    """Two turns, the second with what came back as Codex sends it: without ids, thoughts encoded."""
    script = make_script(
        "<think>", "ls then", "</think>", "<tool_call>", "exec_command(", '{"cmd": "ls"})', "</tool_call>"
    )
    config = replace(server_config(), sampling=SamplingSettings(seed=7))
    async with run_server(config, script=script, model_info=HOST, formats=Marks()) as s:
        events = await stream(s, CODEX)
        kinds = [name for name, _ in events]
        assert kinds[0] == "response.created" and kinds[-2] == "response.completed"
        golden("responses_codex.json", [data for _, data in events[:-1]])
        items = [data["item"] for name, data in events if name == "response.output_item.done"]
        reasoning, call = ({k: v for k, v in item.items() if k not in ("id", "status")} for item in items)
        del reasoning["content"]  # Codex does not send it back
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "README.md"}
        again = {**CODEX, "input": [*CODEX["input"], reasoning, call, output]}
        events = await stream(s, again)
        assert events[-2][0] == "response.completed"
        shown = HOST.tokenizer.decode(list(s.engine.requests[1].prompt))
        assert 'exec_command(cmd="ls";)' in shown and "README.md" in shown
        assert "web_search" not in shown
        await s.settle()


@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(bodies=st.lists(BODIES, min_size=10, max_size=20))
async def test_no_body_breaks_the_server(bodies: list[dict[str, Any]]) -> None:
    """Never a 5xx, never a request that stays. Single bodies: tests/api/responses/test_request.py."""
    async with run_server(model_info=FakeModelInfo(chat_template=TOOLS, vision=True), formats=Marks()) as s:
        for body in bodies:
            reply = await s.post(URL, json.dumps(body))
            assert reply.status in (200, 400, 404), (body, reply.body)
            if reply.status != 200:
                assert reply.json["error"]["message"]
        await s.settle()
        assert isinstance(s.engine, FakeEngine) and not s.engine.running


def test_finish_reasons_are_all_known() -> None:
    """The assembly tells these apart; a new one has to be thought about."""
    assert {reason.value for reason in FinishReason} == {"stop", "length", "abort", "error"}
