"""Plans drafts: tokens that are predicted for a row, and verified in the same step as its newest one.

Drafts come from the row's own tokens (row_drafter.py) or from a model (draft_source.py), whichever is
expected to gain more. A draft needs the row's newest token, which decode-ahead reads a step late. Reading it
earlier makes all rows wait. So the engine does that (`awaits_tokens`) only where drafts are expected to gain
more than it costs.

The planner is pure and deterministic, like the scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxrun.config.settings import SpeculationSettings
from mlxrun.core.draft_source import CheckedSource, KnownRow
from mlxrun.engine.scheduler.request_state import RequestState
from mlxrun.engine.scheduler.row_drafter import Acceptance, RowDrafter

MAX_INDEXED = 2048  # tokens of prompts that are indexed in one step, which takes some 2 ms
WAITING_COST = 0.2  # steps: what decode-ahead would have saved in one


@dataclass(slots=True)
class DraftCounts:
    """Counts since the start: steps with drafts, drafted tokens, and accepted ones."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def describe(self) -> dict[str, int]:
        """The counts by name. It is called after each step, for which asdict is too slow."""
        return {"steps": self.steps, "drafted": self.drafted, "accepted": self.accepted}


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """The rows that draft, those with the shortest drafts first. `modelled`: the ids of those for which the
    source drafts; `depth`: the most tokens of these."""

    rows: Sequence[RequestState] = ()
    modelled: frozenset[str] = frozenset()
    depth: int = 0


