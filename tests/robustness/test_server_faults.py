"""Faults put in on purpose: in a step of the engine, in loading, in a process. Who waits is told at once,
/health says what holds, and the others live. Other parts: test_server_faults_parts.py.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.config.settings import Config, ModelSettings, SchedulerSettings, ServerSettings
from mlxrun.core.errors import EngineDead, MlxrunError
from mlxrun.engine.client import EngineClient
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.run.runner import ModelRunner
from tests.helpers.engine_bench import engine_threads
from tests.helpers.engine_fakes import FakeRunner, make_engine
from tests.helpers.raw_clients import until
from tests.helpers.served_model import DUBLIN, HELLO, WEATHER, make_image_messages
from tests.helpers.server_fakes import FakeEngine, Reply, Serving, run_server
from tests.robustness.test_server_fuzz import nothing_left
from tests.robustness.test_server_fuzz_bodies import CHAT, HI, MESSAGES, RESPONSES

pytestmark = pytest.mark.usefixtures("probed_once")

CONFIG = Config(server=ServerSettings(port=0), scheduler=SchedulerSettings(chunk=32))
LONG = [{"role": "user", "content": "Repeat: " + " ".join(f"word{i}" for i in range(60))}]
NEVER = 60  # seconds within which a waiter must have heard, on whatever machine


class Panic(BaseException):
    """What libraries in Rust raise is no Exception."""


@pytest.fixture(scope="module")
def host() -> Any:
    return load_model_info(ModelSettings(), weights=True)


@asynccontextmanager
async def site(host: Any) -> AsyncIterator[Serving]:
    """The embedded model behind a server."""
    client = await EngineClient.start(CONFIG, host)
    try:
        async with run_server(CONFIG, engine=client) as s:
            yield s
    finally:
        await client.close()


async def ask(s: Serving, messages: Any = HELLO, **fields: Any) -> Reply:
    return await asyncio.wait_for(s.post(CHAT, {"messages": messages, "max_tokens": 12, **fields}), NEVER)


def text(reply: Reply) -> Any:
    assert reply.status == 200, reply.body
    message = reply.json["choices"][0]["message"]
    return message["content"], [call["function"] for call in message.get("tool_calls") or []]


async def everywhere(s: Serving) -> list[Reply]:
    """One request of each surface, whole and as a stream, at once."""
    bodies: dict[str, dict[str, Any]] = {
        CHAT: {"messages": HI, "max_tokens": 30},
        MESSAGES: {"messages": HI, "max_tokens": 30, "model": "claude-x"},
        RESPONSES: {"input": "hello", "max_output_tokens": 30},
    }
    received = [
        s.post(path, body | {"stream": stream}) for path, body in bodies.items() for stream in (False, True)
    ]
    return list(await asyncio.wait_for(asyncio.gather(*received), NEVER))


# -- a step ---------------------------------------------------------------------------------------------


async def test_a_step_that_fails_once_costs_nobody_anything(
    host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are lost, and computed again: the same answers as without."""
    execute, steps = ModelRunner.execute, []

    def failing(self: Any, plan: Any) -> Any:
        steps.append(plan)
        if len(steps) == 6:
            raise RuntimeError("a step fails")
        return execute(self, plan)

    async with site(host) as s:
        received = (
            {"messages": HELLO},
            {"messages": DUBLIN, "tools": [WEATHER]},
            {"messages": make_image_messages()},
        )
        alone = [text(await ask(s, **body)) for body in received]
        await s.engine.clear_cache()
        monkeypatch.setattr(ModelRunner, "execute", failing)
        together = await asyncio.gather(*(ask(s, **body) for body in received))
        assert [text(reply) for reply in together] == alone
        assert len(steps) > 6 and s.engine.read_stats().counts["errors"] == 1
        assert (await s.get("/health")).status == 200
        await nothing_left(s)


