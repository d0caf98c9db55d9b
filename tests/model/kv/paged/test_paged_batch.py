"""Compiled forwards, drafts and memory of the batch; ragged/test_decode_batch.py has its rows."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from mlxrun.model.hooks.drafted_state import hook_states
from mlxrun.model.kernels.kernel_source import PAGE
from mlxrun.model.kv.paged import paged_batch
from mlxrun.model.kv.paged.attention_kernel import attend_gathered
from mlxrun.model.kv.paged.paged_batch import PagedDecodeBatch
from mlxrun.model.kv.paged.paged_cache import PagePool
from mlxrun.model.kv.ragged.decode_batch import ExpectedRow, JoiningRow
from mlxrun.model.kv.ragged.layer_caches import FilledTogether, split_row

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


GROWN = """
import os
import mlx.core as mx
from mlxrun.model.kv.paged import paged_batch
from tests.model.kv.paged.test_paged_batch import decode, make_batch, make_row

def step(batch, rid):
    batch.update({"a", "b", rid}, [make_row(rid, [1] * 300)])
    pages = batch._tables[None].capacity
    mx.eval(batch.forward(decode, mx.array([1, 2, 3]), batch.lengths))
    print(pages, sum(len(files) for _, _, files in os.walk(os.environ["TMPDIR"])))

batch, find = make_batch(compiled=True, compiled_at_once=True), paged_batch.find_slots
step(batch, "d")
batch.update({"a", "b", "d", "e"}, [make_row("e", [1] * 600)])
step(batch, "f")
paged_batch.find_slots = lambda tables, positions, sizes: find(tables, positions, [4, 2000])
step(make_batch(compiled=True, compiled_at_once=True), "d")
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles with g++ on Linux")
def test_pools_of_another_size_need_no_other_kernels(tmp_path: Path) -> None:
    """Each kernel that MLX compiles takes seconds on CUDA. Python's numbers would be a part of one."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    script = [sys.executable, "-c", GROWN]
    found = subprocess.run(script, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert found.returncode == 0, found.stderr
    (pages, files), (more_pages, same), (_, more) = (
        map(int, line.split()) for line in found.stdout.splitlines()
    )
    assert more_pages > pages and 0 < files == same < more


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


def fill_together(prompts: Mapping[str, list[int]]) -> list[JoiningRow]:
    """Rows whose caches are filled in one forward, padded on the right."""
    longest, cache = max(map(len, prompts.values())), [KVCache(), KVCache()]
    padded = mx.array([tokens + [0] * (longest - len(tokens)) for tokens in prompts.values()])
    for position in range(longest):
        ids, offset = padded[:, position : position + 1], mx.array([position])
        for layer in cache:
            layer.update_and_fetch(embed(ids, offset, 1), embed(ids, offset, 2))
    return [
        JoiningRow(
            *(rid, len(tokens), split_row(cache, index, len(tokens), copied=False)),
            together=FilledTogether(cache, index, len(tokens)),
        )
        for index, (rid, tokens) in enumerate(prompts.items())
    ]


@pytest.mark.parametrize("missing", ["", "a", "bc"])
def test_rows_that_were_filled_together_are_copied_at_once(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same result as one by one, also beside another row, and if some of them do not join."""
    rows = [row for row in fill_together(PROMPTS) if row.id not in missing]
    writes: list[int] = []
    write = PagePool.write_rows
    monkeypatch.setattr(
        PagePool,
        "write_rows",
        lambda pool, parts, slots: writes.append(len(parts)) or write(pool, parts, slots),
    )

    def run(joining: list[JoiningRow]) -> mx.array:
        batch, other = PagedDecodeBatch([KVCache(), KVCache()]), fill_together({"z": [2, 7]})
        batch.update({row.id for row in (*joining, *other)}, [*joining, *other])
        batch.forward(decode, mx.arange(len(batch.ids)), batch.lengths)
        return batch.forward(decode, mx.arange(len(batch.ids)), batch.lengths)

    found, stacked = run(rows), list(writes)
    alone = run([replace(row, together=None) for row in rows])
    assert mx.array_equal(found, alone).item()
    assert stacked == [2, 2] and writes[2:] == [len(rows) + 1] * 2
    wrong = [
        replace(row, together=replace(row.together, index=2 - row.together.index))
        for row in rows
        if row.together
    ]
    assert not mx.array_equal(run(wrong), alone).item()


def test_pools_keep_pages_for_rows_that_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is computed while short rows come and go: the pools grow once for it, and shrink when it
    is over."""
    monkeypatch.setattr(paged_batch, "FEW_PAGES", 4)
    resized: list[int] = []
    resize, select = PagePool.resize, PagePool.select
    monkeypatch.setattr(PagePool, "resize", lambda pool, *more: resized.append(1) or resize(pool, *more))
    monkeypatch.setattr(PagePool, "select", lambda pool, *more: resized.append(-1) or select(pool, *more))
    batch, expected = PagedDecodeBatch([KVCache()]), [ExpectedRow(20 * PAGE)]
    for turn in range(4):
        batch.update({"a"} if turn % 2 else {"a", "b"}, fill_together({"ab"[turn % 2]: [1, 2]}), expected)
    assert resized == [1]
    batch.update({"a", "b"}, fill_together({"b": [3] * (5 * PAGE)}))
    assert resized == [1, -1], "what is left has pages for the row that joins"


def test_a_pool_that_shrinks_gives_memory_back_without_a_further_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the last row leaves, and the engine is idle."""
    monkeypatch.setattr(paged_batch, "FEW_PAGES", 1)
    batch, cache = PagedDecodeBatch([KVCache()]), KVCache()
    cache.update_and_fetch(*[mx.zeros((1, HEADS, 8 * PAGE, SIZE))] * 2)
    batch.update({"a"}, [JoiningRow("a", 8 * PAGE, [cache])])
    mx.eval(batch.forward(decode, mx.array([1]), batch.lengths))
    mx.synchronize()
    before, held = mx.get_active_memory(), sum(array.nbytes for array in batch._pools[0].arrays)
    batch.update(set(), ())
    mx.synchronize()
    assert batch._tables[None].capacity == 1
    assert mx.get_active_memory() <= before - held * 7 // 8


def test_pages_that_are_known_are_not_written_again() -> None:
    """Rows that were filled together may begin with the same pages. Here they have other tokens, so that
    those that were written are seen."""
    prompt = [*range(PAGE), 1]
    filled = fill_together({"a": prompt, "b": [*range(1, PAGE + 1), 1]})
    rows = [replace(row, page_keys=(b"key",)) for row in filled]
    batch = PagedDecodeBatch([KVCache(), KVCache()])
    batch.update({"a", "b"}, rows)
    assert batch.shared_tokens == PAGE
    first, second = batch.forward(decode, mx.array([3, 3]), batch.lengths)
    assert mx.array_equal(first, second).item()
    alone = PagedDecodeBatch([KVCache(), KVCache()])
    alone.update({"a"}, [replace(rows[0], together=None, page_keys=())])
    assert mx.array_equal(alone.forward(decode, mx.array([3]), alone.lengths)[0], first).item()


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
