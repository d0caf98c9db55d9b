"""Metrics for Prometheus."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from mlxrun.core.request import HitKind, TokenEvent
from mlxrun.server.endpoints import admin
from tests.helpers.raw_clients import connect, cut, until
from tests.helpers.server_fakes import MINI, Serving, make_chat_body, make_script, run_server

ONLY = [MINI, admin.SURFACE]


async def metric(s: Serving, **headers: str) -> dict[str, float]:
    """Every sample by name and labels."""
    reply = await s.get("/metrics", **headers)
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
            "preemptions": 5,
        }
        received = asyncio.create_task(s.post("/mini", make_chat_body()))
        await until(lambda: [live.phase for live in s.live] == ["prefill"])
        found = await metric(s)
        assert found["mlxrun_requests_live phase=prefill"] == 1
        assert found["mlxrun_ready"] == 1
        assert found["mlxrun_cache_lookups_total hit=lcp"] == 1
        assert found["mlxrun_cache_bytes tier=memory"] == 77
        assert found["mlxrun_engine_steps_total"] == 9
        assert found["mlxrun_engine_errors_total"] == 1
        assert found["mlxrun_preemptions_total"] == 5
        assert found["mlxrun_engine_requests state=waiting"] == 2
        assert found["mlxrun_engine_background state=waiting"] == 1
        kinds = {kind: found[f"mlxrun_memory_bytes kind={kind}"] for kind in ("active", "cache", "peak")}
        assert kinds["peak"] >= kinds["active"] >= 0 and kinds["cache"] >= 0
        assert "mlxrun_memory_bytes kind=limit" not in found  # there is none
        assert "mlxrun_memory_bytes kind=limit" not in found
        gate.set()
        await received
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
