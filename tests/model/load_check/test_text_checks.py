"""Each mutation of how text is computed is found by the check of that name; what replaces it is exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from mlxrun.model.kv.ragged import layer_caches, row_group
from mlxrun.model.kv.snapshot.snapshots import SnapshotCodec, StatePayload
from mlxrun.model.load_check import choose
from mlxrun.model.run.model_caller import ModelCaller, VisionModelCaller
from tests.helpers import engine_driver, oracle, text_models
from tests.helpers.load_check_driver import find_failed, list_failed, probe_model
from tests.helpers.model_fixtures import Zoo, mark_sweep

Patch = pytest.MonkeyPatch
CHUNKS = {
    "prefill chunks",
    "prefill chunks at 31 tokens",
    "prefill chunks at 518 tokens",
    "prefill chunks at 13 tokens",
}


def lose_chunk_offsets(monkeypatch: Patch) -> None:
    """A chunk after the first begins a position too late."""
    original = KVCache.update_and_fetch

    def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
        if self.offset and keys.shape[2] > 1:
            keys = mx.concatenate([mx.zeros_like(keys[:, :, :1]), keys[:, :, :-1]], axis=2)
        return original(self, keys, values)

    monkeypatch.setattr(KVCache, "update_and_fetch", update_and_fetch)


def shorten_kept_windows(monkeypatch: Patch) -> None:
    """A chunk sees a token too few of the window before it."""
    original = RotatingKVCache._trim

    def trim(self: Any, size: int, v: mx.array, append: mx.array | None = None) -> mx.array:
        found = original(self, size, v, append)
        if append is not None and size > 0:
            found[:, :, :1] = 0
        return found

    monkeypatch.setattr(RotatingKVCache, "_trim", trim)


def lose_states(monkeypatch: Patch) -> None:
    """A recurrent state starts anew with each chunk of more than one token, in the library's calls too."""
    prefill, call_library = ModelCaller.prefill, ModelCaller.call_library

    def drop(cache: Sequence[Any]) -> None:
        for layer in layer_caches.flatten_caches(cache):
            if layer_caches.get_kind(layer) is layer_caches.LayerKind.STATE:
                layer.cache = [None] * len(layer.cache)

    def prefill_anew(self: Any, ids: mx.array, cache: list[Any], start: int, *more: Any) -> mx.array:
        if start:
            drop(cache)
        return prefill(self, ids, cache, start, *more)

    def call_anew(self: Any, ids: Sequence[int], cache: list[Any], start: int) -> mx.array:
        if start and len(ids) > 1:
            drop(cache)
        return call_library(self, ids, cache, start)

    monkeypatch.setattr(ModelCaller, "prefill", prefill_anew)
    monkeypatch.setattr(ModelCaller, "call_library", call_anew)


CHUNK_MUTATIONS = {
    "llama": lose_chunk_offsets,
    "deepseek_v3": lose_chunk_offsets,
    "gemma3_text": shorten_kept_windows,
    "gpt_oss": shorten_kept_windows,
    "mamba2": lose_states,
    "qwen3_next": lose_states,
}


@pytest.mark.parametrize("family", CHUNK_MUTATIONS)
def test_prompts_that_depend_on_how_they_are_split(zoo: Zoo, family: str, monkeypatch: Patch) -> None:
    CHUNK_MUTATIONS[family](monkeypatch)
    report = probe_model(zoo.text(family))
    assert CHUNKS & set(list_failed(report)) and report.methods.library_chunks
    assert not report.methods.snapshots and not report.methods.sharing.tails
    failed = next(check for check in report.checks if check.name in CHUNKS and not check.passed)
    assert "every 2048 tokens" in failed.instead and "decode ragged" not in list_failed(report)[:1]


def test_what_depends_on_chunks_is_split_as_the_library_does(zoo: Zoo, monkeypatch: Patch) -> None:
    """With chunks of 16 tokens in the config, and with preemptions, answers are the library's."""
    lose_states(monkeypatch)
    engine = engine_driver.make_real_engine(zoo.text("mamba2"), max_running=2)
    prompts = text_models.prompts(0, (40, 17, 70))
    asks = [engine_driver.make_text_request(str(i), p, max_tokens=8) for i, p in enumerate(prompts)]
    events = engine_driver.run_requests(engine, asks)
    for i, prompt in enumerate(prompts):
        engine_driver.check_answer(events[str(i)], zoo.answer("mamba2", prompt), 8)


