"""The next chunk is launched late only where the device is slower than launches, and never too late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxrun.core.step_plan import PrefillChunk, StepPlan
from mlxrun.model.run.launch_pause import MARGIN, LaunchPause


def plan_chunk(start: int, tokens: int = 100, rid: str = "a") -> StepPlan:
    return replace(StepPlan(), prefill=(PrefillChunk(rid, start, start + tokens),))


def run(pause: LaunchPause, plan: StepPlan, began: float, launch: float = 0.01, end: float = 0.0) -> float:
    """A step that began then. `end`: when the step before it had ended, after which it returned."""
    return pause.compute(plan, began, began + launch, max(began + launch, end))


def test_the_pause_ends_before_the_device_waits() -> None:
    """Chunks of 50 ms, which end at 0.05, 0.1, 0.15; the one under way ends 50 ms after the last end."""
    pause = LaunchPause()
    assert run(pause, plan_chunk(0), 0.0) == 0  # nothing was waited for
    assert run(pause, plan_chunk(100), 0.01, end=0.05) == 0  # of no chunk before the time is known
    first = run(pause, plan_chunk(200), 0.05, end=0.1)
    assert first == pytest.approx(0.05 - MARGIN * 0.01)
    began = 0.1 + first
    assert run(pause, plan_chunk(300), began, end=0.15) == pytest.approx(first)
    assert began + 0.01 < 0.15


def test_a_smaller_chunk_takes_less_time() -> None:
    pause = LaunchPause()
    run(pause, plan_chunk(100), 0.01, end=0.05)
    assert run(pause, plan_chunk(200, 40), 0.05, end=0.1) == pytest.approx(0.05 * 0.4 - MARGIN * 0.01)


@pytest.mark.parametrize(
    ("plan", "launch", "end"),
    [
        (plan_chunk(200), 0.06, 0.0),  # the launch takes longer than the device
        (plan_chunk(200), 0.049, 0.1),
        (plan_chunk(0, rid="b"), 0.01, 0.1),
        (replace(plan_chunk(200), decode=("b",)), 0.01, 0.1),
        (replace(plan_chunk(200), encode=("a",)), 0.01, 0.1),
        (StepPlan(), 0.01, 0.1),
        (StepPlan(prefill=(*plan_chunk(200).prefill, *plan_chunk(0, rid="b").prefill)), 0.01, 0.1),
    ],
)
def test_no_pause(plan: StepPlan, launch: float, end: float) -> None:
    pause = LaunchPause()
    run(pause, plan_chunk(100), 0.01, end=0.05)
    assert run(pause, plan, 0.05, launch, end) == 0
