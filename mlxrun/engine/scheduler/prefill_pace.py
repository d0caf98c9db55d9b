"""Limits the prompt tokens of a step, so that it ends within `scheduler.step_ms`.

A step cannot be interrupted: a short request or an abort that arrives meanwhile waits for its end. The pace
is measured from the steps themselves, since it depends on the model, the device, and the depth of prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxrun.core.step_plan import StepCosts, StepPlan

NEWEST_WEIGHT = 0.5  # of the newest step in averages
DECAY = 0.6  # of what earlier steps add to a pace, at each further step
IMAGE_SHARE = 0.25  # of the time of a step, for images
MIN_MEASURED = 16  # tokens; the time of a step with fewer is mostly that of its launch


def fit_chunks(most: float, chunk: int, least: float = 1.0) -> int:
    """At most `most` tokens: whole chunks, or a chunk that is halved a few times, since devices prepare for
    each new number of tokens. `least`: a chunk is halved if less than this share of it fits."""
    if most >= chunk:
        return int(most) // chunk * chunk
    while least * chunk > most:
        chunk //= 2
    return chunk


def _computes(plan: StepPlan) -> bool:
    return bool(plan.decode or plan.prefill or plan.encode)


@dataclass(slots=True)
class MeasuredPace:
    """Tokens a second over the last steps: all their tokens divided by all their seconds."""

    tokens: float = 0.0
    seconds: float = 0.0

    def record(self, tokens: int, seconds: float) -> None:
        """Take in a step. A step with too few tokens is ignored."""
        if tokens >= MIN_MEASURED:
            self.tokens = DECAY * self.tokens + tokens
            self.seconds = DECAY * self.seconds + seconds

    def compute(self) -> float | None:
        """Tokens a second; None before the first step."""
        return self.tokens / max(self.seconds, 1e-9) if self.tokens else None


class PrefillPace:
    """Estimates how many prompt tokens fit in a step.

    `step_ms`: 0 for no limit. `chunk`: the chunk grid, and the limit until steps were measured; `min_tokens`:
    the smallest limit. `costs`: its `least_fitting` is below 1 where launches bound a forward. There halves
    take nearly as long as whole chunks, and their slow pace would prevent whole chunks for good.

    The time between two returns of the runner belongs to one of two steps. On CPUs prompts are computed while
    their graph is built, so it is the step that was given. On GPUs it is the step before, which the runner
    waits for. The pace is the lower one of both. A step with drafts is waited for before another is given. It
    takes two returns, the second one of an empty step.
    """

    def __init__(self, step_ms: int, chunk: int, min_tokens: int, costs: StepCosts) -> None:
        self._costs = costs
        self._seconds = step_ms / 1000
        self._chunk = chunk
        self._min_tokens = min_tokens
        self._own, self._before = MeasuredPace(), MeasuredPace()
        self._decode_seconds = 0.0  # of a step that only decodes
        self._launch_seconds = 0.0  # of the last step, if nothing was under way before it

    def record_step(self, plan: StepPlan, before: StepPlan | None, seconds: float) -> None:
        """Take in the seconds that the runner took for `plan`. `before`: the step before; None if the engine
        was idle."""
        steps = (plan,) if before is None else (plan, before)
        launched, self._launch_seconds = self._launch_seconds, 0.0
        if not _computes(plan):
            seconds += launched
        elif before is None or not _computes(before):
            self._launch_seconds = seconds
        if any(step.encode for step in steps):  # their time is not that of tokens
            return
        tokens = [sum(chunk.stop - chunk.start for chunk in step.prefill) for step in steps]
        decoding = any(step.decode for step in steps)
        if decoding and not any(tokens) and not self._launch_seconds:
            self._decode_seconds += NEWEST_WEIGHT * (seconds - self._decode_seconds)
        left = max(seconds - self._decode_seconds if decoding else seconds, seconds / 10, 1e-6)
        self._own.record(tokens[0], left)
        if before is not None:
            self._before.record(tokens[1], left)

    def _compute_pace(self) -> float | None:
        """Tokens a second; None until both were measured."""
        own, before = self._own.compute(), self._before.compute()
        return None if own is None or before is None else min(own, before)

    @property
    def image_seconds(self) -> float | None:
        """How long a step may encode images; None for no limit. Short parts cost no more than long ones, so
        that others wait less than for tokens."""
        return self._seconds * IMAGE_SHARE or None

    def limit_tokens(self, budget: int, decoding: bool, lone: bool = False) -> int:
        """The prompt tokens that fit into a step, at most `budget`. From one chunk on they are whole chunks
        of the grid. Steps then end where chunks end, so timing does not change how a prompt is split. `lone`:
        they are of one prompt, and nothing else runs or waits."""
        if not self._seconds or budget <= self._min_tokens:
            return budget
        usual = self._count_fitting(self._seconds, decoding)
        if lone:
            share = self._count_fitting(self._seconds * self._costs.lone_share, decoding)
            usual = min(usual, max(share, self._costs.lone_tokens))
        return min(budget, usual)

    def _count_fitting(self, seconds: float, decoding: bool) -> int:
        pace = self._compute_pace()
        spare = max(seconds - (self._decode_seconds if decoding else 0.0), seconds / 4)
        most = float(self._chunk) if pace is None else pace * spare
        return max(fit_chunks(most, self._chunk, self._costs.least_fitting), self._min_tokens)
