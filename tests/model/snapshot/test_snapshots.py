"""Payloads of the prefix cache: what comes back computes on as if nothing had happened, for every family."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.config.settings import ModelSettings
from mlxrun.errors import ConfigError
from mlxrun.model.adapter import TEXT_ONLY, Adapter, TextAdapter, VisionAdapter, run_trial_forward
from mlxrun.model.compute_methods import ComputeMethods, make_decode_batch
from mlxrun.model.model_info import load_model_info
from mlxrun.model.ragged import attention, layer_caches
from mlxrun.model.ragged.decode_batch import JoiningRow
from mlxrun.model.snapshot.serialize import deserialize_array, serialize_array
from mlxrun.model.snapshot.snapshots import DeltaPayload, SnapshotCodec, StatePayload
from mlxrun.scheduler.payload import SerializedPayload, SerializedTensor
from mlxrun.scheduler.request import HitKind
from mlxrun.scheduler.step_plan import CacheHit
from tests.helpers import text_models, vision_models
from tests.helpers.model_fixtures import Zoo

TOLERANCE = 1e-4
LENGTH = 40
PLACES = (5, 8, 21, 39)  # before, at and past the windows of 8; one token before the end


class Bench:
    """A model, its snapshots, and rows of it."""

    def __init__(self, adapter: Adapter, bits: int | None = None) -> None:
        self.adapter = adapter
        self.snapshots = SnapshotCodec(run_trial_forward(adapter)[0], bits)
        assert self.snapshots.supported

    def fill(self, ids: Sequence[int], cache: list[Any] | None = None, start: int = 0, chunk: int = 7) -> Any:
        """Prefill on; returns cache and the last logits."""
        cache = (
            layer_caches.reserve_capacity(self.adapter.make_cache(), len(ids) + 8) if cache is None else cache
        )
        logits = None
        for first in range(start, len(ids), chunk):
            part = mx.array([list(ids[first : first + chunk])])
            logits = self.adapter.prefill(part, cache, first, TEXT_ONLY)[:, -1]
            mx.eval(layer_caches.list_all_arrays(cache), logits)
        return cache, logits

    def decode(self, cache: list[Any], logits: mx.array, length: int, count: int = 6) -> Any:
        """Greedy answer and all logits on the way."""
        tokens, rows = [], [np.array(logits[0].astype(mx.float32))]
        for step in range(count):
            tokens.append(int(rows[-1].argmax()))
            logits = self.adapter.decode(mx.array([[tokens[-1]]]), cache, [length + step])[:, -1]
            rows.append(np.array(logits[0].astype(mx.float32)))
        return tokens, np.stack(rows)

    def answer(
        self, ids: Sequence[int], cache: list[Any] | None = None, start: int = 0, chunk: int = 7
    ) -> Any:
        cache, logits = self.fill(ids, cache, start, chunk)
        return self.decode(cache, logits, len(ids))

    def save(self, view: layer_caches.RowView, length: int, cuts: Sequence[int] = ()) -> CacheHit:
        """Payloads of a whole row, evaluated; deltas between the cuts."""
        edges = [0, *(c for c in cuts if c < length), length]
        deltas: list[tuple[int, int, Any]] = []
        if self.snapshots.has_deltas:
            spans = list(zip(edges, edges[1:], strict=False))
            deltas = [(a, b, self.snapshots.copy_delta(view, a, b)) for a, b in spans]
        state = self.snapshots.copy_state(view, length) if self.snapshots.has_states else None
        payloads = [p for _, _, p in deltas] + ([] if state is None else [state])
        mx.eval([a for p in payloads for a in self.snapshots.list_arrays(p)])
        return CacheHit(length, HitKind.PREFIX, tuple(deltas), state)

    def restore(self, hit: CacheHit, room: int = LENGTH) -> list[Any]:
        return self.snapshots.restore(hit, room, self.adapter.make_cache())

    def through_bytes(self, hit: CacheHit) -> CacheHit:
        def again(payload: Any) -> Any:
            return self.snapshots.decode(self.snapshots.encode(payload))

        deltas = tuple((a, b, again(p)) for a, b, p in hit.deltas)
        return replace(hit, deltas=deltas, state=None if hit.state is None else again(hit.state))


@pytest.fixture(scope="module")
def benches(zoo: Zoo) -> Iterator[Callable[..., Bench]]:
    made: dict[tuple[str, str, int | None], Bench] = {}

    def bench(family: str, bits: int | None = None, kind: str = "text") -> Bench:
        if (family, kind, bits) not in made:
            made[family, kind, bits] = Bench(adapter(zoo, family, kind), bits)
        return made[family, kind, bits]

    yield bench


def adapter(zoo: Zoo, family: str, kind: str = "text") -> Adapter:
    if kind == "text":
        from mlx_lm import load

        return TextAdapter(routed(load(str(zoo.text(family)))[0]))
    from mlx_vlm import load as load_vision

    return VisionAdapter(routed(load_vision(str(zoo.vision(family)))[0]))


def routed(model: Any) -> Any:
    attention.route_attention(model)
    return model


def same(found: Any, wanted: Any, tolerance: float = TOLERANCE) -> bool:
    return found[0] == wanted[0] and float(np.abs(found[1] - wanted[1]).max()) < tolerance


WAYS = {
    "gemma2": "alone",
    "gpt_bigcode": "alone",
    "deepseek_v3": "grouped",
}  # where the model's own code wants it
FAMILIES = [
    *((f, "text") for f in text_models.TEXT),
    *((f, "vision") for f in vision_models.VISION),
]


@pytest.mark.parametrize(("family", "kind"), FAMILIES)
def test_a_restored_row_computes_on(benches: Callable[..., Bench], family: str, kind: str) -> None:
    """Snapshots at many lengths, in memory and as bytes, restored twice, with other chunks after that."""
    bench = benches(family, kind=kind)
    (ids,) = text_models.prompts(3, [LENGTH])
    wanted = bench.answer(ids)
    for place in PLACES:
        cache, _ = bench.fill(ids[:place])
        hit = bench.save(layer_caches.view_row(cache), place, (4, 16))
        bench.fill(ids, cache, place)  # the row goes on, in place
        for found in (hit, bench.through_bytes(hit)):
            assert same(bench.answer(ids, bench.restore(found), place, 7), wanted), place
        first, second = bench.restore(hit), bench.restore(hit)
        bench.answer(ids[:place] + [1, 2, 3], first, place, 1)
        assert same(bench.answer(ids, second, place, 64), wanted), place
        assert same(bench.answer(ids, bench.restore(hit), place, 1), wanted), place


@pytest.mark.parametrize(("family", "kind"), FAMILIES)
@pytest.mark.parametrize("way", ["ragged", "alone"])
def test_a_row_of_the_decode_batch_is_saved(
    benches: Callable[..., Bench], family: str, kind: str, way: Any
) -> None:
    """Rows among others, past their windows; the batch goes on and loses rows after the copies are made."""
    bench = benches(family, kind=kind)
    way = WAYS.get(family, way) if way == "ragged" else way
    batch = make_decode_batch(bench.adapter.make_cache(), ComputeMethods(way), shortest=8)
    prompts = dict(zip("abc", text_models.prompts(4, [6, 21, 30]), strict=True))
    rows = []
    for rid, ids in prompts.items():
        cache, _ = bench.fill(ids)
        rows.append(JoiningRow(rid, len(ids), cache))
    batch.update(set(prompts), rows)
    lived = {rid: list(ids) for rid, ids in prompts.items()}
    step(bench, batch, lived, 11)
    hits = {}
    for rid in "abc":
        length, view = batch.view_row(rid)
        assert length == len(lived[rid])
        hits[rid] = bench.save(view, length, (4, 16))
    then = {rid: list(ids) for rid, ids in lived.items()}
    step(bench, batch, lived, 2)
    batch.update({"a", "c"}, [])
    step(bench, batch, {rid: lived[rid] for rid in "ac"}, 3)
    loose = 10 * TOLERANCE if family == "deepseek_v3" else TOLERANCE  # decodes by other arithmetic
    for rid, ids in then.items():
        more = [*ids, 7, 8, 9]
        assert same(bench.answer(more, bench.restore(hits[rid]), len(ids)), bench.answer(more), loose), rid


@pytest.mark.parametrize("family", vision_models.VISION)
def test_a_prompt_with_images_is_cut_anywhere(benches: Callable[..., Bench], zoo: Zoo, family: str) -> None:
    """Before, inside and after an image; positions and embeddings are the request's, keys the payloads'."""
    bench = benches(family, kind="vision")
    host = load_model_info(ModelSettings(path=str(zoo.vision(family))))
    prompt = vision_models.prompt(family, "look ", None, " and at ", None, " and tell me")
    made = host.process(prompt, vision_models.images(6, 2))
    inputs = bench.adapter.prepare_inputs(made.ids, made.media)
    ids, (first, *_, last) = list(made.ids), made.spans

    def fill(cache: list[Any], start: int, stop: int) -> mx.array:
        logits = None
        for at in range(start, stop, 5):
            part = mx.array([ids[at : min(at + 5, stop)]])
            logits = bench.adapter.prefill(part, cache, at, inputs)[:, -1]
            mx.eval(logits, layer_caches.list_all_arrays(cache))
        return logits

    def answer(cache: list[Any], start: int) -> Any:
        return bench.decode(cache, fill(cache, start, len(ids)), len(ids) + inputs.position_delta)

    wanted = answer(bench.adapter.make_cache(), 0)
    for place in (first[0] - 1, first[0] + 2, first[1], last[0] + 1, last[1] + 1):
        cache = bench.adapter.make_cache()
        fill(cache, 0, place)
        hit = bench.through_bytes(bench.save(layer_caches.view_row(cache), place, (4, 16)))
        assert same(answer(bench.restore(hit), place), wanted), place


def step(bench: Bench, batch: Any, lived: dict[str, list[int]], count: int) -> None:
    """Feed each row a token of its own, so many times."""
    for number in range(count):
        order = batch.ids
        tokens = {rid: (17 * number + ord(rid)) % 250 for rid in order}
        lengths = batch.lengths

        def call(first: int, rows: int, caches: list[Any], n: Any = (order, tokens, lengths)) -> mx.array:
            ids = mx.array([[n[1][rid]] for rid in n[0][first : first + rows]])
            return bench.adapter.decode(ids, caches, n[2][first : first + rows])

        logits = batch.forward(call)
        mx.eval(logits, batch.state_arrays())
        for rid in order:
            lived[rid].append(tokens[rid])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_a_payload_is_of_the_moment_when_it_was_asked_for(benches: Callable[..., Bench], family: str) -> None:
    """Evaluated only after the row and its group have gone on, it still holds what was there before."""
    bench = benches(family)
    (ids,) = text_models.prompts(3, [21])
    batch = make_decode_batch(bench.adapter.make_cache(), ComputeMethods("ragged"), shortest=8)
    cache = bench.fill(ids)[0]
    batch.update({"a"}, [JoiningRow("a", 21, cache)])
    length, view = batch.view_row("a")
    now = bench.save(view, length)
    delta = bench.snapshots.copy_delta(view, 0, length)
    state = bench.snapshots.copy_state(view, length) if bench.snapshots.has_states else None
    step(bench, batch, {"a": list(ids)}, 5)
    late = replace(now, deltas=((0, length, delta),), state=state)
    for one, other in zip(payload_arrays(bench, late), payload_arrays(bench, now), strict=True):
        assert mx.array_equal(one, other).item()


def payload_arrays(bench: Bench, hit: CacheHit) -> list[mx.array]:
    payloads = [p for *_, p in hit.deltas] + ([] if hit.state is None else [hit.state])
    return [a for p in payloads for a in bench.snapshots.list_arrays(p)]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("copied", [True, False])
def test_rows_that_were_prefilled_together(benches: Callable[..., Bench], family: str, copied: bool) -> None:
    """Padded on the right and split: what is beyond a row's end never gets into a payload."""
    bench = benches(family)
    (ids,) = text_models.prompts(3, [LENGTH])
    cache = bench.adapter.make_cache()
    bench.adapter.prefill(mx.array([ids[:8], [*ids[:5], 0, 0, 0]]), cache, 0, TEXT_ONLY)
    for index, length in enumerate((8, 5)):
        row = layer_caches.split_row(cache, index, length, copied=copied)
        hit = bench.through_bytes(bench.save(layer_caches.view_row(row), length))
        assert same(bench.answer(ids, bench.restore(hit), length), bench.answer(ids)), length


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2", "nemotron_h"])
def test_half_precision_comes_back_bit_by_bit(zoo: Zoo, family: str) -> None:
    made = adapter(zoo, family)
    made.model.set_dtype(mx.bfloat16)
    bench = Bench(made)
    cache, _ = bench.fill(text_models.prompts(3, [21])[0])
    hit = bench.save(layer_caches.view_row(cache), 21, (16,))
    again = bench.restore(bench.through_bytes(hit))
    for one, other in zip(
        layer_caches.list_all_arrays(bench.restore(hit)), layer_caches.list_all_arrays(again), strict=True
    ):
        assert one.dtype == other.dtype and mx.array_equal(one, other).item()
    assert any(a.dtype == mx.bfloat16 for a in layer_caches.list_all_arrays(again))


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "falcon_h1", "lfm2", "gemma3_text"])
def test_a_lost_state_shows(benches: Callable[..., Bench], family: str) -> None:
    """The tests above would see it: zeros for each stack of a state, one by one, change the answer."""
    bench = benches(family)
    (ids,) = text_models.prompts(3, [LENGTH])
    wanted = bench.answer(ids)
    cache, _ = bench.fill(ids[:21])
    hit = bench.save(layer_caches.view_row(cache), 21)
    for lost in range(len(hit.state.stacks)):
        stacks = [(mx.zeros_like(s[0]),) if i == lost else s for i, s in enumerate(hit.state.stacks)]
        twin = replace(hit, state=replace(hit.state, stacks=tuple(stacks)))
        assert not same(bench.answer(ids, bench.restore(twin), 21), wanted), lost


