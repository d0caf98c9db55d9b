"""Modules that update a recurrent state, for rows with drafts: results, and which layers are called once."""

from __future__ import annotations

import itertools
from typing import Any, get_args

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache

from mlxrun.model.hooks.adapted_layers import LayerWeights, RowAdapters, attach_adapters
from mlxrun.model.hooks.attention import NotRaggedError
from mlxrun.model.hooks.draft_layout import DraftRecurrence, lay_out_drafts
from mlxrun.model.hooks.drafted_state import DraftedState, StateTouchedError, hook_states
from mlxrun.model.kv.ragged.recurrent_states import RecurrentStates

SIZE = 4
COUNTS = [1, 3, 2]


class Counted(nn.Linear):
    """Counts the rows of its calls."""

    def __call__(self, x: mx.array) -> mx.array:
        self.__dict__.setdefault("calls", []).append(x.shape[0])
        return super().__call__(x)


class Mixer(nn.Module):
    """A recurrent layer with weights before, in and after the recurrence. `slot`: of its state."""

    def __init__(self, slot: int = 0) -> None:
        super().__init__()
        self.before, self.inside, self.behind = (Counted(SIZE, SIZE) for _ in range(3))
        self.slot = slot

    def __call__(self, x: mx.array, scale: float, cache: Any = None) -> tuple[mx.array, float]:
        state, given, states = cache[self.slot], self.before(x), []
        for token in range(x.shape[1]):
            state = mx.tanh(self.inside(0.5 * state) + given[:, token])
            states.append(state)
        cache[self.slot] = state
        cache.advance(x.shape[1])
        return self.behind(mx.stack(states, axis=1) * scale), scale


