"""What operators ask the server: health, status, metrics and the cache."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mlxrun.api.context import ApiContext
from mlxrun.engine.client import EngineClient
from mlxrun.scheduler.request import HitKind, Request, TokenEvent
from mlxrun.server.endpoints import admin
from mlxrun.server.engine_state import LoadedEngine
from mlxrun.server.request_context import CONFIG, CONFIG_HASH
from mlxrun.text.images import MediaLoader
from tests.helpers.server_fakes import MINI, Serving, make_chat_body, make_script, run_server
from tests.server.test_live_requests import connect, cut, until

ONLY = [MINI, admin.SURFACE]


# -- what an operator asks ------------------------------------------------------------------------------


async def test_health() -> None:
    async with run_server(surfaces=ONLY) as s:
        for path in ("/health", "/health/ready", "/health/live"):
            reply = await s.get(path)
            assert (reply.status, reply.json["status"]) == (200, "ok")
        s.state.draining = True
        reply = await s.get("/health")
        assert (reply.status, reply.json["status"]) == (503, "draining")
        assert (await s.get("/health/live")).status == 200


async def test_while_the_model_loads() -> None:
    """Requests get 503 and Retry-After in their surface's shape; health says why."""
    async with run_server(surfaces=ONLY, loaded=False) as s:
        reply = await s.get("/health")
        assert (reply.status, reply.json["status"], reply.headers["Retry-After"]) == (503, "loading", "5")
        assert (await s.get("/health/live")).status == 200
        reply = await s.post("/mini", make_chat_body())
        assert (reply.status, reply.json["mini"], reply.headers["Retry-After"]) == (503, "loading", "5")
        for path in ("/v1/status", "/v1/cache", "/metrics", "/openapi.json"):
            assert (await s.get(path)).status == 200
        config = s.app[CONFIG]
        context = ApiContext(s.engine.model_info, config, MediaLoader(config.media, None))
        s.state.attach(LoadedEngine(cast(EngineClient, s.engine), context, {}))
        assert (await s.post("/mini", make_chat_body())).status == 200


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
    async with run_server(surfaces=ONLY, script=make_script(hit, gate.wait, "abc")) as s:
        s.engine.counts = {"lcp": 1, "miss": 2, "memory_bytes": 77, "evicted": 3}
        s.engine.numbers = {
            "running": 1,
            "waiting": 2,
            "background": {"running": 0, "waiting": 1},
            "steps": 9,
            "errors": 1,
            "memory": {"active": 5, "limit": None},
        }
        asked = asyncio.create_task(s.post("/mini", make_chat_body()))
        await until(lambda: [live.phase for live in s.live] == ["prefill"])
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
    async with run_server(surfaces=ONLY) as other:  # a registry of its own
        assert (await metric(other))["mlxrun_tokens_total kind=output"] == 0


async def test_a_disconnected_client_is_counted() -> None:
    forever = asyncio.Event()
    async with run_server(surfaces=ONLY, script=make_script(forever.wait)) as s:
        _, writer = await connect(s, make_chat_body())
        await until(lambda: len(s.live) == 1)
        cut(writer)
        await s.settle()
        assert (await metric(s))["mlxrun_requests_total status=499 surface=mini"] == 1


async def test_the_cache_is_shown_and_cleared() -> None:
    async with run_server(surfaces=ONLY) as s:
        s.engine.counts = {"records": 4, "memory_bytes": 400}
        assert (await s.get("/v1/cache")).json == {"backend": "memory", "records": 4, "memory_bytes": 400}
        for method, path in (("DELETE", "/v1/cache"), ("POST", "/v1/cache/clear")):
            before = s.engine.cleared
            reply = await s.request(method, path)
            assert (reply.status, reply.json["cleared"]) == (200, True)
            assert s.engine.cleared == before + 1