async def test_the_culprit_fails_alone(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose every step fails gets a 5xx; who ran beside it gets the answer."""
    execute = ModelRunner.execute
    culprits: set[str] = set()

    def failing(self: Any, plan: Any) -> Any:
        culprits.update(a.request.id for a in plan.admit if a.request.params.max_tokens == 9)
        if culprits & {*plan.decode, *(chunk.request_id for chunk in plan.prefill)}:
            raise RuntimeError("this request cannot be computed")
        return execute(self, plan)

    async with site(host) as s:
        right = text(await ask(s))
        monkeypatch.setattr(ModelRunner, "execute", failing)
        replies = await asyncio.gather(
            ask(s), ask(s, max_tokens=9), ask(s), ask(s, max_tokens=9, stream=True)
        )
        assert [text(replies[0]), text(replies[2])] == [right, right]
        for reply in (replies[1], replies[3]):
            assert reply.status == 500 and reply.json["error"]["code"] == "model_error", reply.body
        assert (await s.get("/health")).status == 200
        await nothing_left(s)


@pytest.mark.parametrize("error", [RuntimeError("the device is gone"), Panic("the device is gone")])
async def test_a_device_that_is_gone(
    host: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    """After K failed steps in a row all have an error, /health is 503, and nothing goes round."""
    steps = []

    def failing(self: Any, plan: Any) -> Any:
        steps.append(plan)
        raise error

    def fail(self: Any) -> None:
        raise error

    async with site(host) as s:
        monkeypatch.setattr(ModelRunner, "execute", failing)
        monkeypatch.setattr(ModelRunner, "compute_trial", fail)
        replies = await everywhere(s)
        most = CONFIG.engine.max_errors if isinstance(error, Exception) else 1
        assert len(steps) == most
        for reply in replies:
            assert reply.status >= 500 or b"error" in reply.body.splitlines()[-2], reply.body
        assert any(reply.status == 503 for reply in replies)
        for path in ("/health", "/health/ready", "/health/live"):
            reply = await s.get(path)
            assert reply.status == 503 and reply.json["status"] == "dead"
            assert "the device is gone" in reply.json["reason"]
        assert (await ask(s)).status == 503 and (await s.get("/v1/models")).status == 503
        assert len(steps) == most
        said = [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert len(said) <= most + 1, [record.getMessage() for record in said]
        await s.settle()
        assert s.engine._collectors == {}
        await until(lambda: engine_threads() == [])


# -- loading --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("odd weights"), Panic("odd weights")])
async def test_a_failed_load_is_reported(error: BaseException) -> None:
    """Also where what is raised is no Exception; nobody waits for a model that never comes."""

    def build() -> Any:
        raise error

    with pytest.raises(MlxrunError, match="odd weights"):
        await asyncio.wait_for(EngineClient.start_with(build), NEVER)
    assert engine_threads() == []


@pytest.mark.slow
def test_the_process_ends_with_its_engine(tmp_path: Path) -> None:
    """`mlxrun serve` says why and exits with 3, once who waited has a 503."""
    program = f"""
import sys, threading, json, re, urllib.request, urllib.error
from mlxrun.model.run.runner import ModelRunner
from mlxrun.cli import main
from mlxrun.cli.commands import serve

def failing(self, plan=None):
    raise RuntimeError("the device is gone")

def ask(url):
    ModelRunner.execute = ModelRunner.compute_trial = failing
    body = json.dumps({{"messages": [{{"role": "user", "content": "x"}}]}}).encode()
    kind = {{"Content-Type": "application/json"}}
    request = urllib.request.Request(url + "/v1/chat/completions", body, kind)
    try:
        urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError:
        pass

print_line = serve.print_line
def listening(said, **more):
    print_line(said, **more)
    if "curl " in str(said):
        url = re.search(r"http://[^/ ]+", said)[0]
        threading.Thread(target=ask, args=(url,)).start()
serve.print_line = listening
sys.argv = ["mlxrun", "serve", "--port", "0", "--set", "engine.max_errors=1",
            "--set", "server.data_path={tmp_path / "data"}"]
sys.exit(main.main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 3, done.stderr
    assert "POST /v1/chat/completions 503" in done.stderr
    assert "the engine has died: 1 steps failed in a row: the device is gone" in done.stdout


# -- the tests ----------------------------------------------------------------------------------------


async def test_the_tests_see_a_waiter_that_is_forgotten(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: an engine thread that ends and says nothing leaves a request behind."""
    monkeypatch.setattr("mlxrun.engine.client.EngineClient.on_dead", lambda self, error: None)
    runner = FakeRunner(dead=True)
    client = await EngineClient.start_with(lambda: make_engine(runner, max_errors=1))
    async with run_server(engine=FakeEngine()) as s:
        s.state._loaded = replace(s.state._loaded, client=client)
        received = asyncio.create_task(s.post(CHAT, {"messages": HI}))
        await until(lambda: engine_threads() == [])
        assert not received.done() and (await s.get("/health")).status == 200
        received.cancel()
        assert client._collectors
    with pytest.raises(EngineDead):
        monkeypatch.undo()
        client.on_dead(EngineDead("at last"))
        await client.clear_cache()
