"""Launches the next chunk of a prompt late, so that a request that comes meanwhile is computed before it.

A step is launched while the device computes the one before, and cannot be taken back. Where chunks take
longer than their launch, the runner pauses until shortly before the device would wait.
"""

from __future__ import annotations

from mlxrun.core.step_plan import StepPlan

MARGIN = 1.3  # of the time of a launch, since the next one may take longer
LEAST_WAIT = 2e-4  # seconds; a step that waited for less says nothing about the device's time


class LaunchPause:
    """Computes the pause behind each step. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._last: tuple[str, int, float] | None = None  # request, tokens, when the step before it had ended

    def compute(self, plan: StepPlan, began: float, launched: float, now: float) -> float:
        """The pause after a step that began to launch at `began`, had `launched`, and has waited for the one
        before until `now`. 0 unless both are chunks of one prompt, and the device is slower than launches."""
        last, self._last = self._last, None
        requests = {chunk.request_id for chunk in plan.prefill}
        if plan.decode or plan.encode or len(requests) != 1 or now - launched < LEAST_WAIT:
            return 0.0
        own, tokens = requests.pop(), sum(chunk.stop - chunk.start for chunk in plan.prefill)
        self._last = own, tokens, now
        if last is None or last[0] != own:
            return 0.0
        _, before, ended = last
        # From one end to the next, the device computed the chunk before. Later ones take no less a token.
        return max(0.0, (now - ended) * tokens / before - MARGIN * (launched - began))
