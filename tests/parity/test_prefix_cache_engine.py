"""What the prefix cache gives with the real runner, where other tests only ask a scripted one."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.core.request import FinishReason, HitKind, Request, TokenEvent
from mlxrun.core.step_plan import SnapshotKind
from mlxrun.engine.engine import Engine
from mlxrun.engine.prefix_cache.entry import KeyChain
from mlxrun.engine.prefix_cache.prefix_waiting import PrefixWaiting
from mlxrun.engine.prefix_cache.radix_index import RadixIndex, RadixMatch
from mlxrun.model.kv.snapshot.packing import Stack
from mlxrun.model.kv.snapshot.snapshots import DeltaPayload, SnapshotCodec
from mlxrun.model.run.decode import DecodeRunner
from tests.helpers import engine_driver, text_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.engine_fakes import merge_events
from tests.helpers.model_fixtures import Zoo, mark_sweep

pytestmark = pytest.mark.usefixtures("probed_once")

# Keys, windows and recurrent states; the sweep has the other kinds.
THREE = mark_sweep(text_models.CORE, ("llama", "gemma3_text", "qwen3_next"))
BASE = tuple(text_models.prompts(41, [75])[0])
OTHER = tuple(text_models.prompts(42, [75])[0])
CHUNK = 16
COUNT = 24


def once(engine: Engine, request: Request) -> TokenEvent:
    return engine_driver.run_requests(engine, [request])[request.id]


# -- nothing is computed twice ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", THREE)
def test_the_next_turn_goes_on_from_the_answer(zoo: Zoo, family: str) -> None:
    """Not only the prompt of the turn before is found, but its answer too, in each of four turns."""
    engine, ids = engine_driver.make_real_engine(zoo.text(family)), BASE[:40]
    known = 0
    for turn in range(4):
        event = once(engine, engine_driver.make_text_request(f"turn {turn}", ids, max_tokens=9))
        engine_driver.check_answer(event, zoo.answer(family, ids, 9))
        assert event.num_cached_tokens >= known, turn
        known = len(ids) + len(event.tokens) - 1  # the last token was never computed on
        ids = (*ids, *event.tokens, *OTHER[turn * 9 : turn * 9 + 9])


def compute_questions(zoo: Zoo, **options: Any) -> int:
    """Answer five questions behind the same examples at once, and check that each is answered as alone and
    cold. Returns the prompt tokens that were computed."""
    engine = engine_driver.make_real_engine(zoo.text("llama"), chunk=512, **options)
    prompts = {f"q{i}": (*BASE, *OTHER[7 * i : 7 * i + 6 + i]) for i in range(5)}
    requests = [engine_driver.make_text_request(name, ids, max_tokens=9) for name, ids in prompts.items()]
    events = engine_driver.run_requests(engine, requests)
    for name, ids in prompts.items():
        engine_driver.check_answer(events[name], zoo.answer("llama", ids, 9))
    return engine.generation.prefilled


def test_prompts_that_part_inside_a_chunk_compute_their_beginning_once(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compute_questions(zoo) <= len(BASE) + 5 * 11
    assert compute_questions(zoo, reproducible=True) >= 5 * len(BASE), "hits end on the grid"
    monkeypatch.setattr(PrefixWaiting, "list_owners", lambda self, stop: [])
    assert compute_questions(zoo) >= 5 * len(BASE), "the mutation twin: nobody waits"


def test_a_beginning_of_another_prompt_is_found(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation twin of the answers: a hit that is one token longer than what is in common."""
    match = RadixIndex.match

    def match_more(self: RadixIndex, chain: KeyChain, most: int, *more: Any) -> RadixMatch | None:
        found = match(self, chain, most, *more)
        longer = found is not None and not found.ends_entry and found.length < most
        if found is None or not longer:
            return found
        return replace(found, length=found.length + 1)

    monkeypatch.setattr(RadixIndex, "match", match_more)
    with pytest.raises(AssertionError):
        compute_questions(zoo)


