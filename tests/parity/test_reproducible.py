"""engine.reproducible gives the same bytes in any company, and nothing that a step leaves grows."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.core.request import TokenEvent
from mlxrun.engine.engine import Engine
from mlxrun.model.kv.ragged.decode_batch import DecodeBatch
from mlxrun.model.run.compute_methods import ComputeMethods, DecodeMethod
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import PromptInputs
from mlxrun.model.run.sampler import Sampler
from mlxrun.model.vision.embedder import Embedder
from tests.helpers import engine_driver, text_models, vision_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.model_fixtures import Zoo, mark_sweep

ROWS = 5
KINDS = mark_sweep(text_models.TEXT, ("llama", "gemma3_text", "qwen3_next", "mamba2"))
METHODS = mark_sweep(text_models.TEXT, ("llama", "gemma3_text", "qwen3_next", "deepseek_v3", "gemma2"))
VISION = mark_sweep(vision_models.VISION, ("qwen3_vl", "gemma3"))

pytestmark = pytest.mark.usefixtures("probed_once")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_driver.use_small_groups(monkeypatch)


def watch_decodes(engine: Engine) -> list[int]:
    """Rows of each decode forward from now on."""
    caller = engine_driver.get_runner(engine)._caller
    original, widths = caller.decode, []

    def decode(ids: mx.array, cache: list[Any], positions: Any) -> mx.array:
        assert ids.shape == (len(positions), 1)
        widths.append(len(positions))
        return original(ids, cache, positions)  # type: ignore[no-any-return]

    caller.decode = decode
    return widths


def same_bytes(first: TokenEvent, second: TokenEvent) -> bool:
    return first.tokens == second.tokens and first.logprobs == second.logprobs


# -- engine.reproducible ------------------------------------------------------------------------------------


def round_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    original = ModelCaller.decode

    def decode(self: Any, ids: mx.array, *given: Any) -> mx.array:
        return original(self, ids, *given) + 1e-6 * mx.arange(len(ids))[:, None, None]

    monkeypatch.setattr(ModelCaller, "decode", decode)


@pytest.mark.parametrize("family", KINDS)
def test_text_is_the_same_bytes_in_any_batch(zoo: Zoo, family: str, small: None) -> None:
    """Alone, together, in another order, joining late, beside rows that are aborted."""
    assert is_same_in_any_batch(zoo, family)


def test_bits_of_the_place_are_seen(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: an engine that rounds a row by its place."""
    assert not is_same_in_any_batch(zoo, "llama", partial(round_by_place, monkeypatch))


def is_same_in_any_batch(zoo: Zoo, family: str, plant: Callable[[], None] = lambda: None) -> bool:
    """Whether answers have the bytes that they have alone, though rows are decoded together. `plant`: called
    once the load check has chosen."""
    prompts = text_models.prompts(5, (1, 3, 16, 17, 31, 50))
    settings = [{"temperature": 0.8, "seed": i} if i % 2 else {} for i in range(len(prompts))]
    asks = [
        TimedRequest(engine_driver.make_text_request(str(i), p, max_tokens=10, logprobs=2, **more))
        for i, (p, more) in enumerate(zip(prompts, settings, strict=True))
    ]
    engine = engine_driver.make_real_engine(zoo.text(family), reproducible=True, max_running=ROWS)
    plant()
    widths = watch_decodes(engine)
    alone: dict[str, TokenEvent] = {}
    for ask in asks:
        alone |= engine_driver.run_requests(engine, [ask])
    noise = [
        TimedRequest(engine_driver.make_text_request(f"noise {i}", p), 2 * i, 3 * i + 9)
        for i, p in enumerate(text_models.prompts(6, (7, 25, 60)))
    ]
    for company in (
        asks,
        asks[::-1],
        [TimedRequest(a.request, add_step=(3, 0, 11, 2, 0, 7)[i]) for i, a in enumerate(asks)] + noise,
    ):
        events = engine_driver.run_requests(engine, company)
        if not all(same_bytes(events[ask.id], alone[ask.id]) for ask in asks):
            return False
    method = engine_driver.get_runner(engine)._methods.decode
    # Where only rows of similar length share a forward, these lengths have one each.
    assert (max(widths) > 1) is (method != "grouped"), method
    return True


@pytest.mark.parametrize(
    ("family", "exact"),
    [("llama", True), ("llama", False), ("gemma3_text", True), ("gemma3_text", False), ("qwen3_next", True)],
)
def test_text_is_the_same_bytes_after_preemptions(zoo: Zoo, family: str, exact: bool, small: None) -> None:
    """What a row has generated is generated again, and no event brings it twice. MUTANT: as a part of the
    prompt it rounds otherwise."""
    settings: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 3}, {"repetition_penalty": 1.3}, {}]
    prompts = text_models.prompts(9, (3, 20, 9, 40))
    asks = [
        TimedRequest(engine_driver.make_text_request(str(i), p, max_tokens=24 - i, logprobs=2, **more), 2 * i)
        for i, (p, more) in enumerate(zip(prompts, settings, strict=True))
    ]
    engine = engine_driver.make_real_engine(zoo.text(family), reproducible=True, max_running=ROWS)
    alone: dict[str, TokenEvent] = {}
    for ask in asks:
        alone |= engine_driver.run_requests(engine, [ask])
    engine.scheduler._regenerates = exact
    generated = 0

    def preempt(step: int) -> None:
        nonlocal generated
        rows = [state for state in engine.scheduler.requests if state.decoding]
        if step % 9 == 8 and rows and step < 100:
            row = rows[step % len(rows)]
            generated += len(row.output)
            engine.scheduler.preempt(row)

    events = engine_driver.run_requests(engine, asks, preempt)
    assert generated > 20
    assert all(same_bytes(events[rid], alone[rid]) for rid in alone) is exact


