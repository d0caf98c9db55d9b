"""Ollama's API before a scripted engine: lines, whole answers, errors, names; and embeddings of a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from mlxrun import __version__
from mlxrun.api.ollama.fields import BODIES
from mlxrun.api.parsers.registry import choose_formats
from mlxrun.config.settings import ApiSettings, Config, ServerSettings
from mlxrun.core.errors import EngineDead, Overloaded
from mlxrun.core.request import FinishReason, HitKind, Request, TokenEvent
from mlxrun.server.endpoints.ollama import API_VERSION
from tests.helpers.server_fakes import Act, Reply, make_script, run_server, server_config
from tests.helpers.tokenizers import TOOLS, FakeModelInfo

HI = [{"role": "user", "content": "hi"}]
CHAT, GENERATE = "/api/chat", "/api/generate"
PROMPTS: dict[str, dict[str, Any]] = {CHAT: {"messages": HI}, GENERATE: {"prompt": "hi"}}
FORMATS = choose_formats(None, [], "hermes", "think")
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = ("<tool_call>", '{"name": "add", "arguments": ', '{"a": 1}}', "</tool_call>")


def ask(path: str = CHAT, **fields: Any) -> dict[str, Any]:
    return {"model": "fake", **PROMPTS[path], **fields}


def read_lines(reply: Reply) -> list[Any]:
    assert reply.headers["Content-Type"] == "application/x-ndjson"
    assert reply.body.endswith(b"\n")
    return [json.loads(line) for line in reply.body.splitlines()]


def get_text(line: Any) -> str:
    return str(line["response"] if "response" in line else line["message"]["content"])


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_a_line_is_one_for_clients_that_end_lines_at_unicode_separators(path: str) -> None:
    """As Ollama's client for Python does, by httpx."""
    text = "a\u2028b\u2029c\x85d"
    async with run_server(script=make_script(text)) as s:
        body = (await s.post(path, ask(path))).body.decode()
    assert "".join(get_text(json.loads(line)) for line in body.splitlines()) == text


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_a_stream_and_a_whole_answer(path: str) -> None:
    """A stream is what a client gets that does not say otherwise."""
    async with run_server(script=make_script("<think>", "hm", "</think>", "Hel", "lo"), formats=FORMATS) as s:
        lines = read_lines(await s.post(path, ask(path)))
        whole = (await s.post(path, ask(path, stream=False))).json
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "".join(map(get_text, lines)) == get_text(whole) == "Hello"
    assert whole["done"] and whole["done_reason"] == "stop" and whole["model"] == "fake"
    assert (whole["message"] if path == CHAT else whole)["thinking"] == "hm"
    for found in (lines[-1], whole):
        assert found["eval_count"] > 2 and found["prompt_eval_count"] > 2
        spent = found["prompt_eval_duration"] + found["eval_duration"]
        assert 0 < spent <= found["total_duration"] < 60e9


async def test_an_answer_of_one_token_took_time() -> None:
    """Clients divide `eval_count` by it. Of the time until the token came, it is one token's part."""
    seconds = [0.0]

    def take_a_second(request: Request) -> Iterator[Act]:
        seconds[0] += 1.0
        yield "a"

    async with run_server(script=take_a_second, clock=lambda: seconds[0]) as s:
        whole = (await s.post(GENERATE, ask(GENERATE, stream=False, options={"num_predict": 1}))).json
    assert whole["eval_count"] == 1
    assert whole["eval_duration"] == round(1e9 / (whole["prompt_eval_count"] + 1))
    assert whole["eval_duration"] + whole["prompt_eval_duration"] == whole["total_duration"] == 1_000_000_000


async def test_a_call_is_an_object_in_one_line() -> None:
    tools = [{"type": "function", "function": FUNCTION}]
    model_info = FakeModelInfo(chat_template=TOOLS)
    async with run_server(script=make_script(*CALL), model_info=model_info, formats=FORMATS) as s:
        lines = read_lines(await s.post(CHAT, ask(tools=tools)))
        whole = (await s.post(CHAT, ask(tools=tools, stream=False))).json
    (call,) = [call for line in lines for call in line["message"].get("tool_calls", [])]
    assert call["function"] == {"index": 0, "name": "add", "arguments": {"a": 1}}
    assert whole["message"]["tool_calls"][0]["function"] == call["function"]
    assert whole["done_reason"] == lines[-1]["done_reason"] == "stop"


