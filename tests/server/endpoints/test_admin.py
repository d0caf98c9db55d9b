"""What an operator sees and does: health, metrics, the cache; and the server's life from start to end."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlxrun.api.context import ApiContext
from mlxrun.config.loading import load_config
from mlxrun.errors import ConfigError, EngineDead, ModelLoadError
from mlxrun.scheduler.request import HitKind, Request, TokenEvent
from mlxrun.server import lifecycle
from mlxrun.server.endpoints import admin
from mlxrun.server.engine_state import Server
from mlxrun.server.lifecycle import Address, Signals, drain, run
from mlxrun.text.images import MediaLoader
from tests.helpers.server_fakes import MINI, FakeEngine, Serving, hello, says, server_config, serving
from tests.server.test_live_requests import connect, cut, until

ONLY = [MINI, admin.SURFACE]


# -- what an operator asks ------------------------------------------------------------------------------


async def test_health() -> None:
    async with serving(surfaces=ONLY) as s:
        for path in ("/health", "/health/ready", "/health/live"):
            reply = await s.get(path)
            assert (reply.status, reply.json["status"]) == (200, "ok")
        s.server.draining = True
        reply = await s.get("/health")
        assert (reply.status, reply.json["status"]) == (503, "draining")
        assert (await s.get("/health/live")).status == 200


async def test_while_the_model_loads() -> None:
    """Requests get 503 and Retry-After in their surface's shape; health says why."""
    async with serving(surfaces=ONLY, loaded=False) as s:
        reply = await s.get("/health")
        assert (reply.status, reply.json["status"], reply.headers["Retry-After"]) == (503, "loading", "5")
        assert (await s.get("/health/live")).status == 200
        reply = await s.post("/mini", hello())
        assert (reply.status, reply.json["mini"], reply.headers["Retry-After"]) == (503, "loading", "5")
        for path in ("/v1/status", "/v1/cache", "/metrics", "/openapi.json"):
            assert (await s.get(path)).status == 200
        s.server.attach(
            s.engine, ApiContext(s.engine.model_info, s.server.config, MediaLoader(s.server.config.media, None))
        )
        assert (await s.post("/mini", hello())).status == 200


async def metric(s: Serving) -> dict[str, float]:
    """Every sample by name and labels."""
    reply = await s.get("/metrics")
    assert reply.headers["Content-Type"].startswith("text/plain")
    return {
        " ".join([sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()))]): sample.value
        for family in text_string_to_metric_families(reply.body.decode())
        for sample in family.samples
    }


async def test_metrics() -> None:
    hit = TokenEvent("", num_computed_tokens=16, num_cached_tokens=16, hit_kind=HitKind.LCP)
    gate = asyncio.Event()
    async with serving(surfaces=ONLY, script=says(hit, gate.wait, "abc")) as s:
        s.engine.counts = {"lcp": 1, "miss": 2, "memory_bytes": 77, "evicted": 3}
        s.engine.numbers = {
            "running": 1,
            "waiting": 2,
            "background": {"running": 0, "waiting": 1},
            "steps": 9,
            "errors": 1,
            "memory": {"active": 5, "limit": None},
        }
        asked = asyncio.create_task(s.post("/mini", hello()))
        await until(lambda: [live.phase for live in s.server.live] == ["prefill"])
        found = await metric(s)
        assert found["mlxrun_requests_live phase=prefill"] == 1
        assert found["mlxrun_ready"] == 1
        assert found["mlxrun_cache_lookups_total hit=lcp"] == 1
        assert found["mlxrun_cache_bytes tier=memory"] == 77
        assert found["mlxrun_engine_steps_total"] == 9
        assert found["mlxrun_engine_errors_total"] == 1
        assert found["mlxrun_engine_requests state=waiting"] == 2
        assert found["mlxrun_engine_background state=waiting"] == 1
        assert found["mlxrun_memory_bytes kind=active"] == 5
        assert "mlxrun_memory_bytes kind=limit" not in found
        gate.set()
        await asked
        assert (await s.post("/mini", {})).status == 400
        found = await metric(s)
        assert found["mlxrun_requests_total status=200 surface=mini"] == 1
        assert found["mlxrun_requests_total status=400 surface=mini"] == 1
        assert found["mlxrun_tokens_total kind=prompt"] == 20
        assert found["mlxrun_tokens_total kind=cached"] == 16
        assert found["mlxrun_tokens_total kind=output"] == 3
        assert found["mlxrun_time_to_first_token_seconds_count"] == 1
        assert found["mlxrun_requests_live phase=decode"] == 0
    async with serving(surfaces=ONLY) as other:  # a registry of its own
        assert (await metric(other))["mlxrun_tokens_total kind=output"] == 0