@pytest.mark.parametrize("family", THREE)
@pytest.mark.parametrize("delay", [0, 1, 2])
def test_a_turn_that_follows_at_once_goes_on_from_the_answer(zoo: Zoo, family: str, delay: int) -> None:
    """It comes between the end of the turn before, and the step that stores what that has computed."""
    engine, ids = engine_driver.make_real_engine(zoo.text(family), chunk=512), BASE[:40]
    engine.add(engine_driver.make_text_request("first", ids, max_tokens=9))
    answer: list[int] = []
    finished = False
    while not finished:
        for event in engine.step():
            answer += event.tokens
            finished = event.finish is not None
    for _ in range(delay):
        engine.step()
    ids = (*ids, *answer, *OTHER[:9])
    event = once(engine, engine_driver.make_text_request("second", ids, max_tokens=9))
    assert event.num_cached_tokens >= 40 + len(answer) - 1
    engine_driver.check_answer(event, zoo.answer(family, ids, 9))


@pytest.mark.parametrize("family", THREE)
def test_an_aborted_prompt_keeps_all_of_its_work(zoo: Zoo, family: str) -> None:
    """Also where no checkpoint is due: hybrids keep the state at which they were stopped."""
    engine = engine_driver.make_real_engine(zoo.text(family), prefill_budget=CHUNK, checkpoint_every=1 << 20)
    left = engine_driver.run_requests(
        engine, [TimedRequest(engine_driver.make_text_request("gone", BASE), abort_step=3)]
    )["gone"]
    assert left.finish is FinishReason.ABORT and left.num_computed_tokens == 3 * CHUNK
    event = once(engine, engine_driver.make_text_request("again", BASE))
    assert event.num_cached_tokens == 3 * CHUNK
    engine_driver.check_answer(event, zoo.answer(family, BASE))


@pytest.mark.parametrize("family", THREE)
def test_an_aborted_answer_is_kept(zoo: Zoo, family: str) -> None:
    """Of an answer too: who asks with its beginning goes on from there."""
    engine = engine_driver.make_real_engine(zoo.text(family))
    left = engine_driver.run_requests(
        engine,
        [TimedRequest(engine_driver.make_text_request("gone", BASE[:40], max_tokens=40), abort_step=14)],
    )["gone"]
    assert left.finish is FinishReason.ABORT and len(left.tokens) > 6
    ids = (*BASE[:40], *left.tokens, *OTHER[:5])
    event = once(engine, engine_driver.make_text_request("again", ids, max_tokens=9))
    assert event.num_cached_tokens >= 40 + len(left.tokens) - 1
    engine_driver.check_answer(event, zoo.answer(family, ids, 9))


@pytest.mark.parametrize("family", THREE)
def test_a_row_that_was_pushed_out_computes_no_prompt_again(zoo: Zoo, family: str) -> None:
    """A row is preempted in the middle of its answer, and nothing of it is computed again."""
    engine = engine_driver.make_real_engine(zoo.text(family), max_running=1)
    computed: list[int] = []
    schedule = engine.scheduler.schedule

    def spy(*args: bool) -> Any:
        plan = schedule(*args)
        computed.extend(chunk.stop - chunk.start for chunk in plan.prefill if chunk.request_id == "a")
        return plan

    engine.scheduler.schedule = spy  # type: ignore[method-assign]
    behind = replace(engine_driver.make_text_request("a", BASE[:40]), background=True)
    pushed = []

    def look(step: int) -> None:
        a = next((e for e in engine.scheduler.requests if e.id == "a"), None)
        if a is not None and not a.running and a.output:
            pushed.append(len(a.output))

    events = engine_driver.run_requests(
        engine,
        [behind, TimedRequest(engine_driver.make_text_request("b", OTHER[:40], max_tokens=5), add_step=12)],
        look,
    )
    assert pushed and pushed[0] > 4
    engine_driver.check_answer(events["a"], zoo.answer(family, BASE[:40]))
    engine_driver.check_answer(events["b"], zoo.answer(family, OTHER[:40], 5))
    assert computed[:3] == [16, 16, 7]
    assert sum(computed[3:]) == 0, computed