@pytest.mark.parametrize("path", ["/v1/cache/clear", "/v1/requests/x/cancel"])
async def test_endpoints_without_fields_refuse_fields(path: str) -> None:
    """Nothing is ignored; an empty object is what some clients send."""
    async with run_server(surfaces=ONLY) as s:
        for body, said in ((b'{"x": 1}', "x: unknown parameter"), (b"[1]", "body: expected"), (b"{", "JSON")):
            reply = await s.request("POST", path, body)
            assert reply.status == 400 and said in reply.json["error"]["message"], body
        assert s.engine.cleared == 0
        for body in (b"", b" {} "):
            assert (await s.request("POST", path, body)).status == (404 if "cancel" in path else 200)


async def test_the_status_has_the_statistics_of_the_engine() -> None:
    async with run_server(surfaces=ONLY) as s:
        s.engine.numbers = {
            "running": 2,
            "waiting": 5,
            "background": {"running": 2, "waiting": 4},
            "memory": {"active": 1},
            "probe": {"decode": "ragged"},
        }
        s.state.facts = {"versions": {"mlx": "1"}}
        s.state.clock = lambda: 5.0
        status = (await s.get("/v1/status")).json
        assert (status["queue"]["running"], status["queue"]["waiting"]) == (0, 0)  # of clients
        assert status["queue"]["background"] == {"running": 2, "waiting": 4}
        assert (status["age"], status["steps"]) == (0.0, 0)
        assert status["memory"] == {"active": 1}
        assert status["probe"] == {"decode": "ragged"}
        assert status["versions"] == {"mlx": "1"}
        assert status["config_hash"] == s.app[CONFIG_HASH]


async def test_the_status_does_not_wait_for_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older numbers with their age, by a scripted clock; what comes late is what the next one is shown."""
    monkeypatch.setattr("mlxrun.server.engine_state.STATS_TIMEOUT", 0.01)
    now, gate = [100.0], asyncio.Event()
    async with run_server(surfaces=ONLY, clock=lambda: now[0]) as s:
        first = (await s.get("/v1/status")).json
        assert (first["steps"], first["age"]) == (7, 0.0)
        asked = []

        async def late() -> dict[str, Any]:
            asked.append(now[0])
            await gate.wait()
            return {"steps": 8}

        s.engine.read_stats = late  # type: ignore[method-assign]
        for age in (30.0, 60.0):
            now[0] = 100 + age
            shown = (await s.get("/v1/status")).json
            assert (shown["steps"], shown["age"]) == (7, age)
            assert (await metric(s))["mlxrun_engine_age_seconds"] == age
        assert asked == [130.0]  # one question for all who ask meanwhile
        gate.set()
        await until(lambda: s.state.stats["steps"] == 8)
        shown = (await s.get("/v1/status")).json
        assert (shown["steps"], shown["age"]) == (8, 0.0)


async def test_no_key_of_the_status_is_ever_absent() -> None:
    async with run_server(surfaces=ONLY, loaded=False) as loading, run_server(surfaces=ONLY) as loaded:
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
    """Whatever the engine says of its rows, running and waiting are those of the table."""
    gates = {"computed": asyncio.Event(), "queued": asyncio.Event()}
    hit = TokenEvent("", num_computed_tokens=4, hit_kind=HitKind.MISS)

    def script(request: Request) -> list[Any]:
        return [hit, gates["computed"].wait] if len(s.engine.requests) == 1 else [gates["queued"].wait]

    async with run_server(surfaces=ONLY, script=script) as s:
        s.engine.numbers = {"running": 9, "waiting": 9}
        asked = [asyncio.create_task(s.post("/mini", make_chat_body()))]
        await until(lambda: [live.phase for live in s.live] == ["prefill"])
        asked += [asyncio.create_task(s.post("/mini", make_chat_body())) for _ in range(2)]
        await until(lambda: len(s.live) == 3)
        queue = (await s.get("/v1/status")).json["queue"]
        queue.pop("background")
        assert queue == {"queued": 2, "prefill": 1, "decode": 0, "running": 1, "waiting": 2}
        for gate in gates.values():
            gate.set()
        await asyncio.gather(*asked)