async def test_a_client_that_went_away_is_counted() -> None:
    forever = asyncio.Event()
    async with serving(surfaces=ONLY, script=says(forever.wait)) as s:
        _, writer = await connect(s, hello())
        await until(lambda: len(s.server.live) == 1)
        cut(writer)
        await s.settle()
        assert (await metric(s))["mlxrun_requests_total status=499 surface=mini"] == 1


async def test_the_cache_is_shown_and_cleared() -> None:
    async with serving(surfaces=ONLY) as s:
        s.engine.counts = {"records": 4, "memory_bytes": 400}
        assert (await s.get("/v1/cache")).json == {"backend": "memory", "records": 4, "memory_bytes": 400}
        for method, path in (("DELETE", "/v1/cache"), ("POST", "/v1/cache/clear")):
            before = s.engine.cleared
            reply = await s.request(method, path)
            assert (reply.status, reply.json["cleared"]) == (200, True)
            assert s.engine.cleared == before + 1


@pytest.mark.parametrize("path", ["/v1/cache/clear", "/v1/requests/x/cancel"])
async def test_what_takes_no_fields_refuses_them(path: str) -> None:
    """Nothing is ignored; an empty object is what some clients send."""
    async with serving(surfaces=ONLY) as s:
        for body, said in ((b'{"x": 1}', "x: unknown parameter"), (b"[1]", "body: expected"), (b"{", "JSON")):
            reply = await s.request("POST", path, body)
            assert reply.status == 400 and said in reply.json["error"]["message"], body
        assert s.engine.cleared == 0
        for body in (b"", b" {} "):
            assert (await s.request("POST", path, body)).status == (404 if "cancel" in path else 200)


async def test_the_status_has_what_the_engine_says() -> None:
    async with serving(surfaces=ONLY) as s:
        s.engine.numbers = {
            "running": 2,
            "waiting": 5,
            "background": {"running": 2, "waiting": 4},
            "memory": {"active": 1},
            "probe": {"decode": "ragged"},
        }
        s.server.facts = {"versions": {"mlx": "1"}}
        s.server.clock = lambda: 5.0
        status = (await s.get("/v1/status")).json
        assert (status["queue"]["running"], status["queue"]["waiting"]) == (0, 0)  # of clients
        assert status["queue"]["background"] == {"running": 2, "waiting": 4}
        assert (status["age"], status["steps"]) == (0.0, 0)
        assert status["memory"] == {"active": 1}
        assert status["probe"] == {"decode": "ragged"}
        assert status["versions"] == {"mlx": "1"}
        assert status["config_hash"] == s.server.digest
        assert s.server.fingerprint == f"fp_{s.server.digest[:10]}"