def test_swapped_deltas_and_other_lengths_show(benches: Callable[..., Bench]) -> None:
    bench = benches("llama")
    (ids,) = text_models.prompts(3, [LENGTH])
    wanted = bench.answer(ids)
    cache, _ = bench.fill(ids[:32])
    hit = bench.save(layer_caches.view_row(cache), 32, (8, 16))
    (a, b, one), (c, d, two), last = hit.deltas
    stranger = bench.save(layer_caches.view_row(bench.fill(ids[1:33])[0]), 32, (8, 16)).deltas
    for twin in (((a, b, two), (c, d, two), last), ((a, b, one), stranger[1], last)):
        assert not same(bench.answer(ids, bench.restore(replace(hit, deltas=twin)), 32), wanted)
    short = replace(hit, length=31, deltas=(*hit.deltas[:2], (16, 31, last[2])))
    assert same(bench.answer(ids, bench.restore(short), 31), wanted)  # a payload may hold more than its stop
    assert not same(bench.answer(ids, bench.restore(short), 32), wanted)  # off by one


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
        blob = snapshots.encode(payload)
        assert blob.nbytes == snapshots.nbytes(payload)
        name, tensor = next(iter(blob.tensors.items()))
        rest = {k: v for k, v in blob.tensors.items() if k != name}
        wrong = [
            replace(blob, tensors=rest),
            replace(blob, tensors={**blob.tensors, "more": tensor}),
            replace(blob, tensors={**blob.tensors, name: replace(tensor, dtype="I32")}),
            replace(blob, tensors={**blob.tensors, name: replace(tensor, dtype="X9")}),
            replace(blob, tensors={**blob.tensors, name: replace(tensor, data=tensor.data[:-1])}),
            replace(blob, tensors={**blob.tensors, name: replace(tensor, shape=tensor.shape[::-1])}),
            replace(blob, tensors={**blob.tensors, name: replace(tensor, shape=(-1, -len(tensor.data)))}),
            replace(blob, meta={**blob.meta, "layout": "x"}),
            replace(blob, meta={**blob.meta, "part": "x"}),
            replace(blob, meta={k: v for k, v in blob.meta.items() if k != "tokens"}),
        ]
        if isinstance(payload, DeltaPayload):
            wrong.append(replace(blob, meta={**blob.meta, "tokens": "11"}))
        for twin in wrong:
            with pytest.raises(ValueError):
                snapshots.decode(twin)
    with pytest.raises(ValueError):
        snapshots.decode(SerializedPayload({}, {}))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32, mx.uint32, mx.bool_, mx.int8])
