"""The load check finds each broken way of computing, and the engine falls back to a right one.

Every test breaks one way for good, before the engine is built: what runs afterwards must be the ORACLE's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxrun.engine.engine import Engine
from mlxrun.model.hooks import attention, engine_attention
from mlxrun.model.kv.ragged import decode_batch, layer_caches, recurrent_states, row_group
from mlxrun.model.load.loader import load_caller
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.load_check import reference, rounding
from mlxrun.model.load_check.choose import choose_methods
from mlxrun.model.load_check.report import LoadCheck
from mlxrun.model.load_check.text_ladder import RefusedModelError
from mlxrun.model.machine.device import resolve_config
from mlxrun.model.run.chunk_grouping import PrefillSharing
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.run.model_caller import ModelCaller, run_trial_forward
from mlxrun.model.run.runner import ModelRunner
from tests.helpers import engine_driver, text_models, vision_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.model_fixtures import Zoo

Patch = pytest.MonkeyPatch
LENGTHS = (1, 5, 9, 9, 14, 33, 60)
LONG = ("prefill chunks at 518 tokens", "decode ragged at 518 tokens")


def right(zoo: Zoo, family: str, engine: Engine) -> None:
    """Requests of many lengths, joining at different steps, give what the ORACLE gives."""
    prompts = text_models.prompts(0, LENGTHS)
    asks = [
        TimedRequest(engine_driver.make_text_request(str(i), p, max_tokens=16), 2 * (i % 4))
        for i, p in enumerate(prompts)
    ]
    events = engine_driver.run_requests(engine, asks)
    for i, prompt in enumerate(prompts):
        engine_driver.check_answer(events[str(i)], zoo.answer(family, prompt), 16)


def checks(engine: Engine) -> dict[str, LoadCheck]:
    assert engine.load_check is not None
    return {check.name: check for check in engine.load_check.checks}


def methods(engine: Engine) -> ComputeMethods:
    assert engine.load_check is not None
    return engine.load_check.methods


# -- what can be broken -------------------------------------------------------------------------------------


def ragged_masks_dropped(monkeypatch: Patch) -> None:
    original = attention.RaggedKeys.attend

    def attend(self: Any, queries: mx.array, scale: float, mask: Any, **more: Any) -> mx.array:
        with monkeypatch.context() as inner:
            inner.setattr(row_group.RowGroup, "make_mask", lambda self, width, window: None)
            return original(self, queries, scale, mask, **more)

    monkeypatch.setattr(attention.RaggedKeys, "attend", attend)


def ragged_queries_of_the_first_group(monkeypatch: Patch) -> None:
    """Every group attends with the queries of the first: only a batch of several groups shows it."""

    def attend(self: Any, queries: mx.array, scale: float, mask: Any, **more: Any) -> mx.array:
        window = None if mask is None else mask.window
        outputs = []
        for rows_, (keys, values) in zip(self._groups, self._pairs, strict=True):
            allowed = rows_.make_mask(keys.shape[2], window)
            part = queries[: len(rows_.ids)]
            outputs.append(
                mx.fast.scaled_dot_product_attention(part, keys, values, scale=scale, mask=allowed, **more)
            )
        return mx.concatenate(outputs, axis=0)

    monkeypatch.setattr(attention.RaggedKeys, "attend", attend)


def ragged_gives_nan(monkeypatch: Patch) -> None:
    original = attention.RaggedKeys.attend
    monkeypatch.setattr(
        attention.RaggedKeys, "attend", lambda self, *given, **more: original(self, *given, **more) * mx.nan
    )


def ragged_raises(monkeypatch: Patch) -> None:
    def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
        raise IndexError("Slice indices must be integers")

    monkeypatch.setattr(attention.RaggedCache, "update_and_fetch", update_and_fetch)


def offsets_one_short(*stand_ins: Any) -> Callable[[Patch], None]:
    def plant(monkeypatch: Patch) -> None:
        for stand_in in stand_ins:
            original = stand_in.begin_step
            monkeypatch.setattr(
                stand_in,
                "begin_step",
                lambda self, groups, offsets, longest, original=original: original(
                    self, groups, offsets - 1, longest
                ),
            )

    return plant


def all_masks_dropped(monkeypatch: Patch) -> None:
    monkeypatch.setattr(row_group.RowGroup, "make_mask", lambda self, width, window: None)


def states_not_reordered(monkeypatch: Patch) -> None:
    def keep_order(parts: Sequence[mx.array | None], order: mx.array) -> mx.array | None:
        filled = [p for p in parts if p is not None]
        return mx.concatenate(filled, axis=0)[: order.size] if filled else None

    monkeypatch.setattr(recurrent_states, "reorder_state", keep_order)


def moved_rows_lose_a_token(monkeypatch: Patch) -> None:
    """A row that outgrows its group loses its oldest key."""
    original = row_group.KVBuffer.copy_row

    def row(self: Any, index: int, width: int) -> Any:
        part = original(self, index, width)
        return part._replace(keys=mx.roll(part.keys, 1, axis=2))

    monkeypatch.setattr(row_group.KVBuffer, "copy_row", row)


BROKEN = {
    "ragged masks": ("llama", ragged_masks_dropped, "grouped"),
    "ragged masks, window": ("gemma3_text", ragged_masks_dropped, "grouped"),
    "ragged queries": ("llama", ragged_queries_of_the_first_group, "grouped"),
    "ragged nan": ("gpt_oss", ragged_gives_nan, "grouped"),
    "ragged raises": ("qwen3_next", ragged_raises, "grouped"),
    "ragged offsets": ("llama", offsets_one_short(attention.RaggedCache), "grouped"),
    "all offsets": ("llama", offsets_one_short(attention.RaggedCache, attention.GroupCache), "row_by_row"),
    "all masks": ("gpt_oss", all_masks_dropped, "row_by_row"),
    "states": ("mamba2", states_not_reordered, "row_by_row"),
    "states beside keys": ("qwen3_next", states_not_reordered, "row_by_row"),
    "moved rows": ("llama", moved_rows_lose_a_token, "row_by_row"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_way_of_decoding_is_not_used(
    zoo: Zoo, case: str, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    family, plant, chosen = BROKEN[case]
    engine_driver.use_small_groups(monkeypatch)
    plant(monkeypatch)
    with caplog.at_level(logging.WARNING, logger="mlxrun.model.load_check.choose"):
        engine = engine_driver.make_real_engine(zoo.text(family))
    assert methods(engine).decode == chosen
    found = checks(engine)
    assert not found["decode ragged"].passed
    assert found["decode grouped"].passed is (chosen == "grouped")
    assert "decode ragged is not used for this model" in caplog.text
    if case == "ragged raises":
        assert found["decode ragged"].error == "IndexError: Slice indices must be integers"
    right(zoo, family, engine)


@pytest.mark.parametrize("case", ["ragged queries", "moved rows", "states", "all masks"])
def test_what_the_probe_finds_would_have_been_wrong(zoo: Zoo, case: str, monkeypatch: Patch) -> None:
    """The twin: with `engine.load_check` off the same defects reach the answers."""
    family, plant, _ = BROKEN[case]
    engine_driver.use_small_groups(monkeypatch)
    plant(monkeypatch)
    engine = engine_driver.make_real_engine(zoo.text(family), load_check=False)
    assert methods(engine).decode == "ragged"
    assert checks(engine) == {}
    with pytest.raises(AssertionError):
        right(zoo, family, engine)


# -- the last resorts ---------------------------------------------------------------------------------------


def attention_scaled(monkeypatch: Patch) -> None:
    """Attention of the engine's own forwards, of prompts and of rows, is 20 % too sharp."""
    original = engine_attention.attend_plain

    def attend(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any, **more: Any) -> mx.array:
        return original(q, k, v, 1.2 * scale, mask, **more)

    monkeypatch.setattr(engine_attention, "attend_plain", attend)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_wrong_attention_is_replaced_by_the_librarys(zoo: Zoo, family: str, monkeypatch: Patch) -> None:
    """Nothing else gets slower for it; a fallback that used that attention would fail its own check."""
    attention_scaled(monkeypatch)
    engine = engine_driver.make_real_engine(zoo.text(family))
    assert (methods(engine).attention, methods(engine).decode) == ("library", "ragged")
    assert not checks(engine)["prefill whole"].passed
    assert checks(engine)["decode ragged, library attention"].passed
    right(zoo, family, engine)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_wrong_attention_is_found_in_half_precision(zoo: Zoo, dtype: str, monkeypatch: Patch) -> None:
    """The tolerance is no measure of the engine's own rounding, which the fault would raise."""
    attention_scaled(monkeypatch)
    engine = engine_driver.make_real_engine(zoo.text("llama"), dtype=dtype)
    assert methods(engine).attention == "library"


