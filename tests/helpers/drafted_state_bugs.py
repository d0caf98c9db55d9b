"""Bugs of recurrent states in forwards with drafts, planted: tests and the load check must find each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.model.ragged import row_states
from mlxrun.model.ragged.drafted_state import DraftedState
from mlxrun.model.ragged.hoisted_calls import HoistedCalls
from mlxrun.model.ragged.pass_layout import LayerPass, PassLayout
from mlxrun.model.ragged.row_states import RowStates

Patch = pytest.MonkeyPatch


def keep_rejected_states(monkeypatch: Patch) -> None:
    """Rows go on from the state after their last drafted token, whether it was accepted or not."""
    original = RowStates.accept
    monkeypatch.setattr(RowStates, "accept", lambda self, kept=(): original(self))


def take_states_of_the_first_pass(monkeypatch: Patch) -> None:
    """Rows lose the accepted tokens of their drafts."""
    original = PassLayout.choose_states

    def choose(self: PassLayout, kept: Sequence[int]) -> Any:
        return original(self, [1] * len(kept))

    monkeypatch.setattr(PassLayout, "choose_states", choose)


def keep_rejected_convolutions(monkeypatch: Patch) -> None:
    """The first slot, which is that of the convolution, is not taken back; the others are."""
    original = RowStates.accept

    def accept(self: RowStates, kept: Sequence[int] = ()) -> None:
        layout, drafted = self._layout, self._drafted
        original(self, kept)
        if layout is not None:
            passes, rows = layout.choose_states(layout.counts)
            for layer, states in drafted.items():
                slot = [states[index][0] for index in passes]
                self._states[layer].cache[0] = row_states._choose_rows(slot, rows)

    monkeypatch.setattr(RowStates, "accept", accept)


def forget_the_pass_before(monkeypatch: Patch) -> None:
    """Each drafted token is computed from the state before the draft."""
    original = DraftedState._start_pass

    def start(self: DraftedState, index: int, step: LayerPass, after: list[Any], changed: set[int]) -> Any:
        return original(self, index, step, after[:1] * len(after), changed)

    monkeypatch.setattr(DraftedState, "_start_pass", start)


def mix_up_results(monkeypatch: Patch) -> None:
    """The results of passes are put into the rows of the forward in the order in which they were computed."""

    def gather(self: HoistedCalls, parts: Sequence[mx.array]) -> mx.array:
        return mx.concatenate(parts, axis=0)[: self._layout.total]

    monkeypatch.setattr(HoistedCalls, "_gather", gather)


PLANTS: tuple[Callable[[Patch], None], ...] = (
    keep_rejected_states,
    take_states_of_the_first_pass,
    keep_rejected_convolutions,
    forget_the_pass_before,
    mix_up_results,
)