def test_every_dtype_survives_as_bytes(dtype: mx.Dtype) -> None:
    array = mx.array([[0, 1, 3], [250, 7, 1]]).astype(dtype)
    again = deserialize_array(serialize_array(array))
    assert again.dtype == array.dtype and mx.array_equal(again, array).item()
    empty = deserialize_array(SerializedTensor("F32", (0, 3), b""))
    assert empty.shape == (0, 3)


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "qwen3_next", "mamba2", "gpt_bigcode", "deepseek_v3"]
)
def test_a_payload_pins_nothing(
    benches: Callable[..., Bench], family: str, request: pytest.FixtureRequest
) -> None:
    """When the row is gone, what is left in memory is the payload, and then nothing."""
    bench = benches(family)
    (ids,) = text_models.prompts(3, [300])
    limit = mx.set_cache_limit(0)  # a buffer that is used again may be larger than what is asked for
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
    """A18: sizes come from shapes."""
    bench = benches("llama")
    cache, _ = bench.fill(text_models.prompts(3, [32])[0])
    before = mx.get_active_memory()
    payload = bench.snapshots.copy_delta(layer_caches.view_row(cache), 0, 32)
    assert bench.snapshots.nbytes(payload) == bench.snapshots.count_min_bytes(32) == 3 * 2 * 2 * 16 * 32 * 4
    assert bench.snapshots.is_usable(payload, 32)
    assert mx.get_active_memory() == before