async def test_the_status_does_not_wait_for_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older numbers with their age, by a scripted clock; what comes late is what the next one is shown."""
    monkeypatch.setattr("mlxrun.server.engine_state.STATS_WAIT", 0.01)
    now, gate = [100.0], asyncio.Event()
    async with serving(surfaces=ONLY, clock=lambda: now[0]) as s:
        first = (await s.get("/v1/status")).json
        assert (first["steps"], first["age"]) == (7, 0.0)
        asked = []

        async def late() -> dict[str, Any]:
            asked.append(now[0])
            await gate.wait()
            return {"steps": 8}

        s.engine.stats = late  # type: ignore[method-assign]
        for age in (30.0, 60.0):
            now[0] = 100 + age
            shown = (await s.get("/v1/status")).json
            assert (shown["steps"], shown["age"]) == (7, age)
            assert (await metric(s))["mlxrun_engine_age_seconds"] == age
        assert asked == [130.0]  # one question for all who ask meanwhile
        gate.set()
        await until(lambda: s.server.stats["steps"] == 8)
        shown = (await s.get("/v1/status")).json
        assert (shown["steps"], shown["age"]) == (8, 0.0)


async def test_no_key_of_the_status_is_ever_absent() -> None:
    async with serving(surfaces=ONLY, loaded=False) as loading, serving(surfaces=ONLY) as loaded:
        before = (await loading.get("/v1/status")).json
        after = (await loaded.get("/v1/status")).json
        assert before.keys() == after.keys()
        for name in ("age", "batches", "steps", "errors", "memory", "probe", "versions", "device"):
            assert name in before
        assert (before["age"], before["steps"], after["steps"]) == (None, 0, 7)
        assert before["queue"].keys() == after["queue"].keys()
        assert after["batches"] == {"running": None, "waiting": 0}
        assert "mlxrun_engine_age_seconds" not in await metric(loading)


async def test_the_queue_agrees_with_the_requests() -> None:
    """A65: whatever the engine says of its rows, running and waiting are those of the table."""
    gates = {"computed": asyncio.Event(), "queued": asyncio.Event()}
    hit = TokenEvent("", num_computed_tokens=4, hit_kind=HitKind.MISS)

    def script(request: Request) -> list[Any]:
        return [hit, gates["computed"].wait] if len(s.engine.requests) == 1 else [gates["queued"].wait]

    async with serving(surfaces=ONLY, script=script) as s:
        s.engine.numbers = {"running": 9, "waiting": 9}
        asked = [asyncio.create_task(s.post("/mini", hello()))]
        await until(lambda: [live.phase for live in s.server.live] == ["prefill"])
        asked += [asyncio.create_task(s.post("/mini", hello())) for _ in range(2)]
        await until(lambda: len(s.server.live) == 3)
        queue = (await s.get("/v1/status")).json["queue"]
        queue.pop("background")
        assert queue == {"queued": 2, "prefill": 1, "decode": 0, "running": 1, "waiting": 2}
        for gate in gates.values():
            gate.set()
        await asyncio.gather(*asked)


async def test_one_connection_too_many() -> None:
    async with serving(server_config(max_connections=2), surfaces=ONLY) as s:
        opened = [await connect(s, hello()) for _ in range(2)]
        for reader, _ in opened:
            assert b" 200 " in await reader.readline()
        reader, writer = await connect(s, hello())
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"Retry-After: 1" in answer
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "overloaded"
        writer.close()
        cut(opened[0][1])
        await until(lambda: True)
        for _ in range(100):
            reader, writer = await connect(s, hello())
            line = await reader.readline()
            writer.close()
            if b" 200 " in line:
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError("a closed connection still counts")
        cut(opened[1][1])


# -- from start to exit code ----------------------------------------------------------------------------


class Life:
    """A server that runs as `mlxrun serve` does, with a fake engine and a stop that is no signal."""

    def __init__(self, engine: FakeEngine | None = None, **fields: Any) -> None:
        self.engine = engine or FakeEngine()
        self.config = server_config(**fields)
        self.server = Server(self.config)
        self.said: list[str] = []
        self.stop = asyncio.Event()
        self.load_gate = asyncio.Event()
        self.load_gate.set()
        self.load_error: Exception | None = None
        self.task = asyncio.create_task(self._run())

    async def _load(self) -> Any:
        await self.load_gate.wait()
        if self.load_error is not None:
            raise self.load_error
        side = ApiContext(self.engine.model_info, self.config, MediaLoader(self.config.media, None))
        return self.engine, side

    async def _run(self) -> int:
        return await run(self.server, self._load, self.said.append, stop=self.stop)

    async def url(self) -> str:
        await until(lambda: self.said or self.task.done())
        found = re.search(r"http://\S+?(?=;)", self.said[0])
        assert found
        return found[0]

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as http,
            http.post(await self.url() + path, json=body) as response,
        ):
            return response.status, await response.json()

    async def ready(self) -> None:
        await until(lambda: len(self.said) >= 2 or self.task.done())


async def test_it_says_where_it_listens_and_how_to_begin() -> None:
    life = Life()
    await life.ready()
    assert life.said[0] == f"listening on {await life.url()}; loading embedded"
    assert life.said[1].startswith("ready: fake, text, context of 4096 tokens; openai, responses, anthropic")
    assert f"curl {await life.url()}/v1/chat/completions -H 'Content-Type" in life.said[1]
    assert life.server.stats["steps"] == 7  # read once before anything runs
    status, reply = await life.post("/v1/chat/completions", hello())
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "Hello world!")
    life.stop.set()
    assert await life.task == 0
    assert life.engine.closed


async def test_threads_change_quickly_while_it_serves() -> None:
    """Python's own interval is there again afterwards, whatever it was."""
    before = sys.getswitchinterval()
    life = Life()
    await life.ready()
    assert sys.getswitchinterval() == pytest.approx(lifecycle.SWITCH) != pytest.approx(before)
    life.stop.set()
    assert await life.task == 0
    assert sys.getswitchinterval() == before
    failed = Life()
    failed.load_error = ModelLoadError("no such model")
    with pytest.raises(ModelLoadError):
        await failed.task
    assert sys.getswitchinterval() == before


