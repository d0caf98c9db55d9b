"""Payloads of the prefix cache: what comes back computes on as if nothing had happened, for every family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.config.settings import ModelSettings
from mlxrun.core.step_plan import CacheHit
from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.kv.ragged.decode_batch import JoiningRow
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.run.compute_methods import ComputeMethods, make_decode_batch
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from tests.helpers import text_models, vision_models
from tests.helpers.model_fixtures import Zoo, mark_sweep
from tests.helpers.snapshot_bench import LENGTH, PLACES, TOLERANCE, Bench, caller, same

WAYS = {
    "gemma2": "row_by_row",
    "gpt_bigcode": "row_by_row",
    "deepseek_v3": "grouped",
}  # where the model's own code wants it
KINDS = [*((f, "text") for f in (*text_models.CORE, "deepseek_v3", "gemma2")), ("qwen3_vl", "vision")]
FAMILIES = mark_sweep(
    [*((f, "text") for f in text_models.TEXT), *((f, "vision") for f in vision_models.VISION)], KINDS
)


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
@pytest.mark.parametrize("way", ["ragged", "row_by_row"])
def test_a_row_of_the_decode_batch_is_saved(
    benches: Callable[..., Bench], family: str, kind: str, way: Any
) -> None:
    """Rows among others, past their windows; the batch goes on and loses rows after the copies are made."""
    bench = benches(family, kind=kind)
    way = WAYS.get(family, way) if way == "ragged" else way
    batch = make_decode_batch(bench.caller.make_cache(), ComputeMethods(way), shortest=8)
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


@pytest.mark.parametrize("family", mark_sweep(vision_models.VISION, vision_models.CORE))
def test_a_prompt_with_images_is_cut_anywhere(benches: Callable[..., Bench], zoo: Zoo, family: str) -> None:
    """Before, inside and after an image; positions and embeddings are the request's, keys the payloads'."""
    bench = benches(family, kind="vision")
    host = load_model_info(ModelSettings(path=str(zoo.vision(family))))
    prompt = vision_models.prompt(family, "look ", None, " and at ", None, " and tell me")
    made = host.process(prompt, vision_models.images(6, 2))
    inputs = bench.caller.encode_images(bench.caller.prepare_inputs(made.ids, made.media), len(made.ids))
    ids, (first, *_, last) = list(made.ids), made.image_spans

    def fill(cache: list[Any], start: int, stop: int) -> mx.array:
        logits = None
        for at in range(start, stop, 5):
            part = mx.array([ids[at : min(at + 5, stop)]])
            logits = bench.caller.prefill(part, cache, at, inputs)[:, -1]
            mx.eval(logits, layer_caches.list_all_arrays(cache))
        return logits

    def answer(cache: list[Any], start: int) -> Any:
        return bench.decode(cache, fill(cache, start, len(ids)), len(ids) + inputs.position_delta)

    wanted = answer(bench.caller.make_cache(), 0)
    for place in (first[0] - 1, first[0] + 2, first[1], last[0] + 1, last[1] + 1):
        cache = bench.caller.make_cache()
        fill(cache, 0, place)
        hit = bench.through_bytes(bench.save(layer_caches.view_row(cache), place, (4, 16)))
        assert same(answer(bench.restore(hit), place), wanted), place


def step(bench: Bench, batch: Any, lived: dict[str, list[int]], count: int) -> None:
    """Feed each row a token of its own, so many times."""
    for number in range(count):
        order = batch.ids
        tokens = {rid: (17 * number + ord(rid)) % 250 for rid in order}
        ids = mx.array([tokens[rid] for rid in order])
        logits = batch.forward(bench.caller.decode, ids, batch.lengths)
        mx.eval(logits, batch.list_state_arrays())
        for rid in order:
            lived[rid].append(tokens[rid])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_a_payload_is_of_the_moment_when_it_was_asked_for(benches: Callable[..., Bench], family: str) -> None:
    """Evaluated only after the row and its group have gone on, it still holds what was there before."""
    bench = benches(family)
    (ids,) = text_models.prompts(3, [21])
    batch = make_decode_batch(bench.caller.make_cache(), ComputeMethods("ragged"), shortest=8)
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
    cache = bench.caller.make_cache()
    bench.caller.prefill(mx.array([ids[:8], [*ids[:5], 0, 0, 0]]), cache, 0, TEXT_ONLY)
    for index, length in enumerate((8, 5)):
        row = layer_caches.split_row(cache, index, length, copied=copied)
        hit = bench.through_bytes(bench.save(layer_caches.view_row(row), length))
        assert same(bench.answer(ids, bench.restore(hit), length), bench.answer(ids)), length


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2", "nemotron_h"])
def test_half_precision_comes_back_bit_by_bit(zoo: Zoo, family: str) -> None:
    made = caller(zoo, family)
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


def test_a_restored_row_has_room(benches: Callable[..., Bench]) -> None:
    bench = benches("llama")
    (ids,) = text_models.prompts(3, [30])
    cache, _ = bench.fill(ids)
    again = bench.restore(bench.save(layer_caches.view_row(cache), 30, (16,)), 700)
    assert {layer.keys.shape[2] for layer in again} == {768}
    bench.fill(ids * 20, again, 30, 200)
    assert {layer.keys.shape[2] for layer in again} == {768}