def test_a_restored_row_has_room(benches: Callable[..., Bench]) -> None:
    bench = benches("llama")
    (ids,) = text_models.prompts(3, [30])
    cache, _ = bench.fill(ids)
    again = bench.restore(bench.save(layer_caches.view_row(cache), 30, (16,)), 700)
    assert {leaf.keys.shape[2] for leaf in again} == {768}
    bench.fill(ids * 20, again, 30, 200)
    assert {leaf.keys.shape[2] for leaf in again} == {768}


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3_next", "deepseek_v3"])
def test_quantised_storage(benches: Callable[..., Bench], family: str, bits: int) -> None:
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
    delta, whole = hit.deltas[0][2], plain.deltas[0][2]
    assert bench.snapshots.nbytes(delta) < exact.snapshots.nbytes(whole) * (0.32 if bits == 8 else 0.2)
    restored = bench.through_bytes(hit)
    for one, other in zip(
        layer_caches.list_all_arrays(bench.restore(restored)),
        layer_caches.list_all_arrays(exact.restore(plain)),
        strict=True,
    ):
        off = mx.abs(one - other).max() / mx.abs(other).max()
        assert off.item() < (0.01 if bits == 8 else 0.12)
    assert not exact.snapshots.is_usable(delta, 16)
    assert not bench.snapshots.is_usable(whole, 16)
    with pytest.raises(ValueError):
        exact.snapshots.decode(bench.snapshots.encode(delta))