def test_unchecked_it_would_be_wrong(zoo: Zoo, monkeypatch: Patch) -> None:
    attention_scaled(monkeypatch)
    engine = engine_driver.make_real_engine(zoo.text("llama"), load_check=False)
    with pytest.raises(AssertionError):
        right(zoo, "llama", engine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_that_no_way_computes_is_refused_by_name(zoo: Zoo, dtype: str, monkeypatch: Patch) -> None:
    """Whatever the engine calls gives the logits of other tokens."""
    original = ModelCaller.prefill

    def prefill(self: Any, ids: mx.array, *given: Any) -> mx.array:
        return original(self, mx.where(ids > 2, ids ^ 1, ids), *given)  # those of the trial are kept

    monkeypatch.setattr(ModelCaller, "prefill", prefill)
    with pytest.raises(RefusedModelError, match="model is refused: .*prefill whole.*logits differ") as found:
        engine_driver.make_real_engine(zoo.text("llama"), dtype=dtype)
    assert [c.name for c in found.value.checks if "library attention" in c.name and not c.passed]


def test_rows_that_cannot_be_decoded_even_one_by_one_refuse_the_model(zoo: Zoo, monkeypatch: Patch) -> None:
    original = ModelCaller.decode

    def decode(self: Any, ids: mx.array, *given: Any) -> mx.array:
        return original(self, ids ^ 1, *given)

    monkeypatch.setattr(ModelCaller, "decode", decode)
    with pytest.raises(RefusedModelError):
        engine_driver.make_real_engine(zoo.text("llama"))


HALF = ["ragged masks", "ragged queries", "ragged offsets", "all offsets", "states", "moved rows"]


@pytest.mark.parametrize("case", HALF)
def test_defects_are_found_in_half_precision_too(zoo: Zoo, case: str, monkeypatch: Patch) -> None:
    """There the tolerance follows the model's own rounding, and stays far below what a defect does."""
    family, plant, chosen = BROKEN[case]
    engine_driver.use_small_groups(monkeypatch)
    plant(monkeypatch)
    engine = engine_driver.make_real_engine(zoo.text(family), dtype="bfloat16")
    assert methods(engine).decode == chosen
    limit = checks(engine)["decode ragged"].limit
    assert limit is not None and limit <= rounding.MOST_WORST[mx.bfloat16]


def test_the_tolerance_is_fixed_in_float32(zoo: Zoo) -> None:
    assert {check.limit for check in checks(engine_driver.make_real_engine(zoo.text("llama"))).values()} == {
        rounding.TOLERANCE[mx.float32]
    }


@pytest.mark.parametrize(("noise", "limit"), [(0.0, 5e-3), (0.02, 0.04), (9.0, 0.1)])
def test_the_tolerance_where_a_gpu_shortens_float32(
    zoo: Zoo, noise: float, limit: float, monkeypatch: Patch
) -> None:
    """Products in TF32 differ by more than float32 earns; a GPU that computes in full keeps the fixed one."""
    monkeypatch.setattr(reference, "may_shorten_float32", lambda: True)
    original = reference.compare_logits
    monkeypatch.setattr(reference.Reference, "compute_by_token", lambda self: {})
    monkeypatch.setattr(reference, "compare_logits", lambda a, b: original(a, b) if a else noise)
    assert checks(engine_driver.make_real_engine(zoo.text("llama")))["decode ragged"].limit == limit


def test_rounding_of_quantized_layers_in_half_precision(zoo: Zoo) -> None:
    """Attention of a CPU rounds otherwise than the library's, and each quantized layer adds to that."""
    config = resolve_config(engine_driver.make_config(zoo.text("llama"), dtype="bfloat16"))
    caller = load_caller(config, load_model_info(config.model, weights=True))
    nn.quantize(caller.model, group_size=32, bits=4)
    _, vocab = run_trial_forward(caller)
    found = choose_methods(caller, vocab, config)
    assert all(check.passed for check in found.checks)
    assert (found.methods.decode, found.methods.snapshots) == ("ragged", True)


# -- prefill ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_rows_of_a_shared_forward_that_differ(zoo: Zoo, family: str, index: int, monkeypatch: Patch) -> None:
    """A shared forward that gives every row what one of them should have is not shared again."""
    original = layer_caches.split_row
    monkeypatch.setattr(
        layer_caches,
        "split_row",
        lambda cache, row, length: original(cache, min(index, batch_of(cache) - 1), length),
    )
    engine = engine_driver.make_real_engine(zoo.text(family))
    assert not checks(engine)["prefill equal lengths"].passed
    assert methods(engine).sharing.max_rows == 1
    right(zoo, family, engine)


def batch_of(cache: Sequence[Any]) -> int:
    return layer_caches.list_all_arrays(cache)[0].shape[0]


def test_padding_that_a_row_keeps(zoo: Zoo, monkeypatch: Patch) -> None:
    """Padding stays in the cache: equal lengths may still share."""
    original = layer_caches.split_row

    def split(cache: Any, index: int, length: int) -> Any:
        longest = max(c.offset for c in layer_caches.flatten_caches(cache))
        return original(cache, index, longest)

    monkeypatch.setattr(layer_caches, "split_row", split)
    engine = engine_driver.make_real_engine(zoo.text("llama"))
    found = checks(engine)
    assert found["prefill equal lengths"].passed and not found["prefill padded"].passed
    assert methods(engine).sharing == PrefillSharing(16, 0, tails=True)
    right(zoo, "llama", engine)


def test_tails_that_are_stacked_in_another_order(zoo: Zoo, monkeypatch: Patch) -> None:
    original = layer_caches.stack_rows
    monkeypatch.setattr(layer_caches, "stack_rows", lambda rows, tokens: original(rows[::-1], tokens))
    engine = engine_driver.make_real_engine(zoo.text("llama"))
    assert not checks(engine)["prefill tails"].passed
    assert methods(engine).sharing == PrefillSharing(16, 16)


@pytest.mark.parametrize(
    "family", ["nemotron_h", "mamba2", "qwen3_next", pytest.param("lfm2", marks=pytest.mark.slow)]
)
def test_recurrent_families_are_not_padded(zoo: Zoo, family: str) -> None:
    """Nemotron_h is wrong under padding by nats; no family with recurrent state is tried."""
    engine = engine_driver.make_real_engine(zoo.text(family))
    assert "prefill padded" not in checks(engine)
    assert methods(engine).sharing == PrefillSharing(16, 0, tails=True)
    right(zoo, family, engine)


def test_one_row_a_forward_needs_no_prefill_checks(zoo: Zoo) -> None:
    engine = engine_driver.make_real_engine(zoo.text("llama"), prefill_rows=1)
    assert set(checks(engine)) == {"prefill chunks", "decode ragged", *LONG, "snapshot"}
    assert methods(engine).sharing.max_rows == 1


# -- what it reports ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", text_models.CORE)
def test_a_sound_model_passes_by_far(zoo: Zoo, family: str) -> None:
    engine = engine_driver.make_real_engine(zoo.text(family))
    for check in checks(engine).values():
        assert check.passed and check.error is None
        assert check.difference is not None and check.difference < 0.1 * rounding.TOLERANCE[mx.float32]


@pytest.mark.parametrize("family", vision_models.CORE)
def test_a_vision_model_is_probed_too(zoo: Zoo, family: str, monkeypatch: Patch) -> None:
    """Also the positions that its caller gives, where the model takes them."""
    engine = engine_driver.make_real_engine(zoo.vision(family))
    names = {"prefill chunks", "decode ragged", "prefill equal lengths", "prefill padded", "snapshot"}
    names |= {"image again", "image alone", "image chunks", "image features", "image among text"}
    windows = family == "gemma3"
    long = {f"{name} at 13 tokens" for name in ("prefill chunks", "decode ragged", "snapshot")}
    assert set(checks(engine)) == names | (long if windows else {"prefill tails", *LONG})
    assert all(check.passed for check in checks(engine).values())
    ragged_masks_dropped(monkeypatch)
    assert methods(engine_driver.make_real_engine(zoo.vision(family))).decode == "grouped"


def test_a_model_that_takes_no_offsets_runs_alone(zoo: Zoo) -> None:
    """Gpt_bigcode computes positions from a Python int."""
    engine = engine_driver.make_real_engine(zoo.text("gpt_bigcode"))
    assert methods(engine).decode == "row_by_row"
    decoding = {name: check for name, check in checks(engine).items() if name.startswith("decode")}
    assert all(bool(check.error) is ("row_by_row" not in name) for name, check in decoding.items())
    right(zoo, "gpt_bigcode", engine)


def test_unknown_cache_classes_run_alone(zoo: Zoo, monkeypatch: Patch) -> None:
    """A subclass may mean something else by the same fields."""
    from mlx_lm.models.cache import KVCache

    class Special(KVCache):
        pass

    monkeypatch.setattr(ModelCaller, "make_cache", lambda self: [Special() for _ in self.model.layers])
    engine = engine_driver.make_real_engine(zoo.text("llama"))
    assert methods(engine) == ComputeMethods("row_by_row")
    assert set(checks(engine)) == {"prefill chunks", "decode row_by_row", "snapshot"}
    assert engine.load_check is not None and "only the library can fill" in engine.load_check.long_rows
    right(zoo, "llama", engine)


def test_the_probe_leaves_nothing_in_the_engine(zoo: Zoo, monkeypatch: Patch) -> None:
    """The runner starts empty, with the methods that the load check chose."""
    engine = engine_driver.make_real_engine(zoo.text("qwen3_next"))
    runner: ModelRunner = engine_driver.get_runner(engine)
    assert runner._methods is methods(engine)
    batch = runner._decoder.batch
    assert isinstance(batch, decode_batch.DecodeBatch) and batch.groups == [] and not runner._rows
    assert batch.ids == batch.list_state_arrays() == []
