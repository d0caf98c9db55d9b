"""Compiled forwards, drafts and memory of the batch; ragged/test_decode_batch.py has its rows."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlxrun.model.hooks.drafted_state import hook_states
from mlxrun.model.kv.paged import paged_batch
from mlxrun.model.kv.paged.attention_kernel import attend_gathered
from mlxrun.model.kv.paged.paged_batch import PagedDecodeBatch
from mlxrun.model.kv.ragged.decode_batch import JoiningRow

HEADS, SIZE = 2, 32
WINDOW = 5


def make_template() -> list[Any]:
    return [KVCache(), RotatingKVCache(WINDOW)]


def embed(ids: mx.array, offset: mx.array, seed: int) -> mx.array:
    """[rows, H, 1, D]: numbers that depend on the token and its position alone."""
    angles = (ids + 7 * offset[:, None]).astype(mx.float32)[:, None, :, None] * (1 + mx.arange(SIZE) + seed)
    return mx.broadcast_to(mx.sin(angles), (ids.shape[0], HEADS, 1, SIZE))


def decode(ids: mx.array, caches: list[Any], positions: Any) -> mx.array:
    outputs = []
    for cache in caches:
        offset = cache.offset
        query, key, value = (embed(ids, offset, seed) for seed in range(3))
        mask = cache.make_mask(1)
        keys, _ = cache.update_and_fetch(key, value)
        outputs.append(keys.attend(query, 0.2, mask))
    return mx.concatenate(outputs, axis=-1).reshape(ids.shape[0], 1, -1)


def make_row(rid: str, tokens: list[int]) -> JoiningRow:
    cache = make_template()
    for position, token in enumerate(tokens):
        ids, offset = mx.array([[token]]), mx.array([position])
        for layer in cache:
            layer.update_and_fetch(embed(ids, offset, 1), embed(ids, offset, 2))
    return JoiningRow(rid, len(tokens), cache)


PROMPTS = {"a": [3, 1, 4], "b": [1], "c": [5, 9, 2, 6, 5, 3, 5]}


def make_batch(**options: Any) -> PagedDecodeBatch:
    batch = PagedDecodeBatch(make_template(), **options)
    batch.update(set(PROMPTS), [make_row(rid, tokens) for rid, tokens in PROMPTS.items()])
    return batch


def run_steps(batch: PagedDecodeBatch, steps: int) -> mx.array:
    outputs = [batch.forward(decode, mx.array([n, n + 1, n + 2]), batch.lengths) for n in range(steps)]
    return mx.stack(outputs)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of compiled forwards; on a CPU compiling takes seconds, so they are called as they are."""
    shapes: list[tuple[int, ...]] = []

    def compile_nothing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            shapes.append(args[0].shape)
            return function(*args)

        return call

    monkeypatch.setattr(mx, "compile", compile_nothing)
    return shapes


def test_a_shape_is_compiled_after_some_steps_and_gives_the_same(
    compiled: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_batch, "COMPILE_AFTER", 2)
    found = run_steps(make_batch(compiled=True), 5)
    assert compiled == [(4,)] * 3  # three rows and a dummy, from the third step on
    assert mx.allclose(found, run_steps(make_batch(), 5), atol=1e-6).item()


