"""Warm equals cold: whatever the prefix cache gives, a request is answered as if it ran alone and cold.

Each request is compared with the ORACLE, in every way of hitting, in any
order of turns, joins and aborts, and with engines that follow each other on one disk. That these tests can
fail is shown at the end: a dropped state, a wrong delta, an ignored image.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxrun.core.request import FinishReason, HitKind, Request, TokenEvent
from mlxrun.engine.engine import Engine
from mlxrun.engine.prefix_cache import tracked_request
from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.kv.ragged.layer_caches import LayerKind
from mlxrun.model.kv.snapshot.snapshots import SnapshotCodec
from tests.helpers import engine_driver, text_models, vision_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.model_fixtures import Zoo, mark_sweep

pytestmark = pytest.mark.usefixtures("probed_once")

# The kinds of caches that there are; the other families compute the same with them, in the sweep.
KINDS = mark_sweep(text_models.TEXT, text_models.CORE)
THREE = mark_sweep(text_models.TEXT, ("llama", "gemma3_text", "qwen3_next"))
VISION = mark_sweep(vision_models.VISION, vision_models.CORE)
CHUNK = 16
COUNT = 8
BOUNDARY = 21

BASE = tuple(text_models.prompts(31, [75])[0])
OTHER = tuple(text_models.prompts(32, [75])[0])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_driver.use_small_groups(monkeypatch)


def ask(name: str, ids: Sequence[int], cache_positions: Sequence[int] = (), count: int = COUNT) -> Request:
    return replace(
        engine_driver.make_text_request(name, ids, max_tokens=count), cache_positions=tuple(cache_positions)
    )


def once(engine: Engine, request: Request) -> TokenEvent:
    return engine_driver.run_requests(engine, [request])[request.id]


def is_sliceable(family: str) -> bool:
    return family in text_models.SLICEABLE


# -- every kind of hit ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", KINDS)
def test_every_kind_of_hit_gives_the_cold_answer(zoo: Zoo, family: str) -> None:
    """Exact, prefix, supersequence, lcp; recurrent models are reused at cache_positions only."""
    engine = engine_driver.make_real_engine(zoo.text(family))
    longer = (*BASE, *OTHER[:30])
    parted = (*BASE[:40], *OTHER[40:])
    system = (*BASE[:BOUNDARY], *OTHER[BOUNDARY:60])
    asks = [
        ("cold", BASE, HitKind.MISS, 0),
        ("exact", BASE, HitKind.EXACT, len(BASE) - 1),
        ("longer", longer, None, len(BASE) - 1),
        ("shorter", BASE[:50], HitKind.SUPERSEQUENCE, 49),
        ("parted", parted, HitKind.LCP, 40),
        ("system", system, None, BOUNDARY),
    ]
    for name, ids, kind, cached in asks:
        event = once(engine, ask(name, ids, [BOUNDARY]))
        engine_driver.check_answer(event, zoo.answer(family, ids, COUNT))
        if is_sliceable(family):
            assert event.num_cached_tokens >= cached, name
            assert kind is None or event.hit_kind is kind, name
        elif name in ("exact", "longer", "system"):
            assert event.num_cached_tokens >= cached, name
    engine_driver.check_answer(once(engine, ask("again", BASE)), zoo.answer(family, BASE, COUNT))


@pytest.mark.parametrize("family", THREE)
def test_turns_of_a_conversation_go_on_from_the_last_answer(zoo: Zoo, family: str) -> None:
    """Four turns; each finds at least the previous prompt, hybrids too."""
    engine, ids, before = engine_driver.make_real_engine(zoo.text(family)), BASE[:40], 0
    for turn in range(4):
        event = once(engine, ask(f"turn {turn}", ids, [BOUNDARY, len(ids) - 5]))
        engine_driver.check_answer(event, zoo.answer(family, ids, COUNT))
        assert event.num_cached_tokens >= before
        before = len(ids) - 1
        ids = (*ids, *event.tokens, *OTHER[turn * 9 : turn * 9 + 9])


@pytest.mark.parametrize("family", THREE)
def test_what_an_aborted_prompt_has_computed_serves_the_next_try(zoo: Zoo, family: str) -> None:
    """Aborted after three chunks, sent again: only the rest is computed, and right."""
    engine = engine_driver.make_real_engine(zoo.text(family), prefill_budget=CHUNK, checkpoint_every=CHUNK)
    left = engine_driver.run_requests(engine, [TimedRequest(ask("gone", BASE), abort_step=3)])["gone"]
    assert left.finish is FinishReason.ABORT
    event = once(engine, ask("again", BASE))
    engine_driver.check_answer(event, zoo.answer(family, BASE, COUNT))
    assert event.num_cached_tokens >= 3 * CHUNK


@pytest.mark.parametrize("family", KINDS)
def test_preempted_rows_come_back_through_the_cache(zoo: Zoo, family: str) -> None:
    """A preempted request resumes from its chunks, its answer included."""
    engine = engine_driver.make_real_engine(zoo.text(family), checkpoint_every=CHUNK)
    prompts = {f"r{i}": (*BASE[: 30 + 11 * i], *OTHER[i : i + 5]) for i in range(3)}

    def disturb(step: int) -> None:
        if step in (4, 9):
            running = [e for e in engine.scheduler.requests if e.running]
            engine.scheduler.preempt(running[-1])

    events = engine_driver.run_requests(
        engine, [ask(name, ids, count=16) for name, ids in prompts.items()], disturb
    )
    for name, ids in prompts.items():
        engine_driver.check_answer(events[name], zoo.answer(family, ids, 16))


@pytest.mark.parametrize("family", THREE)
@pytest.mark.parametrize(
    "way", ["decode row by row", "chunks joined, launched first", "chunk 5", "chunk 512"]
)
def test_every_way_of_computing_makes_records_for_every_prompt(zoo: Zoo, family: str, way: str) -> None:
    options = engine_driver.VARIANTS[way]
    if family == "gpt_bigcode" and "methods" in options:  # not every way is one of this model's
        options = {"methods": replace(options["methods"], decode="row_by_row")}
    engine = engine_driver.make_real_engine(zoo.text(family), **options)
    prompts = {"a": BASE, "b": (*BASE[:40], *OTHER[:20]), "c": BASE[:33], "d": (*BASE, *OTHER[:9])}
    for round_ in range(2):
        asks = [ask(f"{name}{round_}", ids, [BOUNDARY]) for name, ids in prompts.items()]
        events = engine_driver.run_requests(engine, asks)
        for name, ids in prompts.items():
            engine_driver.check_answer(events[f"{name}{round_}"], zoo.answer(family, ids, COUNT))
            if round_ and is_sliceable(family):
                assert events[f"{name}1"].num_cached_tokens == len(ids) - 1


# -- any order --------------------------------------------------------------------------------------

TURNS = [BASE[:n] for n in (17, 33, 60, 75)] + [
    (*BASE[:n], *OTHER[:m]) for n, m in ((21, 9), (40, 30), (64, 1))
]


@st.composite
def orders(draw: st.DrawFn) -> list[tuple[int, int, int | None, bool]]:
    """(prompt, joins, leaves, with cache_positions) of some requests."""
    return [
        (
            draw(st.integers(0, len(TURNS) - 1)),
            draw(st.integers(0, 12)),
            draw(st.none() | st.integers(0, 16)),
            draw(st.booleans()),
        )
        for _ in range(draw(st.integers(2, 9)))
    ]


@pytest.mark.parametrize(
    ("family", "memory"),
    mark_sweep(
        [(family, memory) for family in text_models.TEXT for memory in (None, 120_000)],
        [*((family, 120_000) for family in ("llama", "gemma3_text", "qwen3_next")), ("llama", None)],
    ),
)
def test_any_order_of_turns_joins_and_aborts(zoo: Zoo, family: str, memory: int | None) -> None:
    """The release gate. A small budget evicts in between."""
    engine = engine_driver.make_real_engine(
        zoo.text(family), checkpoint_every=32, memory_bytes=memory, max_running=3
    )

    @settings(max_examples=9, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(orders())
    def check(order: list[tuple[int, int, int | None, bool]]) -> None:
        asks = []
        for i, (which, joins, stays, bounded) in enumerate(order):
            request = ask(f"{i}", TURNS[which], [9, BOUNDARY] if bounded and which else ())
            asks.append(TimedRequest(request, joins, None if stays is None else joins + stays))
        events = engine_driver.run_requests(engine, asks)
        for i, (which, *_) in enumerate(order):
            engine_driver.check_partial_answer(events[f"{i}"], zoo.answer(family, TURNS[which], COUNT))

    check()
    counts = engine.prefix_cache.read_counters()
    assert counts["memory_bytes"] <= (memory or 1 << 40)


@pytest.mark.parametrize("family", THREE)
def test_an_engine_goes_on_with_what_another_left_on_disk(zoo: Zoo, family: str, tmp_path: Path) -> None:
    """Every cache class comes back from its file; another model's folder is another folder."""
    options = {"backend": "disk", "disk_path": str(tmp_path), "checkpoint_every": CHUNK}
    first = engine_driver.make_real_engine(zoo.text(family), **options)
    once(first, ask("a", BASE, [BOUNDARY]))
    first.prefix_cache.shutdown()
    second = engine_driver.make_real_engine(zoo.text(family), **options)
    for name, ids in (("same", BASE), ("longer", (*BASE, *OTHER[:20]))):
        event = once(second, ask(name, ids, [BOUNDARY]))
        engine_driver.check_answer(event, zoo.answer(family, ids, COUNT))
        assert event.num_cached_tokens >= len(BASE) - 1
    second.prefix_cache.shutdown()


