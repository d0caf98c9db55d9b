"""What the server does at the moment, in the status and in the metrics."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.request import HitKind, Request, TokenEvent
from mlxrun.server.endpoints import admin
from mlxrun.server.http.access import CONFIG_HASH
from mlxrun.server.status import parse_power_state, read_power_state
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
        takes = {"vision": False, "input_modalities": ["text"], "tasks": ["generate"]}
        model = {"name": "fake", "context_length": 4096, **takes}
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


LAPTOP = """System-wide power settings:
Currently in use:
 standby              1
 Sleep On Power Button 1
 hibernatefile        /var/vm/sleepimage
 powernap             1
 networkoversleep     0
 disksleep            10
 sleep                1 (sleep prevented by powerd)
 hibernatemode        3
 ttyskeepawake        1
 displaysleep         10
 tcpkeepalive         1
 lowpowermode         {mode}
 womp                 0
"""
MODES = " standby              0\n powermode            {mode}\n sleep                0\n"
QUIET = """Note: No thermal warning level has been recorded
Note: No performance warning level has been recorded
Note: No CPU power status has been recorded
"""
HOT = """Note: No thermal warning level has been recorded
2026-08-31 20:01:34 +0200 CPU Power notify
\tCPU_Scheduler_Limit \t= 100
\tCPU_Available_CPUs \t= 8
\tCPU_Speed_Limit \t= 46
"""
PRESSURE = "com.apple.system.thermalpressurelevel {level}\n"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (LAPTOP.format(mode=0), False),
        (LAPTOP.format(mode=1), True),
        (MODES.format(mode=0), False),
        (MODES.format(mode=1), True),
        (MODES.format(mode=2), False),  # high power
        (" sleep                1\n", None),
        ("", None),
    ],
)
def test_low_power_mode(settings: str, expected: bool | None) -> None:
    assert parse_power_state(settings, "", "")["low_power_mode"] is expected


@pytest.mark.parametrize(("heat", "expected"), [(QUIET, None), (HOT, 46), ("", None)])
def test_the_speed_of_the_processor(heat: str, expected: int | None) -> None:
    assert parse_power_state("", heat, "")["cpu_speed_limit"] == expected


@pytest.mark.parametrize(
    ("pressure", "expected"),
    [
        (PRESSURE.format(level=0), "nominal"),
        (PRESSURE.format(level=1), "moderate"),
        (PRESSURE.format(level=2), "heavy"),
        (PRESSURE.format(level=99), None),
        ("com.apple.system.thermalpressurelevel: Failed with code 1000000\n", None),
        ("", None),
    ],
)
def test_thermal_pressure(pressure: str, expected: str | None) -> None:
    assert parse_power_state("", "", pressure)["thermal_pressure"] == expected


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing was read before, and nothing stays for other tests."""
    cache: Any = read_power_state.cache
    cache.clear()
    yield
    cache.clear()


def install(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_programs_are_asked_once_in_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    install(tmp_path, "pmset", f"echo asked >> {tmp_path}/log; echo ' lowpowermode 1'")
    install(tmp_path, "notifyutil", "echo $2 2")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    expected = {"low_power_mode": True, "thermal_pressure": "heavy", "cpu_speed_limit": None}
    assert read_power_state() == read_power_state() == expected
    assert (tmp_path / "log").read_text() == "asked\n" * 2


def test_a_mac_that_does_not_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    state = read_power_state()
    assert state is not None and set(state.values()) == {None}


def test_other_systems(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    assert read_power_state() is None
