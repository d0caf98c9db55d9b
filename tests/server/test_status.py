"""What the server does at the moment, in the status and in the metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mlxrun.core.request import HitKind, Request, TokenEvent
from mlxrun.server.endpoints import admin
from mlxrun.server.http.access import CONFIG_HASH
from tests.helpers.raw_clients import until
from tests.helpers.server_fakes import MINI, make_chat_body, make_script, run_server
from tests.server.test_request_metrics import metric

ONLY = [MINI, admin.SURFACE]


async def test_the_status_has_the_statistics_of_the_engine() -> None:
    async with run_server(surfaces=ONLY) as s:
        s.engine.numbers = {
            "running": 2,
            "waiting": 5,
            "background": {"running": 2, "waiting": 4},
            "load_check": {"decode": "ragged"},
        }
        s.state.facts = {"versions": {"mlx": "1"}}
        s.state.clock = lambda: 5.0
        status = (await s.get("/v1/status")).json
        assert (status["queue"]["running"], status["queue"]["waiting"]) == (0, 0)  # of clients
        assert status["queue"]["background"] == {"running": 2, "waiting": 4}
        assert (status["age"], status["steps"]) == (0.0, 0)
        assert set(status["memory"]) == {"active", "cache", "peak", "limit"}
        assert status["load_check"] == {"decode": "ragged"}
        assert status["versions"] == {"mlx": "1"}
        assert status["config_hash"] == s.app[CONFIG_HASH]


async def test_no_key_of_the_status_is_ever_absent() -> None:
    async with run_server(surfaces=ONLY, loaded=False) as loading, run_server(surfaces=ONLY) as loaded:
        before = (await loading.get("/v1/status")).json
        after = (await loaded.get("/v1/status")).json
        assert before.keys() == after.keys()
        for name in (
            "age",
            "batches",
            "steps",
            "errors",
            "memory",
            "load_check",
            "versions",
            "device",
            "power",
        ):
            assert name in before
        assert (before["age"], before["steps"], after["steps"]) == (None, 0, 7)
        assert before["queue"].keys() == after["queue"].keys()
        assert after["batches"] == {"running": None, "waiting": 0}
        assert "mlxrun_engine_age_seconds" not in await metric(loading)


async def test_the_power_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"low_power_mode": True, "thermal_pressure": "heavy", "cpu_speed_limit": None}
    monkeypatch.setattr(admin, "read_power_state", lambda: state)
    async with run_server(surfaces=ONLY) as s:
        assert (await s.get("/v1/status")).json["power"] == state


async def test_the_queue_agrees_with_the_requests() -> None:
    """Whatever the engine says of its rows, running and waiting are those of the table."""
    gates = {"computed": asyncio.Event(), "queued": asyncio.Event()}
    hit = TokenEvent("", num_computed_tokens=4, hit_kind=HitKind.MISS)

    def script(request: Request) -> list[Any]:
        return [hit, gates["computed"].wait] if len(s.engine.requests) == 1 else [gates["queued"].wait]

    async with run_server(surfaces=ONLY, script=script) as s:
        s.engine.numbers = {"running": 9, "waiting": 9}
        received = [asyncio.create_task(s.post("/mini", make_chat_body()))]
        await until(lambda: [live.phase for live in s.live] == ["prefill"])
        received += [asyncio.create_task(s.post("/mini", make_chat_body())) for _ in range(2)]
        await until(lambda: len(s.live) == 3)
        queue = (await s.get("/v1/status")).json["queue"]
        queue.pop("background")
        assert queue == {"queued": 2, "prefill": 1, "decode": 0, "running": 1, "waiting": 2}
        for gate in gates.values():
            gate.set()
        await asyncio.gather(*received)


async def test_the_status_names_the_model_and_the_limits() -> None:
    """What is served, how much may run, and how much the files may take."""
    async with run_server(surfaces=ONLY) as s, run_server(surfaces=ONLY, loaded=False) as loading:
        status = (await s.get("/v1/status")).json
        model = {"name": "fake", "context_length": 4096, "vision": False, "tasks": ["generate"]}
        assert status["model"] == model
        assert status["limits"] == {"max_running": 32, "max_queue": 1024}
        assert status["files"] == {"count": 0, "bytes": 0, "max_bytes": 10_000_000_000}
        before = (await loading.get("/v1/status")).json
        assert before["model"] is None and before["limits"] == status["limits"]


async def test_the_metrics_name_the_model_and_the_limits() -> None:
    now = [100.0]
    gate = asyncio.Event()
    async with run_server(surfaces=ONLY, script=make_script("abc", gate.wait), clock=lambda: now[0]) as s:
        s.engine.counts = {"tokens": 321}
        received = asyncio.create_task(s.post("/mini", make_chat_body()))
        await until(lambda: [live.output_tokens for live in s.live] == [3])
        assert (await metric(s))["mlxrun_request_duration_seconds_count"] == 0
        now[0] += 7
        gate.set()
        await received
        found = await metric(s)
        assert found["mlxrun_request_duration_seconds_sum"] == 7
        assert found["mlxrun_cache_tokens_total"] == 321
        assert found["mlxrun_limits name=max_running"] == 32
        assert found["mlxrun_batches state=running"] == found["mlxrun_batches state=waiting"] == 0
        assert found["mlxrun_files_bytes"] == 0
        assert found["mlxrun_files_max_bytes"] == 10_000_000_000
        (info,) = [name for name in found if name.startswith("mlxrun_info ")]
        assert "model=fake" in info and f"config_hash={s.app[CONFIG_HASH]}" in info
