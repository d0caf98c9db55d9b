"""Which rows of a forward a recurrent layer computes in which call, and where each row's state is then."""

from __future__ import annotations

import itertools
from typing import get_args

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.model.hooks.draft_layout import DraftRecurrence, LayerCall, RowChoice, lay_out_drafts

WAYS = get_args(DraftRecurrence)
Tokens = tuple[int, ...]


def run_call(call: LayerCall, begin: list[Tokens], tokens: list[int]) -> tuple[list[Tokens], list[Tokens]]:
    """What a layer gives whose state is all tokens before: that, for each of its tokens; and its states."""
    outputs, states = [], []
    for row, state in enumerate(begin):
        for source in call.sources.rows[row * call.tokens : (row + 1) * call.tokens]:
            state = (*state, tokens[source])
            outputs.append(state)
        states.append(state)
    return outputs, states


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6).filter(lambda counts: max(counts) > 1),
    st.integers(0, 3),
    st.sampled_from(WAYS),
    st.data(),
)
def test_each_token_follows_those_of_its_row_before(
    counts: list[int], dummies: int, recurrence: DraftRecurrence, data: st.DataObject
) -> None:
    total = sum(counts) + dummies
    layout = lay_out_drafts(recurrence, counts, total, total)
    first = [(-row,) for row in range(layout.width)]
    tokens, outputs, after, left = list(range(total)), [], [], first
    for call in layout.calls:
        before = call.begin if call.previous is None else call.previous
        begin = [(first if call.previous is None else left)[row] for row in before.rows]
        found, left = run_call(call, begin, tokens)
        outputs += found
        after.append([left[row] for row in call.kept.rows])
    ends = list(itertools.accumulate(counts, initial=0))
    rows = [(-row, *range(a, b)) for row, (a, b) in enumerate(itertools.pairwise(ends))]
    expected = [row[: i + 1] for row in rows for i in range(1, len(row))]
    assert [outputs[place] for place in layout.results.rows][: sum(counts)] == expected
    kept = [data.draw(st.integers(1, count)) for count in counts]
    parts, order = layout.choose_states(kept)
    states: list[Tokens] = []
    for part in parts:
        if part.repeat is None:
            states += [after[part.call][place] for place in part.places.rows]
        else:
            states += run_call(part.repeat, [first[row] for row in part.repeat.begin.rows], tokens)[1]
    assert [states[place] for place in order.rows] == [r[: n + 1] for r, n in zip(rows, kept, strict=True)]


def test_rows_of_each_call() -> None:
    counts = [1, 3, 2]
    shapes = [
        [(len(call.firsts), call.tokens) for call in lay_out_drafts(way, counts, 8, 8).calls] for way in WAYS
    ]
    assert shapes == [[(1, 1), (2, 3)], [(3, 1), (2, 1), (1, 1)], [(8, 1), (8, 1), (8, 1)]]


def test_what_a_block_left_is_repeated_only_for_rows_that_reject() -> None:
    layout = lay_out_drafts("blocks", [1, 3, 3], 7)
    assert [part.repeat for part in layout.choose_states([1, 3, 3])[0]] == [None, None]
    (repeat,) = (part.repeat for part in layout.choose_states([1, 3, 2])[0] if part.repeat)
    assert (repeat.sources.rows, repeat.begin.rows, repeat.tokens) == ((4, 5), (2,), 2)


@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (1, 2), (2, 0), (3,)])
def test_rows_are_taken_from_arrays(rows: Tokens) -> None:
    array = mx.arange(8).reshape(4, 2)
    for copied in (False, True):
        assert RowChoice(rows).take(array, copied=copied).tolist() == [array[i].tolist() for i in rows]


def test_a_block_has_the_tokens_of_a_row_side_by_side() -> None:
    call = lay_out_drafts("blocks", [2, 2], 4).calls[0]
    array = mx.arange(8).reshape(4, 1, 2)
    assert call.take(array).tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert mx.array_equal(call.flatten(call.take(array)), array).item()
    assert call.take(mx.array([3, 4, 8, 9])).tolist() == [3, 8], "a position is that of the first token"
    with pytest.raises(ValueError, match="for 2 tokens a row"):
        call.flatten(mx.zeros((4, 1, 2)))