# -- through changes -------------------------------------------------------------------------------------

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 4},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"logit_bias": {70: 5.0}, "logprobs": 3},
]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_other_sampling_finds_the_same_prefix(zoo: Zoo, family: str) -> None:
    """What was computed for a greedy request serves a sampled one, and the other way round."""
    engine = engine_driver.make_real_engine(zoo.text(family))
    cacheless = engine_driver.make_real_engine(zoo.text(family), backend="none")
    assert once(engine, engine_driver.make_text_request("greedy", BASE)).hit_kind is HitKind.MISS
    for i, params in enumerate(SAMPLING):
        event = once(engine, engine_driver.make_text_request(f"{i}", BASE, **params))
        assert (event.hit_kind, event.num_cached_tokens) == (HitKind.EXACT, len(BASE) - 1), params
        cold = once(cacheless, engine_driver.make_text_request(f"{i}", BASE, **params))
        assert event.tokens == cold.tokens, params
    engine_driver.check_answer(
        once(engine, engine_driver.make_text_request("again", BASE)), zoo.answer(family, BASE)
    )


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_the_cache_survives_a_failed_step(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """All rows are lost and the batch is built anew; the prefixes are still there."""
    engine = engine_driver.make_real_engine(zoo.text(family))
    once(engine, engine_driver.make_text_request("first", BASE))
    runner = engine_driver.get_runner(engine)
    batch, real = runner._decoder.batch, DecodeRunner.forward
    failed: list[int] = []

    def decode(self: Any, ids: Sequence[str], *args: Any) -> Any:
        if ids and not failed:
            failed.append(1)
            raise RuntimeError("made for this test")
        return real(self, ids, *args)

    monkeypatch.setattr(DecodeRunner, "forward", decode)
    asks = [
        engine_driver.make_text_request("second", (*BASE, *OTHER[:9])),
        engine_driver.make_text_request("third", OTHER),
    ]
    events = engine_driver.run_requests(engine, asks)
    assert failed and runner._decoder.batch is not batch
    engine_driver.check_answer(events["second"], zoo.answer(family, (*BASE, *OTHER[:9])))
    engine_driver.check_answer(events["third"], zoo.answer(family, OTHER))
    event = once(engine, engine_driver.make_text_request("fourth", BASE))
    assert event.hit_kind is HitKind.EXACT or event.num_cached_tokens == len(BASE) - 1
    engine_driver.check_answer(event, zoo.answer(family, BASE))


def test_a_cleared_cache_is_logged(zoo: Zoo, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever wonders why nothing is found can read it; without a clear nothing is said."""
    engine = engine_driver.make_real_engine(zoo.text("llama"))
    with caplog.at_level(logging.INFO, "mlxrun"):
        once(engine, engine_driver.make_text_request("first", BASE))
        once(engine, engine_driver.make_text_request("second", BASE))
        assert "cleared" not in caplog.text
        engine.prefix_cache.clear()
    assert caplog.text.count("the prefix cache was cleared") == 1
    assert once(engine, engine_driver.make_text_request("third", BASE)).hit_kind is HitKind.MISS


def doubled(stack: Stack) -> Stack:
    return tuple(mx.concatenate([a, a]) for a in stack)


def planted(payload: Any) -> Any:
    """The same payload as if it were of two rows."""
    wide = tuple(doubled(stack) for stack in payload.stacks)
    if isinstance(payload, DeltaPayload):
        return DeltaPayload(payload.tokens, wide)
    return replace(payload, stacks=wide)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "mamba2"])
def test_an_entry_of_two_rows_is_a_miss(zoo: Zoo, family: str) -> None:
    """Planted in the cache. Nothing of it is used, the answer is right, and the next one hits again."""
    engine = engine_driver.make_real_engine(zoo.text(family))
    once(engine, engine_driver.make_text_request("first", BASE))
    entries = engine.prefix_cache._index.entries.values()  # type: ignore[attr-defined]
    assert entries
    for record in entries:
        record.payload = planted(record.payload)
    event = once(engine, engine_driver.make_text_request("second", BASE))
    assert (event.hit_kind, event.num_cached_tokens) == (HitKind.MISS, 0)
    assert engine.prefix_cache.read_counters()["refused"] > 0 and engine.generation.errors == 0
    engine_driver.check_answer(event, zoo.answer(family, BASE))
    event = once(engine, engine_driver.make_text_request("third", BASE))
    assert event.hit_kind is HitKind.EXACT
    engine_driver.check_answer(event, zoo.answer(family, BASE))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_evicted_between_waiting_and_running(zoo: Zoo, family: str) -> None:
    """A request that waits is promised nothing: what is gone when it runs is a miss, and right."""
    engine = engine_driver.make_real_engine(zoo.text(family), max_running=1)
    once(engine, engine_driver.make_text_request("first", BASE))
    assert engine.prefix_cache.nbytes > 0
    engine.add(engine_driver.make_text_request("long", OTHER[:40]))
    engine.step()
    engine.add(engine_driver.make_text_request("second", BASE))
    engine.step()
    assert [e.running for e in engine.scheduler.requests] == [True, False]
    engine.prefix_cache.shrink(0)
    events: dict[str, TokenEvent] = {}
    while engine.busy:
        for event in engine.step():
            old = events.get(event.request_id)
            events[event.request_id] = event if old is None else merge_events(old, event)
    assert events["second"].hit_kind is HitKind.MISS
    engine_driver.check_answer(events["second"], zoo.answer(family, BASE))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_prompt_of_thousands_of_tokens_is_found_in_the_next_turn(zoo: Zoo, family: str) -> None:
    """2,000 tokens in many chunks, then the answer, then the next question."""
    ids = text_models.prompts(44, [2000])[0]
    sizes = {"chunk": 128, "prefill_budget": 512, "context_length": 4000}
    engine = engine_driver.make_real_engine(zoo.text(family), **sizes)
    first = once(engine, engine_driver.make_text_request("first", ids, max_tokens=4))
    turn = (*ids, *first.tokens, *OTHER[:9])
    second = once(engine, engine_driver.make_text_request("second", turn, max_tokens=4))
    assert second.num_cached_tokens >= len(ids) - 1
    cold = engine_driver.make_real_engine(zoo.text(family), backend="none", **sizes)
    assert second.tokens == once(cold, engine_driver.make_text_request("cold", turn, max_tokens=4)).tokens


# -- memory -----------------------------------------------------------------------------------------------


def cost_of_a_hit(zoo: Zoo, spoilt: bool) -> tuple[int, int]:
    """(bytes that restoring 1,500 tokens takes at its peak, bytes of the entry). `spoilt`: copied first."""
    engine = engine_driver.make_real_engine(
        zoo.text("llama"), chunk=512, prefill_budget=512, context_length=8000
    )
    ids = text_models.prompts(45, [1500])[0]
    once(engine, engine_driver.make_text_request("first", ids, max_tokens=1))
    entry, seen, restore = engine.prefix_cache.nbytes, list[int](), SnapshotCodec.restore

    def measured(self: Any, hit: Any, *given: Any) -> Any:
        gc.collect()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        if spoilt:
            copies = [
                (a, b, DeltaPayload(d.tokens, tuple((s[0] + 0,) for s in d.stacks))) for a, b, d in hit.deltas
            ]
            hit = replace(hit, deltas=tuple(copies))
            mx.eval([stack for *_, delta in copies for stack in delta.stacks])
        cache = restore(self, hit, *given)
        mx.eval([layer.state for layer in cache])
        seen.append(mx.get_peak_memory() - before)
        return cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SnapshotCodec, "restore", measured)
        event = once(engine, engine_driver.make_text_request("second", (*ids, 1), max_tokens=1))
    assert event.num_cached_tokens >= len(ids) - 1 and engine.prefix_cache.nbytes >= entry > 500_000
    (peak,) = seen
    return peak, entry


def test_a_hit_costs_one_copy(zoo: Zoo) -> None:
    """Restoring takes the memory of the row that it makes, and not of the entry once more."""
    peak, entry = cost_of_a_hit(zoo, spoilt=False)
    spare = entry * 256 // 1500  # a buffer has space for the next tokens
    assert peak < 1.1 * entry + spare
    peak, entry = cost_of_a_hit(zoo, spoilt=True)
    assert peak > 1.9 * entry, "the twin: a copy of the entry would be seen"


def test_parts_of_the_cache_that_the_tests_look_at(zoo: Zoo) -> None:
    """What is planted above is what models keep: keys for all, states for those that have them."""
    for family, wanted in (
        ("llama", {SnapshotKind.DELTA}),
        ("qwen3_next", {SnapshotKind.DELTA, SnapshotKind.STATE}),
    ):
        engine = engine_driver.make_real_engine(zoo.text(family))
        once(engine, engine_driver.make_text_request("a", BASE))
        assert {r.kind for r in engine.prefix_cache._index.entries.values()} == wanted  # type: ignore[attr-defined]