class Block(nn.Module):
    """Two modules with a slot each of one state, and a layer without one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.mlp = Mixer(0), Mixer(1), Counted(SIZE, SIZE)

    def __call__(self, x: mx.array, cache: Any = None) -> mx.array:
        assert cache.make_mask(1) is None and cache.lengths is None
        x = x + self.first(x, 0.5, cache=cache)[0]
        return self.mlp(x + self.second(x, 2.0, cache)[0])


class Greedy(Block):
    """Touches the state itself, after a module inside it has updated it: once for each call."""

    def __call__(self, x: mx.array, cache: Any = None) -> mx.array:
        y = super().__call__(x, cache)
        cache[1] = cache[1] + 0.25 * cache[0]
        return y


def make_model(kind: type[Block] = Block) -> Block:
    mx.random.seed(3)
    model = kind()
    mx.eval(model.parameters())
    hook_states(model)
    return model


def make_states(rows: int) -> RecurrentStates:
    cache = ArraysCache(2)
    states = RecurrentStates([cache])
    filled = ArraysCache(2)
    filled.cache = [mx.random.normal((rows, SIZE), key=mx.random.key(slot)) for slot in range(2)]
    states.reorder([], ["all"], {"all": [filled]})
    cache.cache = filled.cache
    return states


def run_steps(model: Block, x: mx.array) -> tuple[mx.array, list[list[mx.array]]]:
    """Outputs by row of the forward, and the states after each token: by row and token."""
    outputs, after, first = [], [], 0
    for row, count in enumerate(COUNTS):
        cache = ArraysCache(2)
        cache.cache = [a[row : row + 1] for a in make_states(len(COUNTS))._states[0].cache]
        after.append(list[mx.array]())
        for at in range(first, first + count):
            outputs.append(model(x[at : at + 1], cache))
            after[-1].append(mx.stack(cache.cache))
        first += count
    return mx.concatenate(outputs), after


def run_drafts(model: Block, x: mx.array, recurrence: DraftRecurrence) -> tuple[mx.array, RecurrentStates]:
    states = make_states(len(COUNTS))
    layout = lay_out_drafts(recurrence, COUNTS, x.shape[0], 8)
    layers = states.make_drafted(layout)
    output = model(x, layers[0])
    states.hold_drafted(layers, layout)
    mx.eval(output, states.list_arrays())
    return output, states


@pytest.mark.parametrize(
    ("kind", "recurrence"),
    [*itertools.product([Block], get_args(DraftRecurrence)), (Greedy, "passes"), (Greedy, "wide_passes")],
)
@pytest.mark.parametrize("kept", [(1, 1, 1), (1, 2, 2), (1, 3, 1), (1, 3, 2)])
def test_rows_are_computed_token_by_token_and_go_back(
    kind: type[Block], recurrence: DraftRecurrence, kept: tuple[int, ...]
) -> None:
    model, x = make_model(kind), mx.random.normal((8, 1, SIZE), key=mx.random.key(9))
    expected, after = run_steps(model, x)
    output, states = run_drafts(model, x, recurrence)
    assert mx.allclose(output[:6], expected, atol=1e-6).item()
    states.accept(kept)
    for row, count in enumerate(kept):
        found = mx.stack(list(states.view_row(row)[0]))
        assert mx.allclose(found, after[row][count - 1], atol=1e-6).item()
    with pytest.raises(ValueError, match="cannot go back"):
        states.accept([1, 0, 1])


def test_who_asks_before_tokens_are_rejected_sees_all() -> None:
    model, x = make_model(), mx.random.normal((6, 1, SIZE), key=mx.random.key(9))
    _, after = run_steps(model, x)
    _, states = run_drafts(model, x, "passes")
    assert states.counts == tuple(COUNTS)
    found = mx.stack(list(states.view_row(1)[0]))
    assert mx.allclose(found, after[1][2], atol=1e-6).item() and not states.counts


def test_weights_are_read_once_where_no_state_stands_between() -> None:
    model, x = make_model(), mx.random.normal((8, 1, SIZE), key=mx.random.key(9))
    run_drafts(model, x, "passes")  # finds who updates the states
    layers = [layer for mixer in (model.first, model.second) for layer in mixer.children().values()]
    for layer in (*layers, model.mlp):
        layer.calls.clear()
    evaluated = model.first.behind.calls
    run_drafts(model, x, "passes")
    assert model.first.before.calls == [8] == model.mlp.calls, "all rows, dummies too"
    assert model.first.inside.calls == [3, 2, 1], "this one takes the state"
    assert evaluated == [3, 2, 1, 8], "the results of passes are replaced, unevaluated"
    assert all(isinstance(layer, Counted) for layer in model.first.children().values())


@pytest.mark.parametrize("recurrence", get_args(DraftRecurrence))
def test_each_row_has_its_adapter_in_every_call(recurrence: DraftRecurrence) -> None:
    """The numbers of adapters are those of the rows of the forward, which calls take in another order."""
    model, x = make_model(), mx.random.normal((8, 1, SIZE), key=mx.random.key(9))
    rows = RowAdapters(("a", "b"))
    paths = [f"{mixer}.{layer}" for mixer in ("first", "second") for layer in ("before", "inside", "behind")]
    adapters = [
        {path: LayerWeights(mx.full((SIZE, 1), value), mx.ones((1, SIZE))) for path in paths}
        for value in (0.3, -0.2)
    ]
    attach_adapters(model, rows, adapters)
    numbers = [1, 2, 2, 2, 0, 0, 0, 0]
    expected = []
    for number in range(3):
        with rows.use([number]):
            expected.append(run_steps(model, x)[0])
    with rows.use(numbers):
        output, _ = run_drafts(model, x, recurrence)
        assert rows.numbers == tuple(numbers)
    for row in range(6):
        assert mx.allclose(output[row], expected[numbers[row]][row], atol=1e-6).item()


class Mixed(nn.Module):
    """Reads the state without having been called with it: it is one of several caches."""

    def __call__(self, x: mx.array, cache: Any = None) -> mx.array:
        return x + cache[0][0][:, None]


def test_a_state_that_is_read_elsewhere_is_an_error_that_names_the_reader() -> None:
    layout, states = lay_out_drafts("blocks", COUNTS, 6), make_states(3)
    state = states.make_drafted(layout)[0]
    hook_states(Mixed())
    with pytest.raises(StateTouchedError, match=r"Mixed\.__call__ reads"):
        Mixed()(mx.zeros((6, 1, SIZE)), (state, None))
    with pytest.raises(NotRaggedError, match="did not update"):
        states.hold_drafted({0: state}, layout)
    for name in ("cache", "state", "extend", "nbytes"):
        with pytest.raises(StateTouchedError):
            getattr(state, name)
    assert not hasattr(state, "offset") and state.left_padding is None


def test_calls_without_drafts_are_the_modules_own() -> None:
    model, cache = make_model(), ArraysCache(2)
    cache.cache = [mx.zeros((1, SIZE))] * 2
    before = type(model).__call__
    hook_states(model)
    assert type(model).__call__ is before, "routed once"
    assert model(mx.ones((1, 1, SIZE)), cache).shape == (1, 1, SIZE)
    assert not isinstance(cache, DraftedState)