@pytest.fixture(scope="module")
def plamo3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In mlx-lm a token of plamo3 sees one token more of its window, if it is in the same forward."""
    config = {
        "window_size": 8,
        "sliding_window_pattern": 2,
        "num_hidden_layers": 4,
        "rope_local_theta": 10000,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(text_models.CONFIGS, "plamo3", config)
        return text_models.build("plamo3", tmp_path_factory.mktemp("plamo3") / "model")


def has_library_answers(folder: Path, load_check: bool) -> bool:
    """Whether the answers of rows that are preempted again and again are those of the library's loop."""
    engine = engine_driver.make_real_engine(folder, load_check=load_check)

    def preempt(step: int) -> None:
        for state in list(engine.scheduler.requests):
            if step % 6 == 5 and state.running:
                engine.scheduler.preempt(state)  # type: ignore[arg-type]

    prompts = text_models.prompts(0, (3, 30, 70))
    asks = [engine_driver.make_text_request(str(i), p, max_tokens=12) for i, p in enumerate(prompts)]
    events = engine_driver.run_requests(engine, asks, preempt)
    answers = [oracle.text_answer(folder, prompt, 12, step=2048) for prompt in prompts]
    return not any(engine_driver.has_other_answer(events[str(i)], a) for i, a in enumerate(answers))


def test_plamo3_is_found_and_split_as_the_library_does(plamo3: Path) -> None:
    assert CHUNKS & set(list_failed(probe_model(plamo3)))
    assert has_library_answers(plamo3, load_check=True)


def test_unprobed_it_would_be_wrong(plamo3: Path) -> None:
    assert not has_library_answers(plamo3, load_check=False)


def shift_restored_keys(monkeypatch: Patch) -> None:
    original = SnapshotCodec.restore_keys
    monkeypatch.setattr(
        SnapshotCodec, "restore_keys", lambda *given: [mx.roll(a, 1, axis=2) for a in original(*given)]
    )


def keep_older_states(monkeypatch: Patch) -> None:
    """Every state is the one that was copied first."""
    original, first = SnapshotCodec.copy_state, dict[str, StatePayload]()

    def copy_state(self: Any, view: Any, length: int) -> StatePayload:
        made = original(self, view, length)
        return replace(first.setdefault("state", made), length=length)

    monkeypatch.setattr(SnapshotCodec, "copy_state", copy_state)


SNAPSHOT_MUTATIONS = {
    "llama": shift_restored_keys,
    "gpt_bigcode": shift_restored_keys,
    "qwen3_next": keep_older_states,
    "mamba2": keep_older_states,
    "gemma3_text": keep_older_states,
}


@pytest.mark.parametrize("family", SNAPSHOT_MUTATIONS)
def test_stale_rows_after_a_restore(zoo: Zoo, family: str, monkeypatch: Patch) -> None:
    SNAPSHOT_MUTATIONS[family](monkeypatch)
    report = probe_model(zoo.text(family))
    assert list_failed(report)[-1].startswith("snapshot") and not report.methods.snapshots
    assert not CHUNKS & set(list_failed(report)) and not report.methods.library_chunks


def test_without_exact_snapshots_there_is_no_prefix_cache(zoo: Zoo, monkeypatch: Patch) -> None:
    shift_restored_keys(monkeypatch)
    engine = engine_driver.make_real_engine(zoo.text("llama"))
    (prompt,) = text_models.prompts(1, (40,))
    for name in ("cold", "again"):
        asks = [engine_driver.make_text_request(name, prompt, max_tokens=8)]
        events = engine_driver.run_requests(engine, asks)
        engine_driver.check_answer(events[name], zoo.answer("llama", prompt), 8)
    assert engine.prefix_cache.nbytes == 0


def swap_tokens_of_chunks(monkeypatch: Patch) -> None:
    """A chunk after the first has its tokens in another order."""
    original = ModelCaller.prefill

    def prefill(self: Any, ids: mx.array, cache: list[Any], start: int, *more: Any) -> mx.array:
        return original(self, mx.roll(ids, 1, axis=1) if start else ids, cache, start, *more)

    monkeypatch.setattr(ModelCaller, "prefill", prefill)


def swap_rows_of_batches(monkeypatch: Patch) -> None:
    """Rows of one forward take each other's tokens."""
    original = ModelCaller.decode

    def decode(self: Any, ids: mx.array, cache: list[Any], positions: Sequence[int]) -> mx.array:
        return original(self, mx.roll(ids, 1, axis=0), cache, positions)

    monkeypatch.setattr(ModelCaller, "decode", decode)


def restore_other_contents(monkeypatch: Patch) -> None:
    original = SnapshotCodec.restore

    def restore(*given: Any) -> list[Any]:
        cache = original(*given)
        for layer in layer_caches.flatten_caches(cache):
            if layer_caches.get_kind(layer) is layer_caches.LayerKind.STATE:
                layer.cache = [a if a is None else a + 1 for a in layer.cache]
            else:
                layer.keys = mx.roll(layer.keys, 1, axis=2)
        return cache

    monkeypatch.setattr(SnapshotCodec, "restore", restore)


