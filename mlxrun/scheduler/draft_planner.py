"""Plans drafts: tokens that are predicted for a row, and verified in the same step as its newest one.

A draft needs the row's newest token, which decode-ahead reads a step late. So where drafts are expected to
gain more than it costs all rows to wait for that, the engine reads the launched step before it plans
(`awaits_tokens`); otherwise nothing waits. Pure and deterministic, like the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlxrun.config.settings import SpeculationSettings
from mlxrun.scheduler.request_state import RequestState
from mlxrun.scheduler.row_drafter import RowDrafter
from mlxrun.scheduler.step_plan import SampledToken

MAX_INDEXED = 2048  # tokens of prompts that are indexed in one step, which takes some 2 ms
WAITING_COST = 0.2  # tokens for each row: what decode-ahead would have saved in a step


@dataclass(slots=True)
class DraftCounts:
    """Since the start: steps with drafts, drafted tokens, and those of them that were accepted."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class DraftPlanner:
    """`max_rows`: rows of one decode forward, of which a draft takes one for each token; 0: nothing is
    drafted, for the reason in `problem` (None: by the config)."""

    settings: SpeculationSettings
    max_rows: int = 0
    problem: str | None = None
    counts: DraftCounts = field(default_factory=DraftCounts)

    def describe(self) -> dict[str, Any]:
        """JSON-ready: the method that is used, the one of the config, why they differ, and the counts."""
        method, configured = "ngram" if self.max_rows else "off", self.settings.method
        return {
            "method": method,
            "configured": configured,
            "problem": self.problem and f"off because {self.problem}",
            **asdict(self.counts),
        }

    def awaits_tokens(self, states: Sequence[RequestState]) -> bool:
        """Whether the launched step must be read before the next one is planned."""
        if not self.max_rows:
            return False
        if any(state.draft for state in states):
            return True
        decoding = [state for state in states if state.decoding and not state.exhausted]
        return any(state.num_in_flight for state in decoding) and bool(self._choose_rows(decoding))

    def plan(
        self, decoding: Sequence[RequestState], running: Sequence[RequestState], fits: Callable[..., bool]
    ) -> None:
        """Give rows of the next step a `draft`. `fits`: whether the running rows fit in memory with it."""
        if not self.max_rows:
            return
        self._index_prompts(decoding)
        if any(state.num_in_flight for state in decoding):
            return
        spare, chosen = self.max_rows - len(decoding), self._choose_rows(decoding)
        for index, state in enumerate(chosen):  # what a row does not take is shared by the later ones
            limit = min(spare // (len(chosen) - index), state.remaining_output - 1)
            assert state.drafter is not None
            state.draft = state.drafter.propose(max(limit, 0))
            spare -= len(state.draft)
        if any(state.draft for state in chosen) and not fits(running):
            for state in chosen:
                state.draft = ()
        drafted = sum(len(state.draft) for state in chosen)
        self.counts.steps += drafted > 0
        self.counts.drafted += drafted

    def record(self, state: RequestState, sampled: Sequence[SampledToken], accepted: int) -> tuple[int, ...]:
        """Newly sampled tokens were appended to the request's output; so many of the draft were accepted.
        Returns the tokens."""
        self.counts.accepted += accepted
        tokens, drafter = tuple(each.token for each in sampled), state.drafter
        if drafter is not None and drafter.num_tokens + len(tokens) == state.num_tokens:
            drafter.append(tokens)
        return tokens

    def _index_prompts(self, decoding: Sequence[RequestState]) -> None:
        left = MAX_INDEXED
        for state in decoding:
            if state.drafter is None and _may_draft(state):
                state.drafter = RowDrafter(self.settings)
            if state.drafter is not None and state.drafter.num_tokens < state.num_tokens and left:
                start = state.drafter.num_tokens
                new = [*state.request.prompt, *state.output][start : start + left]
                state.drafter.read_prompt(new)
                left -= len(new)

    def _choose_rows(self, decoding: Sequence[RequestState]) -> list[RequestState]:
        """The rows that draft, those first that want the least; none if all would not gain enough."""
        gains = {state.id: _expect_gain(state) for state in decoding}
        gain = min(sum(gains.values()), self.max_rows - len(decoding))
        if gain <= WAITING_COST * len(decoding):
            return []
        return sorted((s for s in decoding if gains[s.id]), key=lambda s: gains[s.id])


def _may_draft(state: RequestState) -> bool:
    return state.request.speculation and not state.suspect


def _expect_gain(state: RequestState) -> float:
    """Tokens that a draft is expected to gain, within what the output may still get."""
    drafter = state.drafter
    if drafter is None or drafter.num_tokens < state.num_tokens or not _may_draft(state):
        return 0.0
    return min(drafter.expect(), state.remaining_output - state.num_in_flight - 1)
