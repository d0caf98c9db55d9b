"""`python -m benchmarks ui-cost`, on a server whose answers are scripted."""

from __future__ import annotations

import os

import pytest

from benchmarks import ui_cost
from benchmarks.server_process import ServerProcess
from tests.helpers.server_fakes import make_script, run_server


async def test_a_turn_is_measured_while_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui_cost, "POLL_SECONDS", 0.001)
    async with run_server(script=make_script("42 ")) as s:
        server = ServerProcess(s.url, os.getpid())
        for side in (ui_cost.CLOSED, ui_cost.POLLED):
            async with ui_cost._look(side, s.url, ""):
                found = await ui_cost._measure_turn(server, streams=2, requests=4, tokens=8)
            assert found["output_tps"] > 0


def test_a_side_is_compared_with_the_same_turn() -> None:
    """The machine was twice as slow in the second turn, which changes no ratio."""
    runs = {
        side: [{"output_tps": rate, "cpu_ms_per_token": cost} for rate, cost in found]
        for side, found in (("closed", ((100.0, 4.0), (50.0, 8.0))), ("open", ((90.0, 5.0), (45.0, 10.0))))
    }
    report = ui_cost.build_report(runs, {"streams": 1, "turns": 2})
    assert report["sides"]["open"]["ratios"] == {"output_tps": 0.9, "cpu_ms_per_token": 1.25}
    assert report["sides"]["open"]["page_cost"] == 0.25
    assert report["sides"]["closed"]["median"]["output_tps"] == 75.0
    assert report["command"] == "python -m benchmarks ui-cost --streams 1 --turns 2 --json FILE"
    ui_cost.print_ui_report(report)