async def test_logprobs() -> None:
    async with run_server(script=make_script("abc")) as s:
        for path in (CHAT, GENERATE):
            body = ask(path, logprobs=True, top_logprobs=2)
            lines = read_lines(await s.post(path, body))
            rows = [row for line in lines for row in line.get("logprobs", [])]
            assert "".join(row["token"] for row in rows) == "abc" and len(rows[0]["top_logprobs"]) == 2
            assert (await s.post(path, {**body, "stream": False})).json["logprobs"] == rows
        assert "logprobs" not in (await s.post(CHAT, ask(stream=False))).json


async def test_options_reach_the_engine() -> None:
    async with run_server(script=make_script("x" * 50)) as s:
        reply = await s.post(GENERATE, ask(GENERATE, stream=False, options={"num_predict": 3, "seed": 5}))
        assert (reply.json["done_reason"], reply.json["eval_count"]) == ("length", 3)
        assert s.engine.requests[-1].params.seed == 5


@pytest.mark.parametrize("path", [CHAT, GENERATE])
async def test_without_a_prompt_the_model_is_loaded(path: str) -> None:
    async with run_server() as s:
        reply = await s.post(path, {"model": "fake", "keep_alive": 0})
        assert reply.headers["Content-Type"].startswith("application/json")
        assert (reply.json["done"], reply.json["done_reason"]) == (True, "load")
        assert s.engine.requests == []


@pytest.mark.parametrize("stream", [True, False])
async def test_an_error_before_the_first_token_has_its_status(stream: bool) -> None:
    async with run_server(script=make_script(Overloaded("the queue is full"))) as s:
        reply = await s.post(CHAT, ask(stream=stream))
        assert (reply.status, reply.json) == (429, {"error": "the queue is full"})


async def test_an_error_in_a_stream_is_its_last_line() -> None:
    async with run_server(script=make_script("Hel", EngineDead("the engine has stopped"))) as s:
        reply = await s.post(CHAT, ask())
        *lines, last = read_lines(reply)
        assert reply.status == 200 and last == {"error": "the engine has stopped"}
        assert not any(line["done"] for line in lines)


async def test_a_client_that_leaves_cancels() -> None:
    hold = asyncio.Event()
    async with run_server(script=make_script("Hel", hold.wait, "lo")) as s:
        async with s.http.post(s.url + CHAT, json=ask()) as response:
            assert json.loads(await response.content.readline())["done"] is False
        await s.settle()
        assert s.engine.aborted == [s.engine.requests[0].id]
        hold.set()


async def test_a_long_prefill_has_lines_without_text() -> None:
    """Every line of the stream is an object that clients can read."""
    hold = asyncio.Event()
    started = TokenEvent("", num_computed_tokens=1, hit_kind=HitKind.MISS)
    async with (
        run_server(server_config(keepalive=0.1), script=make_script(started, hold.wait, "Hi")) as s,
        s.http.post(s.url + GENERATE, json=ask(GENERATE)) as response,
    ):
        ping = json.loads(await response.content.readline())
        hold.set()
        rest = [json.loads(line) async for line in response.content]
    assert (ping["response"], ping["done"]) == ("", False)
    assert "".join(map(get_text, rest)) == "Hi" and rest[-1]["done"]


async def test_errors_are_texts_that_name_the_field() -> None:
    async with run_server() as s:
        for path, body, status, word in (
            (CHAT, {}, 400, "model: is required"),
            (CHAT, ask(format="yaml"), 400, "format:"),
            (CHAT, ask(options={"temprature": 1}), 400, "options.temprature"),
            (CHAT, b"{", 400, "not JSON"),
            (GENERATE, ask(GENERATE, context=[1]), 400, "context:"),
            ("/api/embed", {"model": "m", "input": "x"}, 400, "gives no embeddings"),
            ("/api/show", {}, 400, "model: is required"),
        ):
            reply = await s.post(path, body)
            assert reply.status == status and reply.json.keys() == {"error"}, reply.json
            assert word in reply.json["error"], reply.json
        reply = await s.get(CHAT)
        assert reply.status == 405 and "POST" in reply.json["error"]


