"""Payloads of the prefix cache: what is refused, their bytes, their size and the fingerprint."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace

import mlx.core as mx
import pytest

from mlxrun.core.errors import ConfigError
from mlxrun.core.step_plan import SerializedPayload
from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.kv.snapshot.snapshots import DeltaPayload, SnapshotCodec
from mlxrun.model.run.model_caller import run_trial_forward
from tests.helpers import text_models
from tests.helpers.model_fixtures import Zoo
from tests.helpers.snapshot_bench import LENGTH, Bench, caller


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_what_does_not_fit_is_refused(benches: Callable[..., Bench], family: str) -> None:
    bench, other = benches(family), benches("mamba2")
    (ids,) = text_models.prompts(3, [LENGTH])
    cache, _ = bench.fill(ids[:21])
    view = layer_caches.view_row(cache)
    hit = bench.save(view, 21, (8,))
    foreign, _ = other.fill(ids[:21])
    stranger = other.snapshots.copy_state(layer_caches.view_row(foreign), 21)
    (a, b, one), (c, d, two) = hit.deltas
    doubled = DeltaPayload(one.tokens, tuple((mx.concatenate([s[0], s[0]]),) for s in one.stacks))
    wrong = [
        replace(hit, length=20),
        replace(hit, length=22),
        replace(hit, deltas=hit.deltas[:1]),
        replace(hit, deltas=hit.deltas[::-1]),
        replace(hit, deltas=()),
        replace(hit, deltas=((a, b + 1, one), (c + 1, d, two))),
        replace(hit, deltas=((a, b, doubled), (c, d, two))),
        replace(hit, deltas=((a, b, None), (c, d, two))),
        replace(hit, state=None if bench.snapshots.has_states else stranger),
        replace(hit, state=stranger),
    ]
    for twin in wrong:
        with pytest.raises(ValueError):
            bench.restore(twin)
    with pytest.raises(ValueError):
        bench.snapshots.copy_delta(view, 8, 22)
    with pytest.raises(ValueError):
        bench.snapshots.copy_state(view, 22)
    with pytest.raises(ValueError):
        bench.snapshots.copy_delta(layer_caches.view_row(foreign), 0, 8)
    assert bench.snapshots.is_usable(one, 8) and not bench.snapshots.is_usable(one, 9)
    assert not bench.snapshots.is_usable(doubled, 8)
    assert not bench.snapshots.is_usable(stranger, 0)
    if bench.snapshots.has_states:
        assert bench.snapshots.is_usable(hit.state, 0)
        lying = replace(hit.state, length=7)
        assert family != "gemma3_text" or not bench.snapshots.is_usable(lying, 0)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_bytes_that_are_not_a_payload_are_refused(benches: Callable[..., Bench], family: str) -> None:
    bench = benches(family)
    cache, _ = bench.fill(text_models.prompts(3, [12])[0])
    snapshots = bench.snapshots
    hit = bench.save(layer_caches.view_row(cache), 12)
    payloads = [p for p in (hit.deltas[0][2], hit.state) if p is not None]
    for payload in payloads:
        payload_ = snapshots.encode(payload)
        assert payload_.nbytes == snapshots.nbytes(payload)
        name, tensor = next(iter(payload_.tensors.items()))
        rest = {k: v for k, v in payload_.tensors.items() if k != name}
        wrong = [
            replace(payload_, tensors=rest),
            replace(payload_, tensors={**payload_.tensors, "more": tensor}),
            replace(payload_, tensors={**payload_.tensors, name: replace(tensor, dtype="I32")}),
            replace(payload_, tensors={**payload_.tensors, name: replace(tensor, dtype="X9")}),
            replace(payload_, tensors={**payload_.tensors, name: replace(tensor, data=tensor.data[:-1])}),
            replace(payload_, tensors={**payload_.tensors, name: replace(tensor, shape=tensor.shape[::-1])}),
            replace(
                payload_, tensors={**payload_.tensors, name: replace(tensor, shape=(-1, -len(tensor.data)))}
            ),
            replace(payload_, meta={**payload_.meta, "layout": "x"}),
            replace(payload_, meta={**payload_.meta, "part": "x"}),
            replace(payload_, meta={k: v for k, v in payload_.meta.items() if k != "tokens"}),
        ]
        if isinstance(payload, DeltaPayload):
            wrong.append(replace(payload_, meta={**payload_.meta, "tokens": "11"}))
        for twin in wrong:
            with pytest.raises(ValueError):
                snapshots.decode(twin)
    with pytest.raises(ValueError):
        snapshots.decode(SerializedPayload({}, {}))


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "qwen3_next", "mamba2", "gpt_bigcode", "deepseek_v3"]
)
def test_a_payload_pins_nothing(
    benches: Callable[..., Bench], family: str, request: pytest.FixtureRequest
) -> None:
    """When the row is gone, what is left in memory is the payload, and then nothing."""
    bench = benches(family)
    (ids,) = text_models.prompts(3, [300])
    limit = mx.set_cache_limit(0)  # a buffer that is used again may be larger than requested
    request.addfinalizer(lambda: mx.set_cache_limit(limit))
    bench.fill(ids, chunk=100)
    gc.collect()
    before = mx.get_active_memory()
    cache = bench.fill(ids, chunk=100)[0]
    hit = bench.save(layer_caches.view_row(cache), 300)
    parts = [p for *_, p in hit.deltas] + ([hit.state] if hit.state else [])
    size = sum(bench.snapshots.nbytes(p) for p in parts)
    del cache
    gc.collect()
    assert mx.get_active_memory() - before <= size + 4096 * sum(
        len(bench.snapshots.list_arrays(p)) for p in parts
    )
    del hit, parts
    gc.collect()
    assert mx.get_active_memory() <= before + 1024


def test_estimates_evaluate_nothing(benches: Callable[..., Bench]) -> None:
    """Sizes come from shapes."""
    bench = benches("llama")
    cache, _ = bench.fill(text_models.prompts(3, [32])[0])
    before = mx.get_active_memory()
    payload = bench.snapshots.copy_delta(layer_caches.view_row(cache), 0, 32)
    assert bench.snapshots.nbytes(payload) == bench.snapshots.count_min_bytes(32) == 3 * 2 * 2 * 16 * 32 * 4
    assert bench.snapshots.is_usable(payload, 32)
    assert mx.get_active_memory() == before


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3_next", "deepseek_v3"])
def test_quantized_storage(benches: Callable[..., Bench], family: str, bits: int) -> None:
    """Smaller, close, still states exact; what it makes is never taken for exact payloads."""
    exact = benches(family)
    try:
        bench = benches(family, bits)
    except ConfigError as error:
        assert family == "deepseek_v3" and "cache.stored_bits" in str(error)
        return
    (ids,) = text_models.prompts(3, [LENGTH])
    cache, _ = bench.fill(ids[:32])
    hit, plain = (b.save(layer_caches.view_row(cache), 32, (16,)) for b in (bench, exact))
    delta, unquantized = hit.deltas[0][2], plain.deltas[0][2]
    assert bench.snapshots.nbytes(delta) < exact.snapshots.nbytes(unquantized) * (0.32 if bits == 8 else 0.2)
    restored = bench.through_bytes(hit)
    for one, other in zip(
        layer_caches.list_all_arrays(bench.restore(restored)),
        layer_caches.list_all_arrays(exact.restore(plain)),
        strict=True,
    ):
        off = mx.abs(one - other).max() / mx.abs(other).max()
        assert off.item() < (0.01 if bits == 8 else 0.12)
    assert not exact.snapshots.is_usable(delta, 16)
    assert not bench.snapshots.is_usable(unquantized, 16)
    with pytest.raises(ValueError):
        exact.snapshots.decode(bench.snapshots.encode(delta))


def test_the_fingerprint_tells_models_apart(benches: Callable[..., Bench]) -> None:
    described = [
        tuple(benches(f).snapshots.describe()) for f in ("llama", "gemma3_text", "qwen3_next", "mamba2")
    ]
    described.append(tuple(benches("llama", 8).snapshots.describe()))
    assert len(set(described)) == 5
    assert described[0] == tuple(benches("qwen3").snapshots.describe())  # weights are the caller's business


def test_no_bits_for_small_heads(zoo: Zoo) -> None:
    """Said when the cache is made, by the name of the setting."""
    with pytest.raises(ConfigError, match="cache.stored_bits"):
        SnapshotCodec(run_trial_forward(caller(zoo, "gpt_bigcode"))[0], 4)
