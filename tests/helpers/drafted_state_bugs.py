"""Bugs of recurrent states in forwards with drafts, planted: tests and the load check must find each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.model.hooks.draft_layout import DraftLayout, LayerCall, RowChoice
from mlxrun.model.hooks.drafted_state import DraftedState, HoistedCalls
from mlxrun.model.kv.ragged.recurrent_states import RecurrentStates

Patch = pytest.MonkeyPatch


def keep_rejected_states(monkeypatch: Patch) -> None:
    """Rows go on from the state after their last drafted token, whether it was accepted or not."""
    original = RecurrentStates.accept
    monkeypatch.setattr(RecurrentStates, "accept", lambda self, kept=(): original(self))


def lose_accepted_states(monkeypatch: Patch) -> None:
    """Rows go on from the state after the first token of their drafts."""
    original = DraftLayout.choose_states

    def choose(self: DraftLayout, kept: Sequence[int]) -> Any:
        return original(self, [1] * len(kept))

    monkeypatch.setattr(DraftLayout, "choose_states", choose)


def keep_rejected_convolutions(monkeypatch: Patch) -> None:
    """The first slot, which is that of the convolution, is not taken back; the others are."""
    original = RecurrentStates.accept

    def accept(self: RecurrentStates, kept: Sequence[int] = ()) -> None:
        layout, drafted = self._layout, self._drafted
        original(self, kept)
        if layout is not None:
            parts = layout.choose_states(layout.counts)
            for layer, state in drafted.items():
                self._states[layer].cache[0] = state.choose(*parts)[0]

    monkeypatch.setattr(RecurrentStates, "accept", accept)


def forget_the_tokens_before(monkeypatch: Patch) -> None:
    """The third token is computed from the state after the first; blocks begin with states of other rows."""
    original = DraftedState.begin_call

    def begin(self: DraftedState, index: int, call: LayerCall, after: list[Any], changed: set[int]) -> Any:
        if call.tokens > 1:
            call = replace(call, begin=RowChoice(call.begin.rows[::-1]))
        return original(self, index, call, after[:1] * len(after), changed)

    monkeypatch.setattr(DraftedState, "begin_call", begin)


def mix_up_results(monkeypatch: Patch) -> None:
    """The results of calls are put into the rows of the forward in the order in which they were computed."""

    def gather(self: HoistedCalls, parts: Sequence[mx.array]) -> mx.array:
        pairs = zip(self._layout.calls, parts, strict=True)
        return mx.concatenate([call.flatten(part) for call, part in pairs], axis=0)[: self._layout.total]

    monkeypatch.setattr(HoistedCalls, "gather", gather)


PLANTS: tuple[Callable[[Patch], None], ...] = (
    keep_rejected_states,
    lose_accepted_states,
    keep_rejected_convolutions,
    forget_the_tokens_before,
    mix_up_results,
)