@dataclass(slots=True)
class DraftPlanner:
    """Decides which rows draft, and how many tokens.

    `max_rows`: rows of one decode forward, of which each drafted token takes one; 0: nothing is drafted.
    `problem`: why nothing is drafted, None if the config says so. `source`: a model that drafts; `looks_up`:
    whether n-grams are looked up; `row_cost`: what a row adds to a forward, in steps of one row. `declined`:
    how often a row that may draft did not, since no draft was expected to pay or to be ready.
    """

    settings: SpeculationSettings
    max_rows: int = 0
    problem: str | None = None
    source: CheckedSource | None = None
    looks_up: bool = True
    row_cost: float = 0.0
    counts: DraftCounts = field(default_factory=DraftCounts)
    modelled: DraftCounts = field(default_factory=DraftCounts)  # those of the source among them
    declined: int = 0
    _acceptance: Acceptance = field(default_factory=Acceptance)  # of the source's drafts for all rows

    def describe(self) -> dict[str, Any]:
        """JSON-ready: the method in use, the one of the config, why they differ, and the counts."""
        source, problem = self.source, self.problem and f"off because {self.problem}"
        names = ["ngram"] if self.max_rows and self.looks_up else []
        if source is not None and source.problem is not None:
            problem = f"{source.name} is off because {source.problem}"
        elif source is not None:
            names = [source.name, *names]
        return {
            "method": "+".join(names) or "off",
            "configured": self.settings.method,
            "problem": problem,
            **self.counts.describe(),
            "declined": self.declined,
            "row_cost": round(self.row_cost, 3),
            "model": {"cost": source and round(source.cost, 3), **self.modelled.describe()},
        }

    def awaits_tokens(self, states: Sequence[RequestState]) -> bool:
        """Whether the launched step must be read before the next one is planned."""
        if not self.max_rows:
            return False
        if any(state.draft for state in states):
            return True
        if self.source is None and not any(state.drafter and state.drafter.predicts for state in states):
            return False  # as in most steps, which are short where rows are few
        decoding = [state for state in states if state.decoding and not state.exhausted]
        return any(state.num_in_flight for state in decoding) and bool(self._choose(decoding).rows)

    def plan(
        self, decoding: Sequence[RequestState], running: Sequence[RequestState], fits: Callable[..., bool]
    ) -> None:
        """Set the `draft` of rows in the next step. `fits`: whether the running rows fit in memory with their
        drafts."""
        if not self.max_rows:
            return
        self._plan_drafts(decoding, running, fits)
        self.declined += sum(_may_draft(state) and not state.draft for state in decoding)

    def _plan_drafts(
        self, decoding: Sequence[RequestState], running: Sequence[RequestState], fits: Callable[..., bool]
    ) -> None:
        if self.looks_up:
            self._index_prompts(decoding)
        self._advance_source(decoding)
        if any(state.num_in_flight for state in decoding):
            return
        choice = self._choose(decoding)
        self._draft(choice, self.max_rows - len(decoding))
        if any(state.draft for state in choice.rows) and not fits(running):
            for state in choice.rows:
                state.draft = ()
        drafted = {state.id: len(state.draft) for state in choice.rows}
        _count_drafted(self.counts, sum(drafted.values()))
        _count_drafted(self.modelled, sum(drafted[rid] for rid in choice.modelled))
        for state in decoding:
            if state.acceptance is not None:
                state.acceptance.pending = drafted[state.id] if state.id in choice.modelled else 0

    def record(self, state: RequestState, tokens: Sequence[int], accepted: int) -> None:
        """Take in new tokens of a request's output. `accepted`: how many of them were drafted."""
        self.counts.accepted += accepted
        drafter = state.drafter
        if drafter is not None and drafter.num_tokens + len(tokens) == state.num_tokens:
            drafter.append(tokens)
        if state.acceptance is not None:
            self.modelled.accepted += min(accepted, state.acceptance.pending)
            state.acceptance.record(len(tokens), accepted)

    def forget(self, state: RequestState) -> None:
        """Drop a row that has ended or was preempted."""
        if state.acceptance is not None:
            state.acceptance.pending = 0  # of a step that failed, nothing is compared
        if self.source is not None:
            self.source.forget(state.id)

    def close(self) -> None:
        """Release the source and its arrays, on the thread that made it."""
        if self.source is not None:
            self.source.close()
        self.source = None

    def _index_prompts(self, decoding: Sequence[RequestState]) -> None:
        left = MAX_INDEXED
        for state in decoding:
            if state.drafter is None and _may_draft(state):
                state.drafter = RowDrafter(self.settings)
            if state.drafter is not None and state.drafter.num_tokens < state.num_tokens and left:
                start = state.drafter.num_tokens
                new = _view(state).list_tokens(start, start + left)
                state.drafter.read_prompt(new)
                left -= len(new)

    def _advance_source(self, decoding: Sequence[RequestState]) -> None:
        """Let the source take in tokens of the rows for which drafts would pay alone, unless the rows of a
        forward are taken."""
        source = self.source
        if source is None:
            return
        for state in decoding:
            if state.acceptance is None and _may_draft(state) and source.takes(state.request):
                state.acceptance = Acceptance(self._acceptance)
        if len(decoding) >= self.max_rows:
            return
        rows = [_view(state) for state in decoding if self._would_pay(state, source.cost)]
        source.advance(rows)

    def _would_pay(self, state: RequestState, cost: float) -> bool:
        """Whether one drafted token gains more than it costs, with all rows like this one."""
        acceptance = state.acceptance
        cost += WAITING_COST + self.row_cost
        return acceptance is not None and _may_draft(state) and acceptance.expect(1) > cost

    def _choose(self, decoding: Sequence[RequestState]) -> DraftChoice:
        """The choice that gives the most tokens in the time that it takes; nothing if no drafts give more.
        A step takes longer by what waiting costs, by each token that the source drafts for all rows, and by
        each row that verifies one."""
        source, rows = self.source, len(decoding)
        copied = {state.id: _expect_copies(state) for state in decoding}
        ready = [] if source is None else self._list_ready(decoding, source)
        spare = self.max_rows - rows
        deepest, cost = 0, 0.0
        if source is not None and ready:
            deepest = min(source.max_tokens, self.settings.max_tokens, max(spare // len(ready), 1))
            cost = source.cost
        plain = 1 + self.row_cost * (rows - 1)
        best, best_speed = DraftChoice(), rows / plain
        for depth in range(deepest + 1):
            accepted = _expect_accepted(ready, copied, depth)
            gains = copied | accepted
            drafted = depth * len(accepted) + sum(2 * copied[rid] for rid in copied.keys() - accepted.keys())
            time = plain + WAITING_COST + depth * cost + self.row_cost * min(drafted, spare)
            speed = (rows + min(sum(gains.values()), spare)) / time
            if speed > best_speed:
                chosen = sorted((s for s in decoding if gains[s.id]), key=lambda s: gains[s.id])
                best, best_speed = DraftChoice(chosen, frozenset(accepted), depth), speed
        return best

    def _list_ready(
        self, decoding: Sequence[RequestState], source: CheckedSource
    ) -> list[tuple[RequestState, Acceptance]]:
        """The rows for which the source can draft, and what is known of its drafts."""
        return [
            (state, state.acceptance)
            for state in decoding
            if state.acceptance is not None and self._would_pay(state, source.cost)
            if source.is_ready(_view(state))
        ]

    def _draft(self, choice: DraftChoice, spare: int) -> None:
        """Give the chosen rows their drafts, in at most `spare` rows of the forward together."""
        requested: list[tuple[RequestState, int]] = []
        for index, state in enumerate(choice.rows):  # what a row does not take is shared by the later ones
            limit = max(min(spare // (len(choice.rows) - index), state.remaining_output - 1), 0)
            if state.id in choice.modelled:
                requested.append((state, min(limit, choice.depth)))
                spare -= requested[-1][1]
            else:
                assert state.drafter is not None
                state.draft = _drop_stop(state, state.drafter.propose(limit))
                spare -= len(state.draft)
        requested = [(state, limit) for state, limit in requested if limit]
        if requested and self.source is not None:
            views = [_view(state) for state, _ in requested]
            drafts = self.source.propose(views, [limit for _, limit in requested])
            for (state, _), draft in zip(requested, drafts, strict=True):
                state.draft = _drop_stop(state, draft)


def _count_drafted(counts: DraftCounts, drafted: int) -> None:
    counts.steps += drafted > 0
    counts.drafted += drafted


def _view(state: RequestState) -> KnownRow:
    return KnownRow(state.request, state.output)


def _drop_stop(state: RequestState, draft: tuple[int, ...]) -> tuple[int, ...]:
    """The draft without a token that ends the answer, and what follows it: verifying them gains nothing."""
    ends = (index for index, token in enumerate(draft) if token in state.request.params.stop_ids)
    return draft[: next(ends, len(draft))]


def _may_draft(state: RequestState) -> bool:
    return state.request.speculation and not state.suspect


def _count_room(state: RequestState) -> int:
    """The most tokens that a draft may gain: what the output may still get besides the next token."""
    return max(state.remaining_output - state.num_in_flight - 1, 0)


def _expect_copies(state: RequestState) -> float:
    """Tokens that a draft of the row's own tokens is expected to gain."""
    drafter = state.drafter
    if drafter is None or drafter.num_tokens < state.num_tokens or not _may_draft(state):
        return 0.0
    return min(drafter.expect(), _count_room(state))


def _expect_accepted(
    ready: Sequence[tuple[RequestState, Acceptance]], copied: Mapping[str, float], depth: int
) -> dict[str, float]:
    """By row: tokens that `depth` tokens of the source are expected to gain, where that is more than by
    copying."""
    found = {state.id: known.expect(min(depth, _count_room(state))) for state, known in ready}
    return {rid: gain for rid, gain in found.items() if gain > copied[rid]}