async def test_names() -> None:
    async with run_server(model_info=FakeModelInfo(name="qwen3", names=("qwen3",))) as s:
        for name in ("qwen3", "qwen3:latest"):
            reply = await s.post(CHAT, {**ask(stream=False), "model": name})
            assert (reply.status, reply.json["model"]) == (200, "qwen3")
            assert (await s.post("/api/show", {"model": name})).status == 200
            assert (await s.post("/api/show", {"name": name})).status == 200
        for path in (CHAT, GENERATE, "/api/show", "/api/embed"):
            reply = await s.post(path, {"model": "other"})
            assert reply.status == 404 and "'other' is not served here" in reply.json["error"]
        (model,) = (await s.get("/api/tags")).json["models"]
        (loaded,) = (await s.get("/api/ps")).json["models"]
        assert model["name"] == loaded["name"] == "qwen3:latest"


async def test_what_needs_no_model_is_answered_while_it_loads() -> None:
    async with run_server(loaded=False) as s:
        assert (await s.get("/")).body == b"Ollama is running"
        assert (await s.request("HEAD", "/")).status == 200
        assert (await s.get("/api/version")).json == {"version": API_VERSION, "mlxrun": __version__}
        assert (await s.get("/api/ps")).json == {"models": []}
        for method, path in (("GET", "/api/tags"), ("POST", CHAT)):
            reply = await s.request(method, path, None if method == "GET" else ask())
            assert reply.status == 503 and "being loaded" in reply.json["error"]


@pytest.mark.parametrize(
    ("method", "path", "hint"),
    [
        *(("POST", f"/api/{name}", "`mlxrun pull`") for name in ("pull", "create", "copy")),
        ("POST", "/api/push", "not uploaded"),
        ("DELETE", "/api/delete", "`mlxrun rm`"),
        ("POST", "/api/blobs/sha256:00", "not uploaded"),
        ("HEAD", "/api/blobs/sha256:00", ""),
    ],
)
async def test_what_changes_models_is_not_supported(method: str, path: str, hint: str) -> None:
    async with run_server() as s:
        reply = await s.request(method, path, None if method == "HEAD" else {"model": "m"})
        assert reply.status == 404
        if method != "HEAD":
            assert reply.json.keys() == {"error"} and f"{path} is not supported" in reply.json["error"]
            assert hint in reply.json["error"]


async def test_keys_are_needed_but_for_the_greeting() -> None:
    async with run_server(server_config(api_keys={"team": "a-long-key-of-the-team"})) as s:
        for path in BODIES:
            reply = await s.post(path, ask())
            assert reply.status == 401 and "API key" in reply.json["error"]
        assert (await s.get("/api/tags")).status == (await s.get("/api/version")).status == 401
        assert (await s.get("/")).status == 200
        assert (await s.post(CHAT, ask(), Authorization="Bearer a-long-key-of-the-team")).status == 200


async def test_it_can_be_switched_off() -> None:
    config = Config(server=ServerSettings(port=0), apis=ApiSettings(ollama=False))
    async with run_server(config) as s:
        for path in ("/", CHAT, "/api/pull"):
            reply = await s.get(path)
            assert reply.status == 404 and "apis.ollama: false" in reply.json["error"]["message"]


async def test_a_truncated_answer_counts_in_the_metrics() -> None:
    async with run_server(script=make_script("Hi", FinishReason.LENGTH)) as s:
        reply = await s.post(CHAT, ask(stream=False))
        assert reply.json["done_reason"] == "length"
        metrics = (await s.get("/metrics")).body.decode()
        assert 'mlxrun_requests_total{status="200",surface="ollama"} 1.0' in metrics
