"""Chunks fill the rows' own caches, alone or several in a forward, and the last one gives logits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.core.request import SamplingParams
from mlxrun.core.step_plan import PrefillChunk, SnapshotKind, SnapshotRequest
from mlxrun.model.hooks import device_attention
from mlxrun.model.kv.ragged.layer_caches import list_all_arrays
from mlxrun.model.kv.snapshot.copier import SnapshotCopier
from mlxrun.model.kv.snapshot.snapshots import SnapshotCodec
from mlxrun.model.run import prefill as prefill_module
from mlxrun.model.run.chunk_grouping import PrefillSharing
from mlxrun.model.run.compute_methods import ComputeMethods, DecodeMethod
from mlxrun.model.run.model_caller import ModelCaller, run_trial_forward
from mlxrun.model.run.prefill import PrefillOutput, PrefillRunner
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from mlxrun.model.run.sampler import RowSampling
from mlxrun.model.run.step_output import RunningRow
from tests.helpers import text_models
from tests.helpers.model_fixtures import Zoo
from tests.helpers.runner_driver import load_tiny_caller

LONG, SHORT, EQUAL = text_models.prompts(7, (40, 38, 40))


class Prefill:
    """A PrefillRunner and its rows."""

    def __init__(self, zoo: Zoo, sharing: PrefillSharing | None = None, **methods: Any) -> None:
        self.caller: ModelCaller = load_tiny_caller(zoo.text("llama"))
        cache, vocab = run_trial_forward(self.caller)
        self.vocab = vocab
        chosen = ComputeMethods(sharing=sharing or PrefillSharing(), **methods)
        self.runner = PrefillRunner(self.caller, vocab, chosen, SnapshotCopier(SnapshotCodec(cache)))
        self.rows: dict[str, RunningRow] = {}

    def add(self, name: str, prompt: Sequence[int]) -> RunningRow:
        sampling = RowSampling.start(SamplingParams(), prompt, (), self.vocab)
        row = RunningRow(list(prompt), TEXT_ONLY, sampling, self.caller.make_cache(), mx.array(prompt[-1:]))
        self.rows[name] = row
        return row

    def run(self, *chunks: tuple[str, int, int], snapshots: Sequence[SnapshotRequest] = ()) -> PrefillOutput:
        output = self.runner.forward([PrefillChunk(*chunk) for chunk in chunks], snapshots, self.rows)
        mx.eval(output.arrays)
        return output

    def last_logits(self, prompt: Sequence[int]) -> np.ndarray:
        """The reference: the library's model in one forward."""
        return np.array(self.caller.model(mx.array([list(prompt)]))[:, -1])


def finish(prefill: Prefill, name: str) -> np.ndarray:
    """The logits of a row's last token, computed in a chunk of its own."""
    row = prefill.rows[name]
    (batch,) = prefill.run((name, row.cached, len(row.tokens))).logits
    assert batch.ids == (name,) and batch.positions == [len(row.tokens)]
    return np.array(batch.logits)


@pytest.mark.parametrize("launch_first", [False, True])
@pytest.mark.parametrize("chunk", [7, 16, 40])
def test_chunks_of_any_size_give_the_logits_of_one_forward(zoo: Zoo, chunk: int, launch_first: bool) -> None:
    prefill = Prefill(zoo, launch_first=launch_first)
    prefill.add("a", LONG)
    for start in range(0, 39, chunk):
        assert prefill.run(("a", start, min(start + chunk, 39))).logits == []
    assert np.abs(finish(prefill, "a") - prefill.last_logits(LONG)).max() < 1e-4