class Other:
    """A llama with caches of other classes."""

    def __init__(self, inner: Adapter, make: Callable[[], Any]) -> None:
        self.model, self.inputs, self.prefill = inner.model, inner.prepare_inputs, inner.prefill
        self.decode, self._inner, self._make = inner.decode, inner, make

    def make_cache(self) -> list[Any]:
        return [self._make() for _ in self._inner.make_cache()]


def others() -> list[Any]:
    from mlx_lm.models import cache as lm
    from mlx_vlm.models import cache as vlm

    made: list[Any] = []
    for name, library in (("lm", lm), ("vlm", vlm)):
        made += [
            pytest.param(lambda c=library: c.RotatingKVCache(max_size=8, keep=2), id=f"{name} keep"),
            pytest.param(lambda c=library: c.ConcatenateKVCache(), id=f"{name} concatenate"),
            pytest.param(lambda c=library: c.ChunkedKVCache(64), id=f"{name} chunked"),
        ]
    return made


@pytest.mark.parametrize("make", others())
def test_other_classes_are_kept_whole(zoo: Zoo, make: Callable[[], Any]) -> None:
    """A13: through the class's own state and from_state; a class that forgets something is found out."""
    made = Other(adapter(zoo, "llama"), make)
    snapshots = SnapshotCodec(run_trial_forward(made)[0])
    if not snapshots.supported:
        pytest.fail(str(snapshots.problem))
    bench = Bench(made)
    assert not bench.snapshots.has_deltas and bench.snapshots.has_states
    (ids,) = text_models.prompts(3, [LENGTH])
    for place in PLACES:
        cache, _ = bench.fill(ids[:place])
        hit = bench.save(layer_caches.view_row(cache), place)
        wanted = bench.answer(ids, cache, place)  # with the same cuts: kept first tokens depend on them
        bench.answer(ids, bench.restore(hit), place, 1)
        assert same(bench.answer(ids, bench.restore(bench.through_bytes(hit)), place), wanted), place


def test_a_class_that_forgets_turns_the_cache_off(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    from mlx_lm.models.cache import ConcatenateKVCache

    class Forgetful(ConcatenateKVCache):
        def __init__(self) -> None:
            super().__init__()
            self.note = mx.array([1])

    snapshots = SnapshotCodec(run_trial_forward(Other(adapter(zoo, "llama"), Forgetful))[0])
    assert not snapshots.supported and "Forgetful" in caplog.text
    assert not snapshots.is_usable(StatePayload(3, ()), 0)
    with pytest.raises(ValueError):
        snapshots.restore(CacheHit(3, HitKind.PREFIX), 8, [])


def test_the_fingerprint_tells_models_apart(benches: Callable[..., Bench]) -> None:
    told = [tuple(benches(f).snapshots.describe()) for f in ("llama", "gemma3_text", "qwen3_next", "mamba2")]
    told.append(tuple(benches("llama", 8).snapshots.describe()))
    assert len(set(told)) == 5
    assert told[0] == tuple(benches("qwen3").snapshots.describe())  # weights are the caller's business


def test_no_bits_for_small_heads(zoo: Zoo) -> None:
    """A19: said when the cache is made, by the name of the setting."""
    with pytest.raises(ConfigError, match="cache.stored_bits"):
        SnapshotCodec(run_trial_forward(adapter(zoo, "gpt_bigcode"))[0], 4)