@pytest.mark.parametrize("family", VISION)
def test_images_are_the_same_bytes_in_any_batch(zoo: Zoo, family: str, small: None) -> None:
    engine = engine_driver.make_real_engine(zoo.vision(family), reproducible=True, max_running=ROWS)
    images = vision_models.images(3, 3)
    prompts = [vision_models.prompt(family, "x" * i, None, "what?") for i in range(3)]
    asks = [
        TimedRequest(engine_driver.make_vision_request(engine, str(i), p, [image], max_tokens=12))
        for i, (p, image) in enumerate(zip(prompts, images, strict=True))
    ]
    asks += [
        TimedRequest(
            engine_driver.make_text_request(f"text {n}", text_models.prompts(1, [n])[0], max_tokens=12)
        )
        for n in (2, 30)
    ]
    alone: dict[str, TokenEvent] = {}
    for ask in asks:
        alone |= engine_driver.run_requests(engine, [ask])
    for company in (asks, [TimedRequest(a.request, add_step=(9, 0, 4, 2, 0)[i]) for i, a in enumerate(asks)]):
        events = engine_driver.run_requests(engine, company)
        assert all(same_bytes(events[ask.id], alone[ask.id]) for ask in asks)


def is_same_after_fewer_images(zoo: Zoo, *, known: int) -> bool:
    """Whether a prompt with two images has the bytes of a cold one after prompts with the first of them.
    `known`: tokens that it has of those."""
    images = vision_models.images(6, 2, size=(64, 64))
    text = "and now a long explanation of what to look at, please. "
    prompts = [vision_models.prompt("qwen3_vl", "x", None, text, *more) for more in ((), ("!",), (None, "?"))]
    found = []
    for first in (0, 2):
        engine = engine_driver.make_real_engine(zoo.vision("qwen3_vl"), reproducible=True)
        for i, prompt in [*enumerate(prompts)][first:]:
            request = engine_driver.make_vision_request(engine, str(i), prompt, images[: 1 + i // 2])
            found.append(engine_driver.run_requests(engine, [request])[str(i)])
    assert [event.num_cached_tokens for event in found] == [0, 80, known, 0]
    return same_bytes(found[-2], found[-1])


def test_images_are_the_same_bytes_after_some_of_them(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that are encoded together may round otherwise than each alone, which is made certain here. The
    twin takes what is cached of each."""
    embed = Embedder.embed_prompt

    def round_otherwise(self: Any, prompt: Any, media: Any) -> PromptInputs:
        inputs = embed(self, prompt, media)
        assert inputs.embeds is not None
        return replace(inputs, embeds=inputs.embeds * (1 + 1e-5 * len(media["image_grid_thw"])))

    monkeypatch.setattr(Embedder, "embed_prompt", round_otherwise)
    assert is_same_after_fewer_images(zoo, known=0)
    monkeypatch.setattr("mlxrun.engine.engine.join_digests", lambda request: request)
    assert not is_same_after_fewer_images(zoo, known=80)


@pytest.mark.parametrize("family", METHODS)
def test_a_fixed_width_is_kept(zoo: Zoo, family: str, small: None) -> None:
    """Every decode forward has the same number of rows, filled up with dummies that change nothing."""
    prompts = text_models.prompts(5, (1, 3, 9, 17, 31))
    asks = [
        TimedRequest(engine_driver.make_text_request(str(i), p, max_tokens=12), add_step=2 * i)
        for i, p in enumerate(prompts)
    ]
    answers = [zoo.answer(family, p) for p in prompts]
    decode: DecodeMethod = "row_by_row" if family == "gpt_bigcode" else "ragged"
    methods = ComputeMethods(decode, fixed_width=ROWS)
    engine = engine_driver.make_real_engine(zoo.text(family), methods, max_running=ROWS)
    widths = watch_decodes(engine)
    events = engine_driver.run_requests(engine, asks)
    for i, answer in enumerate(answers):
        engine_driver.check_answer(events[str(i)], answer, 12)
    assert set(widths) == (
        {ROWS} if isinstance(engine_driver.get_runner(engine)._decoder.batch, DecodeBatch) else {1}
    )


def test_without_it_the_width_follows_the_rows(zoo: Zoo) -> None:
    """The twin of the tests above: what they assert is the setting's doing."""
    engine = engine_driver.make_real_engine(zoo.text("llama"), max_running=ROWS)
    widths = watch_decodes(engine)
    engine_driver.run_requests(
        engine,
        [
            engine_driver.make_text_request(str(n), p)
            for n, p in enumerate(text_models.prompts(5, (9, 9, 200)))
        ],
    )
    assert {2, 3} <= set(widths) <= {1, 2, 3}


def test_another_engine_of_the_process_changes_no_byte(zoo: Zoo) -> None:
    """Such as that of a simulated user. It computes on a thread of its own."""
    make = partial(
        engine_driver.make_real_engine, zoo.text("llama"), reproducible=True, max_running=ROWS, backend="none"
    )
    prompts = text_models.prompts(4, (300, 40, 17, 130, 500, 90))
    asks = [engine_driver.make_text_request(str(i), p, max_tokens=8) for i, p in enumerate(prompts)]
    (alone,) = engine_driver.run_at_once([make], asks)
    for events in engine_driver.run_at_once([make] * 3, asks):
        assert all(same_bytes(alone[name], event) for name, event in events.items())


# -- the lazy graph -----------------------------------------------------------------------------------------


def find_arrays(value: Any, seen: set[int]) -> Iterator[mx.array]:
    """Every array that can be reached from our objects, their containers and the libraries' caches."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, mx.array):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from find_arrays(item, seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from find_arrays(item, seen)
    elif type(value).__module__.startswith(("mlxrun.model", "mlx_lm.models.cache", "mlx_vlm.models.cache")):
        names = [*getattr(value, "__dict__", {}), *getattr(type(value), "__slots__", ())]
        for name in names:
            if name not in ("_caller", "model"):
                yield from find_arrays(getattr(value, name), seen)


def edges(engine: Engine) -> int:
    """Edges of the graphs of all that the runner holds: what would still have to be computed."""
    text = io.StringIO()
    arrays = list(find_arrays(engine_driver.get_runner(engine), set()))
    assert len(arrays) > 3
    mx.export_to_dot(text, *arrays)
    return text.getvalue().count("->")


def graph_growth(engine: Engine, steps: int = 110) -> tuple[int, int]:
    """Most edges early and late while three rows decode; the sampler keeps penalties' counts for two."""
    prompts = text_models.prompts(2, (3, 3, 20))
    more: list[dict[str, Any]] = [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5, "temperature": 0.7, "logprobs": 1},
        {},
    ]
    early, late = range(20, 50), range(steps - 50, steps - 20)
    counts: dict[int, int] = {}

    def count(step: int) -> None:
        if step in early or step in late:
            counts[step] = edges(engine)

    asks = [
        engine_driver.make_text_request(str(i), p, max_tokens=steps, **more[i]) for i, p in enumerate(prompts)
    ]
    engine_driver.run_requests(engine, asks, count)
    return max(counts[step] for step in early), max(counts[step] for step in late)


@pytest.mark.parametrize("family", KINDS)
def test_the_graph_does_not_grow(zoo: Zoo, family: str) -> None:
    """Buffers, states, the sampler's memory, positions and masks, over 110 decode steps; of one family over
    300, in which buffers grow."""
    engine = engine_driver.make_real_engine(zoo.text(family))
    early, late = graph_growth(engine, 300 if family == "gemma3_text" else 110)
    assert late <= early


@pytest.mark.parametrize("decode", ["grouped", "row_by_row"])
def test_the_graph_does_not_grow_in_the_slower_ways(zoo: Zoo, decode: Any) -> None:
    early, late = graph_growth(engine_driver.make_real_engine(zoo.text("qwen3_next"), ComputeMethods(decode)))
    assert late <= early


def test_a_graph_that_grows_is_seen(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: counts that are updated in each step and that no logits consume."""
    engine = engine_driver.make_real_engine(zoo.text("llama"))

    def remember(self: Sampler, tokens: mx.array) -> None:
        self._counts = self._counts + 1.0

    monkeypatch.setattr(Sampler, "record_tokens", remember)
    monkeypatch.setattr(Sampler, "adjust_logits", lambda self, x: x)
    monkeypatch.setattr(Sampler, "list_arrays", lambda self: [])
    early, late = graph_growth(engine)
    assert late > early + 40


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "falcon_h1", "gpt_bigcode"])
def test_nothing_is_held_when_all_are_done(zoo: Zoo, family: str) -> None:
    """Buffers and states are gone with their rows at once, not when Python looks for garbage."""
    engine = engine_driver.make_real_engine(zoo.text(family))
    runner = engine_driver.get_runner(engine)
    asks = [
        engine_driver.make_text_request(str(i), p) for i, p in enumerate(text_models.prompts(2, (3, 90, 20)))
    ]
    engine_driver.run_requests(engine, asks)
    gc.collect()
    gc.disable()
    try:
        mx.synchronize()
        before = mx.get_active_memory()
        engine_driver.run_requests(engine, asks)
        mx.synchronize()
        assert mx.get_active_memory() <= before + 1024
    finally:
        gc.enable()
    assert not runner._rows and runner._decoder.batch.ids == []
    assert sum(a.nbytes for a in find_arrays(runner, set())) < 1024