# -- once is enough ---------------------------------------------------------------------------------


def computed(event: TokenEvent) -> int:
    return event.num_computed_tokens - event.num_cached_tokens


@pytest.mark.parametrize("family", THREE)
def test_what_requests_share_is_computed_once(zoo: Zoo, family: str) -> None:
    """Nine prompts that begin alike, all at once; the others wait for the first one's chunks."""
    shared = BASE[:64]
    prompts = {str(i): (*shared, *OTHER[i : i + 5 + i]) for i in range(9)}
    engine = engine_driver.make_real_engine(zoo.text(family), max_running=8, checkpoint_every=CHUNK)
    events = engine_driver.run_requests(
        engine, [ask(name, ids, [len(shared)]) for name, ids in prompts.items()]
    )
    for name, ids in prompts.items():
        engine_driver.check_answer(events[name], zoo.answer(family, ids, COUNT))
    own = sum(len(ids) - len(shared) for ids in prompts.values())
    assert sum(computed(e) for e in events.values()) <= len(shared) + own


def test_choices_of_one_prompt_compute_it_once(zoo: Zoo) -> None:
    """`n > 1` is the same prompt n times."""
    engine = engine_driver.make_real_engine(zoo.text("llama"))
    events = engine_driver.run_requests(engine, [ask(f"{i}", BASE) for i in range(5)])
    assert all(e.tokens == events["0"].tokens for e in events.values())
    assert sorted(e.num_cached_tokens for e in events.values()) == [0, 74, 74, 74, 74]


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_client_that_drops_again_and_again_gets_through(zoo: Zoo, family: str) -> None:
    """Each try goes on where the last one was stopped, so that the fifth has nothing left to compute."""
    engine = engine_driver.make_real_engine(zoo.text(family), prefill_budget=CHUNK, checkpoint_every=CHUNK)
    left = []
    for i in range(4):
        event = engine_driver.run_requests(engine, [TimedRequest(ask(f"{i}", BASE), abort_step=1)])[f"{i}"]
        left.append(event.num_cached_tokens)
    assert left == sorted(set(left)), left
    engine_driver.check_answer(once(engine, ask("last", BASE)), zoo.answer(family, BASE, COUNT))