async def test_the_curl_has_a_key_where_one_is_needed() -> None:
    life = Life(api_keys={"a": "sesame"})
    await life.ready()
    assert "-H 'Authorization: Bearer YOUR_KEY'" in life.said[1]
    assert "sesame" not in " ".join(life.said)
    life.stop.set()
    assert await life.task == 0


async def test_it_listens_before_the_model_is_loaded() -> None:
    life = Life()
    life.load_gate.clear()
    assert (await life.post("/v1/chat/completions", hello()))[0] == 503
    life.load_gate.set()
    await life.ready()
    assert (await life.post("/v1/chat/completions", hello()))[0] == 200
    life.stop.set()
    assert await life.task == 0


async def test_a_model_that_cannot_be_loaded_ends_it() -> None:
    life = Life()
    life.load_error = ModelLoadError("no such model")
    with pytest.raises(ModelLoadError, match="no such model") as caught:
        await life.task
    assert caught.value.exit_code == 3


async def test_an_engine_is_closed_where_what_comes_behind_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxrun.cli import serve
    from mlxrun.engine.client import EngineClient

    engine, loaded = FakeEngine(), load_config(None, (), {})

    async def start(*_: Any) -> FakeEngine:
        return engine

    async def fails(*_: Any) -> None:
        raise ConfigError("no batches")

    monkeypatch.setattr(EngineClient, "start", start)
    monkeypatch.setattr(serve, "_run_batches", fails)
    with pytest.raises(ConfigError, match="no batches"):
        await serve._load(loaded, Server(loaded.config))
    assert engine.closed


async def test_stopped_while_it_loads() -> None:
    life = Life()
    life.load_gate.clear()
    await life.url()
    life.stop.set()
    assert await life.task == 0


async def test_stopped_while_it_loads_and_cannot_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Exited(BaseException):
        pass

    def leave(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(lifecycle, "GRACE", 0.02)
    monkeypatch.setattr(os, "_exit", leave)
    gate = asyncio.Event()
    life = Life()

    async def stubborn() -> Any:
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue
        raise ModelLoadError("late")

    life._load = stubborn  # type: ignore[method-assign]
    await life.url()
    life.stop.set()
    with pytest.raises(Exited):
        await life.task
    gate.set()
    await asyncio.sleep(0)


async def test_a_drain_lets_running_requests_finish() -> None:
    """SIGTERM: new requests get 503 and Retry-After, running ones their answer; exit code 0."""
    gate = asyncio.Event()
    life = Life(FakeEngine(script=says("ab", gate.wait, "cd")), drain_timeout=20)
    await life.ready()
    asked = [asyncio.create_task(life.post("/v1/chat/completions", hello())) for _ in range(3)]
    await until(lambda: len(life.server.live) == 3)
    life.stop.set()
    await until(lambda: life.server.draining)
    async with aiohttp.ClientSession() as http:
        async with http.post(await life.url() + "/v1/chat/completions", json=hello()) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "5")
            assert (await response.json())["error"]["code"] == "shutting_down"
        async with http.get(await life.url() + "/health") as response:
            assert (response.status, (await response.json())["status"]) == (503, "draining")
    assert not life.task.done()
    assert not life.engine.closed
    gate.set()
    for task in asked:
        status, reply = await task
        assert (status, reply["choices"][0]["message"]["content"]) == (200, "abcd")
    assert await life.task == 0
    assert life.engine.closed
    assert life.engine.aborted == []


