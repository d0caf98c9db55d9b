"""The engine's numbers, counted between two steps."""

from __future__ import annotations

import time

from mlxrun.core.memory_budget import MemoryBudget
from mlxrun.engine.thread import EngineStats, collect_stats
from mlxrun.model.load_check.report import LoadCheck, LoadCheckReport
from mlxrun.model.run.compute_methods import ComputeMethods
from tests.helpers.engine_fakes import finish_all, make_engine, make_request


def test_rows_of_batches_are_counted_separately() -> None:
    engine = make_engine()
    for rid, background in (("a", False), ("b", True), ("c", True)):
        engine.add(make_request(rid, background=background))
    stats = collect_stats(engine).describe()
    assert (stats["running"], stats["waiting"]) == (0, 3)
    assert stats["background"] == {"running": 0, "waiting": 2}


def test_requests_are_counted_by_what_they_do() -> None:
    """Those with a row run, the others wait; steps count up, and a limit of 0 is none."""
    engine = make_engine()
    for i in range(6):
        engine.add(make_request(f"r{i}", 5, 9))
    engine.step()
    stats = collect_stats(engine).describe()
    assert (stats["running"], stats["waiting"], stats["steps"], stats["errors"]) == (4, 2, 1, 0)
    assert (stats["memory"]["limit"], stats["preemptions"]) == (None, 0)
    finish_all(engine)
    after = collect_stats(engine).describe()
    assert (after["running"], after["waiting"]) == (0, 0) and after["steps"] > 1
    cached = 2 * 3  # the last two requests find three tokens each in the prefix cache
    assert after["tokens"] == {"prefilled": 6 * 5 - cached, "generated": 6 * 9}


def test_the_probe_and_the_limit_are_shown() -> None:
    engine = make_engine(memory=MemoryBudget(limit=5000))
    assert collect_stats(engine).describe()["load_check"] is None
    engine.load_check = LoadCheckReport(ComputeMethods("grouped"), (LoadCheck("two rows", True, 0.5),))
    assert "load_check" not in collect_stats(engine).counts  # it is described for those who read it
    stats = collect_stats(engine).describe()
    assert stats["memory"]["limit"] == 5000
    assert stats["load_check"]["decode"] == "grouped"
    assert stats["load_check"]["checks"] == [
        {"name": "two rows", "passed": True, "difference": 0.5, "limit": None, "error": None, "instead": ""}
    ]


def test_the_numbers_of_an_idle_engine_are_always_new() -> None:
    engine = make_engine()
    assert not collect_stats(engine).busy
    assert EngineStats({}, None, time.monotonic() - 60, busy=False).compute_age() == 0.0
    engine.add(make_request("r"))
    assert collect_stats(engine).busy
    assert 60 <= EngineStats({}, None, time.monotonic() - 60, busy=True).compute_age() < 600