def watch_shapes(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the forwards from now on."""
    shapes: list[tuple[int, ...]] = []
    call = prefill.caller.prefill

    def watch(ids: mx.array, *rest: object) -> mx.array:
        shapes.append(ids.shape)
        return call(ids, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(prefill.caller, "prefill", watch)
    return shapes


def test_dummies_behind_chunks_change_nothing(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention on CUDA wants multiples of 256 tokens; here of 8."""
    monkeypatch.setattr(device_attention, "STEP", 8)
    prefill = Prefill(zoo, PrefillSharing(8, max_padded=64), launch_first=True)
    shapes = watch_shapes(prefill, monkeypatch)
    prompts = {"a": LONG, "b": SHORT, "c": EQUAL, "d": LONG}
    for name, prompt in prompts.items():
        prefill.add(name, prompt)
    prefill.run(("a", 0, 16))
    prefill.run(("a", 16, 29))
    prefill.run(("a", 29, 37))
    prefill.run(("b", 0, 31), ("c", 0, 29))
    prefill.run(("d", 0, 33))  # 15 would be too many
    assert shapes == [(1, 16), (1, 13 + 3), (1, 8 + 3), (2, 31 + 1), (1, 33)]
    assert [prefill.rows[name].cache[0].offset for name in "abcd"] == [37, 31, 29, 33]
    for name, prompt in prompts.items():
        assert np.abs(finish(prefill, name) - prefill.last_logits(prompt)).max() < 1e-4


@pytest.mark.parametrize("kept", [0, 2])
def test_dummies_that_stay_in_the_cache_would_be_seen(
    zoo: Zoo, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_attention, "STEP", 8)
    prefill = Prefill(zoo, PrefillSharing(8, max_padded=64), launch_first=True)
    prefill.add("a", LONG)
    prefill.run(("a", 0, 29))
    for layer in prefill.rows["a"].cache:
        layer.offset += kept
    prefill.run(("a", 29, 39))
    differs = np.abs(finish(prefill, "a") - prefill.last_logits(LONG)).max() > 1e-4
    assert differs == bool(kept)


def test_a_cache_that_would_grow_for_dummies_gets_none(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_attention, "STEP", 8)
    prefill = Prefill(zoo, PrefillSharing(8, max_padded=64), launch_first=True)
    shapes, row = watch_shapes(prefill, monkeypatch), prefill.add("a", LONG)
    for layer in row.cache:
        layer.step = 37
    for edges in ((0, 16), (16, 32), (32, 37)):
        prefill.run(("a", *edges))
    assert shapes == [(1, 16), (1, 16), (1, 5)]


def test_equal_and_padded_prompts_share_a_forward(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = Prefill(zoo, PrefillSharing(8, max_padded=64))
    for name, prompt in (("a", LONG), ("b", SHORT), ("c", EQUAL)):
        prefill.add(name, prompt)
    shapes = watch_shapes(prefill, monkeypatch)
    prefill.run(("a", 0, 39), ("b", 0, 37), ("c", 0, 39))
    assert shapes == [(3, 39)]
    for name, prompt in (("a", LONG), ("b", SHORT), ("c", EQUAL)):
        assert np.abs(finish(prefill, name) - prefill.last_logits(prompt)).max() < 1e-4


@pytest.mark.parametrize("decode", ["paged", "ragged"])
def test_only_rows_that_join_pages_keep_what_they_filled_together(zoo: Zoo, decode: DecodeMethod) -> None:
    """Others have copies, which are freed with their rows."""
    prefill = Prefill(zoo, PrefillSharing(max_rows=4, max_padded=64), decode=decode)
    for name, prompt in (("a", LONG), ("b", SHORT), ("c", EQUAL)):
        prefill.add(name, prompt)
    prefill.run(("a", 0, 37), ("b", 0, 37), ("c", 0, 39))
    kept = {name: row.together for name, row in prefill.rows.items() if row.together is not None}
    assert [*kept] == (["b", "c"] if decode == "paged" else [])
    assert len({id(each.cache) for each in kept.values()}) <= 1


def test_a_snapshot_is_taken_as_soon_as_the_row_has_its_tokens(zoo: Zoo) -> None:
    prefill = Prefill(zoo)
    prefill.add("a", LONG)
    received = SnapshotRequest("a", SnapshotKind.DELTA, 0, 16, entry=None)
    assert prefill.run(("a", 0, 10)).snapshots == []
    (found,) = prefill.run(("a", 10, 20), snapshots=[received]).snapshots
    assert found.request is received and found.payload is not None


def test_a_prefix_that_was_lost_is_computed(zoo: Zoo) -> None:
    prefill = Prefill(zoo)
    row = prefill.add("a", LONG)
    prefill.runner.compute_prefix(row, 32)
    assert row.cached == 32 and list_all_arrays(row.cache)
    assert np.abs(finish(prefill, "a") - prefill.last_logits(LONG)).max() < 1e-4


@pytest.mark.parametrize(
    ("grid", "spans", "sizes"),
    [
        (1, (), [32]),
        (8, (), [8, 8, 8, 8]),
        (8, ((6, 14),), [6, 8, 2, 8, 8]),
        (8, ((0, 27),), [27, 5]),
        (16, ((10, 12),), [16, 16]),
    ],
)
def test_a_lost_prefix_is_computed_in_the_chunks_of_its_prompt(
    zoo: Zoo, grid: int, spans: tuple[tuple[int, int], ...], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a grid, in reproducible mode, it has the bits that the prompt's chunks have."""
    prefill = Prefill(zoo, grid=grid)
    row, other = prefill.add("a", LONG), prefill.add("b", LONG)
    row.image_spans = spans
    shapes = watch_shapes(prefill, monkeypatch)
    prefill.runner.compute_prefix(row, 32)
    assert shapes == [(1, size) for size in sizes]
    edges = [0, *itertools.accumulate(sizes)]
    for chunk in itertools.pairwise(edges):
        prefill.run(("b", *chunk))
    pairs = zip(list_all_arrays(row.cache), list_all_arrays(other.cache), strict=True)
    assert all(mx.array_equal(mine, theirs).item() for mine, theirs in pairs)


def test_images_are_not_split_where_a_lost_prefix_is_computed(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a grid, chunks end at fixed distances."""
    monkeypatch.setattr(prefill_module, "RECOMPUTE_CHUNK", 16)
    prefill = Prefill(zoo)
    row = prefill.add("a", LONG)
    row.image_spans = ((12, 20),)
    shapes = watch_shapes(prefill, monkeypatch)
    prefill.runner.compute_prefix(row, 36)
    assert shapes == [(1, 12), (1, 8), (1, 12), (1, 4)] and row.cached == 36


def test_a_trial_computes_without_rows_and_raises_what_the_model_raises(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = Prefill(zoo)
    shapes = watch_shapes(prefill, monkeypatch)
    prefill.runner.compute_trial()
    assert shapes == [(1, 2)] and prefill.rows == {}

    def fail(*rest: object) -> mx.array:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(prefill.caller, "prefill", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        prefill.runner.compute_trial()


def test_the_comparison_sees_a_lost_token(zoo: Zoo) -> None:
    """The mutation twin: the row's cache lacks one token."""
    prefill = Prefill(zoo)
    row = prefill.add("a", LONG)
    prefill.run(("a", 0, 38))
    row.cached = 39
    assert np.abs(finish(prefill, "a") - prefill.last_logits(LONG)).max() > 1e-3