async def test_a_drain_has_a_deadline() -> None:
    forever = asyncio.Event()
    life = Life(FakeEngine(script=says("ab", forever.wait)), drain_timeout=0.05)
    await life.ready()
    asked = asyncio.create_task(life.post("/v1/chat/completions", hello()))
    await until(lambda: len(life.server.live) == 1)
    life.stop.set()
    status, reply = await asked
    assert (status, reply["error"]["code"]) == (503, "shutting_down")
    assert await life.task == 0
    assert len(life.engine.aborted) == 1


async def test_a_drain_waits_for_requests_that_are_being_read() -> None:
    """What was let in before is served, also if its body is still on the way."""
    life = Life(drain_timeout=20)
    await life.ready()
    host, port = (await life.url()).removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(hello()).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data[:5])
    await until(lambda: life.server.active)
    life.stop.set()
    await until(lambda: life.server.draining)
    await asyncio.sleep(0.02)
    writer.write(data[5:])
    assert b" 200 " in await reader.readline()
    assert await life.task == 0
    writer.close()


async def test_jobs_are_closed_first() -> None:
    class Jobs:
        closed = False

        async def close(self) -> None:
            self.closed = True

    async with serving(surfaces=ONLY) as s:
        s.server.jobs = jobs = Jobs()
        await drain(s.server, 1)
        assert jobs.closed


@pytest.mark.parametrize("policy", ["exit", "stay"])
async def test_when_the_engine_dies(policy: str) -> None:
    """B1: by policy the process ends with 3 once everybody has an answer, or stays and says so."""
    forever = asyncio.Event()
    life = Life(FakeEngine(script=says("ab", forever.wait)), on_engine_failure=policy)
    await life.ready()
    asked = asyncio.create_task(life.post("/v1/chat/completions", hello()))
    await until(lambda: len(life.server.live) == 1)
    life.engine.die(EngineDead("the device is gone"))
    status, reply = await asked
    assert (status, reply["error"]["message"]) == (503, "the device is gone")
    if policy == "stay":
        status, reply = await life.post("/v1/chat/completions", hello())
        assert (status, reply["error"]["code"]) == (503, "engine_unavailable")
        assert not life.task.done()
        life.stop.set()
    assert await life.task == 3
    if policy == "exit":
        assert "the engine has died: the device is gone" in life.said


async def test_an_address_that_cannot_be_had() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        config = server_config()
        for fields, said in (
            (
                {"port": port},
                f"server.port: cannot listen on 127.0.0.1:{port}: {os.strerror(errno.EADDRINUSE)}",
            ),
            ({"host": "192.0.2.1"}, "server.host: cannot listen on 192.0.2.1:0"),
            ({"host": "no.such.host.invalid"}, "server.host: 'no.such.host.invalid' is no address"),
        ):
            server = Server(replace(config, server=replace(config.server, **fields)))
            with pytest.raises(ConfigError) as caught:
                await run(server, None, print, stop=asyncio.Event())  # type: ignore[arg-type]
            assert said in str(caught.value)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("box", "http://box:80"),
    ],
)
def test_the_url_for_this_machine(host: str, url: str) -> None:
    assert Address(host, 80).url == url


async def test_a_second_signal_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    said: list[str] = []
    with Signals(said.append) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(signals.asked.wait(), 5)
        assert (codes, len(said)) == ([], 1)
        os.kill(os.getpid(), signal.SIGINT)
        await until(lambda: codes)
    assert codes == [128 + signal.SIGINT]


@pytest.mark.slow
def test_the_command_serves_and_stops(tmp_path: Path) -> None:
    """`mlxrun serve` on the embedded model: the printed URL answers, SIGTERM ends it with 0."""
    command = [sys.executable, "-m", "mlxrun.cli.main", "serve", "--port", "0"]
    command += ["--set", f"server.data_path={tmp_path / 'data'}"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+?(?=;)", process.stdout.readline())
        assert found
        assert process.stdout.readline().startswith("ready: embedded")
        body = json.dumps({"messages": [{"role": "user", "content": "What is 2 + 3?"}]}).encode()
        request = urllib.request.Request(
            f"{found[0]}/v1/chat/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            assert json.loads(response.read())["choices"][0]["message"]["content"] == "5"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_public_address_without_keys_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mlxrun.cli.main", "serve", "--host", "0.0.0.0", "--port", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2
    assert "--set server.host: 0.0.0.0 can be reached from other machines" in done.stderr