@pytest.mark.parametrize("cuda", [False, True])
def test_fewer_rows_take_a_step_that_is_compiled(
    cuda: bool, compiled: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA, at most twice as wide: two rows decode in a step of four, and a single one does not."""
    monkeypatch.setattr(paged_batch, "COMPILE_AFTER", 2)
    monkeypatch.setattr(paged_batch, "uses_cuda", lambda: cuda)
    batch, plain = make_batch(compiled=True), make_batch()
    for own in (batch, plain):
        run_steps(own, 3)
        own.update({"a", "c"}, ())
    compiled.clear()
    found = [own.forward(decode, mx.array([5, 7]), own.lengths) for own in (batch, plain)]
    assert mx.allclose(*found, atol=1e-6).item() and compiled == [(4,)] * cuda
    batch.update({"a"}, ())
    batch.forward(decode, mx.array([5]), batch.lengths)
    assert compiled == [(4,)] * cuda


def test_a_fixed_width_is_compiled_at_once(compiled: list[tuple[int, ...]]) -> None:
    found = run_steps(make_batch(compiled=True, width=6), 2)
    assert compiled == [(6,)] * 2
    assert mx.allclose(found, run_steps(make_batch(), 2), atol=1e-6).item()


def test_a_fixed_width_need_not_be_filled_where_rows_round_alike_in_any(
    compiled: list[tuple[int, ...]],
) -> None:
    """It is compiled at once all the same: a forward that is not compiled may round otherwise."""
    run_steps(make_batch(compiled=True, width=6, any_width=True), 2)
    assert compiled == [(4,)] * 2


@pytest.mark.parametrize("width", [0, 6])
def test_a_step_within_a_page_takes_nothing_from_the_host(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two: what is needed is the last step's and one more, also beside dummy rows. A row that goes back
    takes some."""
    batch, tokens = make_batch(width=width), mx.array([1, 2, 3])
    make, made = mx.array, list[Any]()
    monkeypatch.setattr(mx, "array", lambda *given, **more: made.append(given) or make(*given, **more))
    counts = []
    for step in range(8):
        if step == 5:
            batch.accept({"a": 4})
        mx.eval(batch.forward(decode, tokens, [n + 9 for n in batch.lengths]))
        counts.append(len(made))
    assert counts[1] == counts[4] < counts[5] and counts[6] == counts[7]


def test_a_layers_own_window_holds_where_the_mask_has_none() -> None:
    windows = []

    def attend(*given: Any) -> mx.array:
        windows.append(given[-1].window)
        return attend_gathered(*given)

    run_steps(make_batch(attend=attend), 1)
    assert windows == [None, WINDOW]


def test_a_batch_that_is_dropped_is_freed() -> None:
    batch = make_batch(compiled=True)
    run_steps(batch, 1)
    alive = weakref.ref(batch)
    gc.disable()
    try:
        del batch
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_drafted_tokens_are_computed_as_by_steps_and_given_back(kept: int) -> None:
    steps, drafted = make_batch(), make_batch()
    tokens = {"a": [8, 7, 6], "b": [2], "c": [4, 4]}
    flat = [token for own in tokens.values() for token in own]
    together = drafted.forward(decode, mx.array(flat), [0] * len(flat), [3, 1, 2])
    alone = [
        steps.forward(decode, mx.array([own[min(i, len(own) - 1)] for own in tokens.values()]), [0] * 3)
        for i in range(3)
    ]
    assert mx.allclose(together[:3], mx.stack([out[0] for out in alone]), atol=1e-6).item()
    drafted.accept({"a": 3 + kept, "c": 8})
    assert drafted.lengths == [3 + kept, 2, 8]
    after = make_batch()
    for token in tokens["a"][:kept]:
        after.forward(decode, mx.array([token, 2, 4]), [0] * 3)
    expected = after.forward(decode, mx.array([5, 5, 5]), [0] * 3)[0]
    assert mx.allclose(drafted.forward(decode, mx.array([5, 5, 5]), [0] * 3)[0], expected, atol=1e-6).item()
    with pytest.raises(ValueError, match="has 3 tokens"):
        drafted.accept({"b": 9})


class Adder(nn.Module):
    """Its state is the sum of a row's tokens."""

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        cache[0] = cache[0] + mx.sum(ids, axis=1, keepdims=True)
        return (cache[0] - mx.sum(ids, axis=1, keepdims=True) + mx.cumsum(ids, axis=1))[:, :, None]


def test_recurrent_rows_go_back_within_the_forward_before() -> None:
    model = Adder()
    hook_states(model)
    rows = []
    for rid in ("a", "b"):
        cache = ArraysCache(1)
        cache[0] = mx.array([[100]])
        rows.append(JoiningRow(rid, 4, [cache]))
    batch = PagedDecodeBatch([ArraysCache(1)])
    batch.update({"a", "b"}, rows)

    def decode(ids: mx.array, caches: list[Any], positions: Any) -> mx.array:
        return model(ids, caches[0])

    found = batch.forward(decode, mx.array([1, 2, 3, 4]), [0] * 4, [3, 1])
    assert found.tolist() == [[101], [103], [106], [104]] and batch.lengths == [7, 5]
    for lengths in ({"a": 4}, {"b": 4}, {"a": 8}):
        with pytest.raises(ValueError, match=r"cannot go back|has 7 tokens, not 8"):
            batch.accept(lengths)
    batch.accept({"a": 6})
    with pytest.raises(ValueError, match="cannot go back"):
        batch.accept({"a": 5})
    assert batch.forward(decode, mx.array([1, 1]), [0] * 2).tolist() == [[104], [105]]
    batch.forward(decode, mx.array([1, 2, 3, 4]), [0] * 4, [2, 2])
    batch.update({"b"}, ())  # a row that leaves before tokens were rejected leaves the others as they are
    assert batch.forward(decode, mx.array([1]), [0]).tolist() == [[113]]