@pytest.mark.parametrize("family", mark_sweep(text_models.TEXT, (*text_models.CORE, "deepseek_v3")))
def test_every_family_has_its_mutations_found(zoo: Zoo, family: str, monkeypatch: Patch) -> None:
    """Tokens of chunks, rows of batches, contents of snapshots: each is found by its own check."""
    for plant in (swap_tokens_of_chunks, swap_rows_of_batches, restore_other_contents):
        with monkeypatch.context() as patch:
            plant(patch)
            failed = find_failed(zoo.text(family))
        if plant is restore_other_contents:
            assert failed[-1].startswith("snapshot") and not CHUNKS & set(failed)
        elif plant is swap_rows_of_batches:
            assert "decode ragged" in failed and not CHUNKS & set(failed)
        else:
            assert failed[0] in CHUNKS


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_a_window_that_is_off_by_one_in_the_batch(zoo: Zoo, family: str, monkeypatch: Patch) -> None:
    original = row_group.RowGroup.get_width

    def get_width(self: Any, window: int | None) -> int:
        return original(self, None if window is None else window - 1)

    monkeypatch.setattr(row_group.RowGroup, "get_width", get_width)
    report = probe_model(zoo.text(family))
    assert {"decode ragged", "decode grouped"} <= set(list_failed(report))
    assert report.methods.decode == "row_by_row"


@pytest.mark.parametrize(
    ("family", "planted"),
    [("gemma3_text", ""), ("gemma3_text", "others"), ("mamba2", ""), ("mamba2", "place")],
)
def test_bits_that_depend_on_the_rows_beside(zoo: Zoo, family: str, planted: str, monkeypatch: Patch) -> None:
    """With the methods of a GPU. Twins: each row gets a little of the others, or of its place, far less than
    what passes for rounding."""
    original = ModelCaller.decode

    def decode(self: Any, ids: mx.array, *given: Any) -> mx.array:
        more = ids.sum() if planted == "others" else mx.arange(len(ids))[:, None, None]
        return original(self, ids, *given) + 1e-6 * more

    monkeypatch.setattr(choose, "uses_gpu", lambda: True)
    if planted:
        monkeypatch.setattr(ModelCaller, "decode", decode)
    report = probe_model(zoo.text(family), reproducible=True, max_running=32)
    assert list_failed(report) == (["same bits in company"] if planted else [])
    assert (report.methods.decode == "row_by_row") is bool(planted) and report.methods.fixed_width == 32
    assert "same bits in company" in {check.name for check in report.checks}
    assert list_failed(probe_model(zoo.text(family))) == []


@pytest.mark.parametrize(("most", "width"), [(40, 32), (12, 8), (3, 32)])
def test_bits_that_depend_on_the_place_on_a_cpu(zoo: Zoo, most: int, width: int, monkeypatch: Patch) -> None:
    """As with kernels that round alike in every place of so many rows only; there are none of three."""
    original = ModelCaller.decode

    def decode(self: Any, ids: mx.array, *given: Any) -> mx.array:
        more = mx.arange(len(ids)) * (len(ids) >= most)
        return original(self, ids, *given) + 1e-6 * more[:, None, None]

    monkeypatch.setattr(ModelCaller, "decode", decode)
    report = probe_model(zoo.text("llama"), reproducible=True)
    failed = ["same bits in every place"] if most == 3 else []
    assert list_failed(report) == failed and report.methods.fixed_width == width
    assert report.methods.decode == ("row_by_row" if failed else "ragged")
    assert all(size < min(width, most) for size in report.methods.narrow_widths)


@pytest.mark.parametrize(
    ("dtype", "gpu", "library"), [("auto", False, False), ("bfloat16", False, True), ("float32", True, True)]
)
def test_only_half_precision_is_compared_by_the_librarys_products(
    zoo: Zoo, dtype: str, gpu: bool, library: bool, monkeypatch: Patch
) -> None:
    """On a CPU; on a GPU all are."""
    monkeypatch.setattr(choose, "uses_gpu", lambda: gpu)
    used: list[Any] = []
    original = choose.use_row_products
    monkeypatch.setattr(choose, "use_row_products", lambda model: used.append(model) or original(model))
    assert list_failed(probe_model(zoo.text("llama"), dtype=dtype)) == [] and bool(used) is library


@pytest.mark.parametrize(("family", "most"), [("llama", 48), ("mamba2", 48), ("qwen3_vl", 62)])
def test_the_checks_take_few_forwards(zoo: Zoo, family: str, most: int, monkeypatch: Patch) -> None:
    """Loading a large model must not take much longer for them: each forward reads all weights."""
    calls: list[int] = []
    for kind in (ModelCaller, VisionModelCaller):
        for name in ("prefill", "decode", "call_library"):
            original = kind.__dict__[name]

            def count(self: Any, ids: Any, *given: Any, own: Any = original) -> mx.array:
                calls.append(len(ids) if isinstance(ids, list) else ids.size)
                return own(self, ids, *given)

            monkeypatch.setattr(kind, name, count)
    probe_model(zoo.vision(family) if family == "qwen3_vl" else zoo.text(family))
    assert 20 < len(calls) <= most and sum(calls) < 8 * most, (len(calls), sum(calls))


def test_nothing_is_copied_for_a_prefix_cache_that_is_off(zoo: Zoo) -> None:
    report = probe_model(zoo.text("llama"), backend="none")
    assert "snapshot" not in {check.name for check in report.checks} and not report.methods.snapshots
