"""Which rows of a forward are computed in which pass, and where each row's state is then."""

from __future__ import annotations

import itertools

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.model.ragged.pass_layout import PassLayout, RowChoice


def run_passes(layout: PassLayout, tokens: list[int], rows: int) -> tuple[list[int], list[list[list[int]]]]:
    """What a layer gives whose state is the list of the tokens before: the number of them by row of the
    forward, encoded with them; and the states that each pass keeps."""
    outputs: list[tuple[int, ...]] = []
    kept = []
    states: list[list[int]] = [[] for _ in layout.passes[0].sources.rows]
    for step in layout.passes:
        before = states if step.previous is None else [states[i] for i in step.previous.rows]
        states = [[*a, tokens[row]] for a, row in zip(before, step.sources.rows, strict=True)]
        outputs += [tuple(state) for state in states]
        kept.append([states[i] for i in step.kept.rows])
    found = [outputs[i] for i in layout.results.rows]
    return [hash(each) for each in found], kept


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 3), st.booleans(), st.data())
def test_each_token_follows_those_of_its_row_before(
    counts: list[int], dummies: int, wide: bool, data: st.DataObject
) -> None:
    total = sum(counts) + dummies
    layout = PassLayout(counts, total, len(counts) + dummies if wide else 0)
    found, states = run_passes(layout, list(range(total)), len(counts))
    firsts = list(itertools.accumulate(counts, initial=0))
    blocks = [list(range(a, b)) for a, b in itertools.pairwise(firsts)]
    expected = [hash(tuple(block[: i + 1])) for block in blocks for i in range(len(block))]
    assert found[: sum(counts)] == expected
    kept = [data.draw(st.integers(1, count)) for count in counts]
    passes, places = layout.choose_states(kept)
    joined = [state for index in passes for state in states[index]]
    assert [joined[i] for i in places.rows] == [block[:n] for block, n in zip(blocks, kept, strict=True)]


def test_passes_are_narrow_or_all_as_wide() -> None:
    narrow, wide = PassLayout([1, 3, 2], 8), PassLayout([1, 3, 2], 8, 8)
    assert [len(step.sources.rows) for step in narrow.passes] == [3, 2, 1]
    assert [len(step.sources.rows) for step in wide.passes] == [8, 8, 8]
    assert [step.owners for step in narrow.passes] == [step.owners for step in wide.passes]


@pytest.mark.parametrize("rows", [(0, 1, 2, 3), (1, 2), (2, 0), (3,)])
def test_rows_are_taken_from_arrays(rows: tuple[int, ...]) -> None:
    array = mx.arange(8).reshape(4, 2)
    for copied in (False, True):
        assert RowChoice(rows).take(array, copied=copied).tolist() == [array[i].tolist() for i in rows]