# -- what goes wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_a_hit_that_cannot_be_restored_is_computed(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Once, counted, and the record is gone; the answer is right and no request fails."""
    engine = engine_driver.make_real_engine(zoo.text(family))
    once(engine, ask("first", BASE))

    def broken(self: Any, hit: Any, capacity: int, new: list[Any]) -> list[Any]:
        raise ValueError("made for this test")

    with monkeypatch.context() as patch:
        patch.setattr(SnapshotCodec, "restore", broken)
        event = once(engine, ask("second", BASE))
    engine_driver.check_answer(event, zoo.answer(family, BASE, COUNT))
    assert engine.prefix_cache.read_counters()["refused"] > 0
    engine_driver.check_answer(once(engine, ask("third", BASE)), zoo.answer(family, BASE, COUNT))


@pytest.mark.parametrize("name", ["copy_delta", "copy_state", "restore"])
def test_copies_that_fail_cost_nothing_but_time(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A cache failure never fails a request, nor does it leave those waiting that share the prompt."""

    def broken(*given: Any) -> Any:
        raise RuntimeError("made for this test")

    monkeypatch.setattr(SnapshotCodec, name, broken)
    engine = engine_driver.make_real_engine(zoo.text("qwen3_next"), checkpoint_every=CHUNK)
    events = engine_driver.run_requests(engine, [ask(f"{i}", BASE, [BOUNDARY]) for i in range(4)])
    for event in events.values():
        engine_driver.check_answer(event, zoo.answer("qwen3_next", BASE, COUNT))


def test_memory_stays_within_its_budget_and_ends_empty(zoo: Zoo) -> None:
    """Many prompts, a small budget, on every path."""
    engine = engine_driver.make_real_engine(zoo.text("llama"), memory_bytes=100_000)
    seen = []
    prompts = text_models.prompts(7, [40 + i for i in range(30)])
    engine_driver.run_requests(
        engine,
        [ask(f"{i}", ids) for i, ids in enumerate(prompts)],
        lambda _: seen.append(engine.prefix_cache.nbytes),
    )
    assert 0 < max(seen) <= 100_000
    assert engine.prefix_cache.read_counters()["evicted"] > 0
    engine.prefix_cache.shrink(0)
    assert engine.prefix_cache.nbytes == engine.prefix_cache.read_counters()["entries"] == 0


@pytest.mark.parametrize("bits", [8, 4])
def test_stored_bits_hold_less_and_nearly_the_same(zoo: Zoo, bits: int) -> None:
    """Quantized at store; a hit works, with a rounding that the setting's description announces."""
    exact, engine = (
        engine_driver.make_real_engine(zoo.text("llama")),
        engine_driver.make_real_engine(zoo.text("llama"), stored_bits=bits),
    )
    for one in (exact, engine):
        once(one, ask("cold", BASE))
    assert engine.prefix_cache.nbytes < exact.prefix_cache.nbytes * (bits + 8) / 32
    event = once(engine, ask("warm", (*BASE, *OTHER[:3]), count=1))
    assert event.num_cached_tokens >= len(BASE) - 1
    wanted = zoo.answer("llama", (*BASE, *OTHER[:3]), 1)
    assert abs(event.logprobs[0].logprob - wanted.logprobs[0][event.tokens[0]]) < 1.0


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_reproducible_bytes_do_not_depend_on_the_cache(zoo: Zoo, family: str) -> None:
    """Hits on the grid only, where the chunks are the same."""
    found = []
    for backend in ("none", "memory"):
        engine = engine_driver.make_real_engine(
            zoo.text(family), reproducible=True, max_running=4, backend=backend
        )
        for _ in range(2):
            asks = [ask(f"{n}", BASE[:n], [BOUNDARY]) for n in (40, 75, 33)]
            events = engine_driver.run_requests(engine, asks)
            found.append([(e.tokens, [p.logprob for p in e.logprobs]) for _, e in sorted(events.items())])
        assert (sum(e.num_cached_tokens for e in events.values()) > 0) == (backend == "memory")
        assert all(e.num_cached_tokens % CHUNK == 0 for e in events.values())
    assert found[0] == found[1] == found[2] == found[3]


# -- images -----------------------------------------------------------------------------------------

IMAGES = vision_models.images(5, 3, size=(64, 48))


def see(engine: Engine, family: str, name: str, question: str, images: Sequence[Any]) -> Request:
    prompt = vision_models.prompt(family, "what is ", *[None] * len(images), question)
    return engine_driver.make_vision_request(engine, name, prompt, images, max_tokens=COUNT)


@pytest.mark.parametrize("family", VISION)
def test_images_are_part_of_the_content(zoo: Zoo, family: str) -> None:
    """The same image is found with another question, another image of the same size is not."""
    engine = engine_driver.make_real_engine(zoo.vision(family))
    a, b, _ = IMAGES
    cases = [("a?", [a]), ("b!", [a]), ("a?", [b]), ("b!", [b, a]), ("a?", [a]), ("c", [a, b])]
    for i, (question, images) in enumerate(cases):
        request = see(engine, family, f"{i}", question, images)
        prompt = vision_models.prompt(family, "what is ", *[None] * len(images), question)
        event = once(engine, request)
        engine_driver.check_answer(event, zoo.see(family, prompt, images, COUNT))
        before = request.image_spans[0][0]
        if i in (0, 2):
            assert event.num_cached_tokens <= before
        if i in (1, 4) and family not in ("qwen3_5", "gemma3"):
            assert event.num_cached_tokens >= request.image_spans[0][1]


@st.composite
def seen_orders(draw: st.DrawFn) -> list[tuple[int, int, int | None]]:
    """(case, joins, leaves) of some prompts with and without images."""
    return [
        (draw(st.integers(0, len(SEEN) - 1)), draw(st.integers(0, 9)), draw(st.none() | st.integers(0, 12)))
        for _ in range(draw(st.integers(2, 7)))
    ]


SEEN = [("a?", [0]), ("b!", [0]), ("a?", [1]), ("a?", [0, 1]), ("b!", [1, 0]), ("text", [])]


@pytest.mark.parametrize("family", VISION)
def test_any_order_of_prompts_with_images(zoo: Zoo, family: str) -> None:
    """With images: same tokens and other pixels, in any order, joining and leaving."""
    engine = engine_driver.make_real_engine(zoo.vision(family), max_running=3, checkpoint_every=CHUNK)

    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(seen_orders())
    def check(order: list[tuple[int, int, int | None]]) -> None:
        asks, wanted = [], {}
        for i, (case, joins, stays) in enumerate(order):
            question, which = SEEN[case]
            images = [IMAGES[k] for k in which]
            request = see(engine, family, f"{i}", question, images)
            asks.append(TimedRequest(request, joins, None if stays is None else joins + stays))
            prompt = vision_models.prompt(family, "what is ", *[None] * len(images), question)
            wanted[f"{i}"] = zoo.see(family, prompt, images, COUNT)
        for name, event in engine_driver.run_requests(engine, asks).items():
            engine_driver.check_partial_answer(event, wanted[name])

    check()


# -- the tests can fail -----------------------------------------------------------------------------


@pytest.fixture
def warm(zoo: Zoo) -> Iterator[Callable[..., bool]]:
    """Whether a warm answer differs from the cold one. `plant`: plants a bug, once the model is loaded: the
    load check would find it."""

    def differs(family: str, plant: Callable[[], None] = lambda: None) -> bool:
        engine = engine_driver.make_real_engine(zoo.text(family))
        plant()
        once(engine, ask("cold", BASE))
        event = once(engine, ask("warm", (*BASE, *OTHER[:9])))
        assert event.num_cached_tokens > 0
        return engine_driver.has_other_answer(event, zoo.answer(family, (*BASE, *OTHER[:9]), COUNT))

    yield differs


def test_a_dropped_state_is_noticed(warm: Callable[..., bool], monkeypatch: pytest.MonkeyPatch) -> None:
    restore = SnapshotCodec.restore

    def without(self: Any, hit: Any, capacity: int, new: list[Any]) -> list[Any]:
        cache = restore(self, hit, capacity, new)
        for layer in layer_caches.flatten_caches(cache):
            if layer_caches.get_kind(layer) is LayerKind.STATE:
                layer.cache = [a if a is None else a * 0 for a in layer.cache]
        return cache

    assert not warm("qwen3_next")
    assert warm("qwen3_next", lambda: monkeypatch.setattr(SnapshotCodec, "restore", without))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_wrong_delta_is_noticed(
    warm: Callable[..., bool], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    delta = SnapshotCodec.copy_delta

    def shifted(self: Any, view: Any, start: int, stop: int) -> Any:
        return delta(self, view, max(start - 1, 0), stop - int(start > 0))

    assert not warm(family)
    assert warm(family, lambda: monkeypatch.setattr(SnapshotCodec, "copy_delta", shifted))


def test_an_ignored_image_is_noticed(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that looks at tokens alone answers for the first image."""
    monkeypatch.setattr(
        tracked_request, "build_content_ids", lambda tokens, spans, digests: array("q", tokens)
    )
    engine = engine_driver.make_real_engine(zoo.vision("qwen3_vl"))
    a, b, _ = IMAGES
    once(engine, see(engine, "qwen3_vl", "a", "a?", [a]))
    event = once(engine, see(engine, "qwen3_vl", "b", "a?", [b]))
    prompt = vision_models.prompt("qwen3_vl", "what is ", None, "a?")
    assert engine_driver.has_other_answer(event, zoo.see("qwen3_vl", prompt, [b], COUNT))
