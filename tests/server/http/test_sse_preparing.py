"""Streams are kept alive while their requests are prepared: media are read, and prompts built."""

from __future__ import annotations

import asyncio
import json
import logging
from types import ModuleType
from typing import Any

import pytest

from mlxrun.core.errors import MediaError
from mlxrun.server.endpoints import anthropic, ollama, openai, responses
from tests.helpers.server_fakes import Serving, make_script, run_server, server_config

MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "model": "fake"}
# The path, its module, what prepares its requests, a body, and what its stream has meanwhile.
CASES: list[tuple[str, ModuleType, str, dict[str, Any], str]] = [
    ("/v1/chat/completions", openai, "prepare_request", MESSAGES, ": preparing"),
    ("/v1/messages", anthropic, "prepare_message", {**MESSAGES, "max_tokens": 9}, ": preparing"),
    ("/v1/responses", responses, "prepare_response", {"input": "hello"}, ": preparing"),
    ("/v1/responses", responses, "prepare_response", {"input": "hello", "background": True}, ": preparing"),
    ("/api/chat", ollama, "prepare_answer", MESSAGES, '"content":""'),
]
every_surface = pytest.mark.parametrize(("path", "module", "name", "body", "kept"), CASES)


class Gate:
    """Holds up what prepares a request. `error`: what it raises then."""

    def __init__(self, patch: pytest.MonkeyPatch, module: ModuleType, name: str) -> None:
        self.opened = asyncio.Event()
        self.error: Exception | None = None
        self._original = getattr(module, name)
        patch.setattr(module, name, self._prepare)

    async def _prepare(self, *args: Any, **given: Any) -> Any:
        await self.opened.wait()
        if self.error is not None:
            raise self.error
        return await self._original(*args, **given)


async def stream(s: Serving, path: str, body: dict[str, Any], gate: Gate, lines: int) -> tuple[int, str]:
    """The status and the text of a stream. The gate opens once `lines` lines have come."""
    async with s.http.post(s.url + path, json={**body, "stream": True}) as response:
        text = b"".join([await response.content.readline() for _ in range(lines)])
        gate.opened.set()
        return response.status, (text + await response.read()).decode()


@every_surface
async def test_a_stream_begins_before_its_request_is_prepared(
    path: str, module: ModuleType, name: str, body: dict[str, Any], kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, module, name)
    async with run_server(server_config(keepalive=0.1), script=make_script("Q")) as s:
        status, text = await stream(s, path, body, gate, 3)
        await s.settle()
    assert status == 200 and text.index(kept) < text.index("Q")


@every_surface
async def test_an_error_behind_the_first_comment_is_an_event(
    path: str,
    module: ModuleType,
    name: str,
    body: dict[str, Any],
    kept: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log has its code. Without a comment before it, it has its own status."""
    caplog.set_level(logging.INFO)
    gate = Gate(monkeypatch, module, name)
    gate.error = MediaError("a: torn", param="a")
    async with run_server(server_config(keepalive=0.1)) as s:
        status, text = await stream(s, path, body, gate, 3)
        assert status == 200 and kept in text and "a: torn" in text.splitlines()[-1 if kept[0] == '"' else -2]
        assert f"{path} 200" in caplog.messages[-1]
        assert caplog.messages[-1].endswith(f"stream ended: {MediaError.code}")
        reply = await s.post(path, {**body, "stream": True})
        assert reply.status == 400 and "a: torn" in json.dumps(reply.json)


async def test_a_client_that_leaves_ends_the_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    Gate(monkeypatch, openai, "prepare_request")  # which stays closed
    async with run_server(server_config(keepalive=0.1)) as s:
        async with s.http.post(f"{s.url}/v1/chat/completions", json={**MESSAGES, "stream": True}) as response:
            assert (await response.content.readline()).startswith(b": preparing")
        await s.settle()
        assert not s.engine.requests


@pytest.mark.parametrize("value", ["true", 1, None])
async def test_only_true_is_a_stream(value: Any) -> None:
    """Other values are refused with a status, or are no stream."""
    async with run_server() as s:
        reply = await s.post("/v1/chat/completions", {**MESSAGES, "stream": value})
        assert reply.status == (200 if value is None else 400) and reply.json
