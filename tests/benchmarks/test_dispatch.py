"""The benchmark of the driver, small: what it measures is there, and the simulation's clock is right."""

from __future__ import annotations

import asyncio
import time

from benchmarks.dispatch import LinePace, SkippingLoop, measure_driver, simulate


def test_waits_are_skipped_and_counted() -> None:
    begun = time.monotonic()
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        runner.run(asyncio.sleep(10_000))
        loop = runner.get_loop()
        assert isinstance(loop, SkippingLoop) and loop.skipped > 9_999
    assert time.monotonic() - begun < 5_000


def test_two_simulated_workers_take_half_of_the_time() -> None:
    """640 lines of 100 s, 32 at once on each of two workers, are ten rounds; prefixes are computed once."""
    found = simulate(2, LinePace(100.0, 1.0, 0.0))
    assert found.lines == 640 and 1_000 <= found.seconds < 1_200
    assert found.prefixes == 640 // 16


def test_a_whole_job_on_fake_workers() -> None:
    assert measure_driver(200, 2).lines == 200
