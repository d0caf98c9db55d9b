"""Vision models in the engine give what the ORACLE gives, images and text mixed in one batch.

Groups are small, as in test_parity_text.py. That these tests can fail is shown in test_mutations_vision.py.
"""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from PIL import Image

from mlxrun.core.errors import ModelLoadError, RequestError
from mlxrun.core.request import FinishReason, TokenEvent
from mlxrun.core.step_plan import StepPlan, StepResult
from mlxrun.engine.engine import Engine
from mlxrun.model.hooks.tower_blocks import hook_blocks
from mlxrun.model.run import runner
from mlxrun.model.vision.embedder import Embedder
from tests.helpers import engine_driver, text_models, vision_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.model_fixtures import Zoo, mark_sweep
from tests.helpers.oracle import Answer

# By default: positions of three axes, windows and tiles.
EVERY = mark_sweep(vision_models.VISION, vision_models.CORE)
TWO = mark_sweep(vision_models.VISION, ("qwen3_vl", "gemma3"))
MROPE = mark_sweep(vision_models.MROPE, ("qwen3_vl",))

pytestmark = pytest.mark.usefixtures("probed_once")

RED, BLOCKS, WIDE, TALL = (
    vision_models.images(3, 1, size=(32, 32))[0],
    vision_models.images(4, 1, size=(32, 32))[0],
    vision_models.images(5, 1, size=(64, 48))[0],
    vision_models.images(6, 1, size=(32, 64))[0],
)
# Parts of one user turn, where an image stands for itself; or a bare text, or token ids.
CASES: dict[str, Any] = {
    "middle": ("what is ", WIDE, " and tell me more about it, please"),
    "two": (RED, "hm", TALL, "which one?"),
    "long text": text_models.prompts(0, [70])[0],
    "same twice": ("compare ", BLOCKS, " with ", BLOCKS),
    "text": ("just text, no image",),
    "back to back": (TALL, RED, WIDE, "!"),
    "one token": text_models.prompts(0, [1])[0],
    "another": ("what is ", TALL, " and tell me more about it, please"),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_driver.use_small_groups(monkeypatch)


def rendered(family: str, case: Any) -> tuple[Any, list[Image.Image]]:
    """A prompt (text, or ids) and its images."""
    if isinstance(case, list):
        return case, []
    parts = [part if isinstance(part, str) else None for part in case]
    return vision_models.prompt(family, *parts), [part for part in case if not isinstance(part, str)]


def wanted(zoo: Zoo, family: str) -> dict[str, Answer]:
    return {name: zoo.see(family, *rendered(family, case)) for name, case in CASES.items()}


def asks(engine: Engine, family: str, **params: Any) -> list[TimedRequest]:
    return [
        TimedRequest(engine_driver.make_vision_request(engine, name, *rendered(family, case), **params))
        for name, case in CASES.items()
    ]


def all_same(events: dict[str, TokenEvent], answers: dict[str, Answer], count: int | None = None) -> None:
    for name, event in events.items():
        engine_driver.check_answer(event, answers[name], count)


@pytest.mark.parametrize("family", EVERY)
def test_together(zoo: Zoo, family: str) -> None:
    """Images and text in one decode batch; then again, joining while others decode."""
    engine, answers = engine_driver.make_real_engine(zoo.vision(family)), wanted(zoo, family)
    assert engine.load_check is not None
    chosen, padded = engine.load_check.methods, {"gemma3": 8, "qwen3_5": 0}.get(family, 16)
    assert (chosen.decode, chosen.sharing.max_rows, chosen.sharing.max_padded) == ("ragged", 16, padded)
    made = asks(engine, family)
    for ask in made:
        assert ask.request.prompt == answers[ask.id].ids
    all_same(engine_driver.run_requests(engine, made), answers)
    joins = [TimedRequest(a.request, add_step=(0, 9, 1, 30, 3, 12, 5, 20)[i]) for i, a in enumerate(made)]
    all_same(engine_driver.run_requests(engine, joins), answers)


@pytest.mark.parametrize("way", engine_driver.VARIANTS)
@pytest.mark.parametrize("family", TWO)
def test_every_way(zoo: Zoo, family: str, way: str) -> None:
    """Chunk sizes (an image larger than a chunk too), sharing, decode methods."""
    engine = engine_driver.make_real_engine(zoo.vision(family), **engine_driver.VARIANTS[way])
    order = asks(engine, family, max_tokens=10)
    events = engine_driver.run_requests(engine, order if len(way) % 2 else reversed(order))
    assert len(events) == len(CASES)
    all_same(events, wanted(zoo, family), 10)


@pytest.mark.parametrize("family", EVERY)
def test_chunk_boundaries_around_an_image(zoo: Zoo, family: str) -> None:
    """An image moves through the chunk grid: no chunk ends inside it."""
    engine = engine_driver.make_real_engine(zoo.vision(family))
    chunks = watch_chunks(engine)
    requests, answers, edges = [], {}, set()
    for before in range(0, 19, 2 if family == "qwen3_vl" else 3):
        text = vision_models.prompt(family, "x" * before, None, "?", None)
        requests.append(
            engine_driver.make_vision_request(engine, str(before), text, [TALL, BLOCKS], max_tokens=6)
        )
        answers[str(before)] = zoo.see(family, text, [TALL, BLOCKS], count=6)
    all_same(engine_driver.run_requests(engine, requests), answers)
    for request in requests:
        assert len(request.image_spans) >= 2
        stops = {stop for name, stop in chunks if name == request.id}
        for start, end in request.image_spans:
            assert not any(start < stop < end for stop in stops)
            edges |= {"before"} if start in stops else set()
            edges |= {"after"} if end in stops else set()
    assert edges == {"before", "after"}  # a chunk ends right before an image, and one with its last token


def watch_chunks(engine: Engine) -> list[tuple[str, int]]:
    """The end of every chunk from now on."""
    runner = engine_driver.get_runner(engine)
    original, chunks = runner.execute, []

    def execute(plan: StepPlan) -> StepResult:
        chunks.extend((c.request_id, c.stop) for c in plan.prefill)
        return original(plan)  # type: ignore[no-any-return]

    runner.execute = execute
    return chunks


def test_images_whose_tokens_are_not_known_share_nothing(zoo: Zoo) -> None:
    """As of a model whose config does not name them: equal token ids, other images."""
    engine = engine_driver.make_real_engine(zoo.vision("qwen3_vl"))
    text = vision_models.prompt("qwen3_vl", "what is ", None, " and tell me more about it, please")
    for name, image in zip("ab", vision_models.images(3, 2, size=(32, 32)), strict=True):
        known = engine_driver.make_vision_request(engine, name, text, [image], max_tokens=6)
        request = replace(known, image_spans=(), image_digests=())
        event = engine_driver.run_requests(engine, [request])[name]
        engine_driver.check_answer(event, zoo.see("qwen3_vl", text, [image]), 6)


@pytest.mark.parametrize("family", EVERY)
def test_a_prompt_may_end_in_an_image_or_be_one(zoo: Zoo, family: str) -> None:
    """Nothing is left for the decode batch to start with: the last chunk samples; also after preemption."""
    engine = engine_driver.make_real_engine(zoo.vision(family))
    image = vision_models.placeholder(family)
    cases = {"ends": ("look: " + image, [WIDE]), "only": (image, [RED]), "two": (image + image, [TALL, RED])}
    answers = {name: zoo.see(family, *case) for name, case in cases.items()}
    requests = [engine_driver.make_vision_request(engine, name, *case) for name, case in cases.items()]
    all_same(
        engine_driver.run_requests(engine, [*requests, engine_driver.make_text_request("0", [65, 66])]),
        answers | {"0": zoo.see(family, [65, 66])},
    )
    all_same(engine_driver.run_requests(engine, requests, push_out(engine)), answers)


def push_out(engine: Engine) -> Any:
    """Preempts every row now and then: prompt and answer so far are computed again."""

    def preempt(step: int) -> None:
        if step % 7 == 5 and step < 30:
            for entry in engine.scheduler.requests:
                if entry.running:
                    engine.scheduler.preempt(entry)  # type: ignore[arg-type]

    return preempt


@pytest.mark.parametrize("family", TWO)
def test_preempted_rows_with_images(zoo: Zoo, family: str) -> None:
    """A row that is pushed out comes back with its images, and with answer tokens that have no embeddings."""
    engine = engine_driver.make_real_engine(zoo.vision(family))
    made = asks(engine, family, max_tokens=16)
    all_same(engine_driver.run_requests(engine, made, push_out(engine)), wanted(zoo, family), 16)


@pytest.mark.parametrize("family", EVERY)
def test_fuzz(zoo: Zoo, family: str) -> None:
    """Random joins, aborts, limits and preemptions."""
    rng = np.random.default_rng(8)
    engine, answers = (
        engine_driver.make_real_engine(zoo.vision(family), max_running=5),
        wanted(zoo, family),
    )
    todo, limits = [], {}
    for number in range(16):
        name = str(rng.choice(list(CASES)))
        limits[f"{number} {name}"] = count = int(rng.integers(1, engine_driver.COUNT + 1))
        made = engine_driver.make_vision_request(
            engine, f"{number} {name}", *rendered(family, CASES[name]), max_tokens=count
        )
        joins = int(rng.integers(0, 30))
        todo.append(
            TimedRequest(made, joins, joins + int(rng.integers(0, 30)) if rng.random() < 0.3 else None)
        )

    def preempt(step: int) -> None:
        for entry in engine.scheduler.requests:
            if entry.running and rng.random() < 0.02:
                engine.scheduler.preempt(entry)  # type: ignore[arg-type]

    events = engine_driver.run_requests(engine, todo, preempt)
    for name, event in events.items():
        engine_driver.check_partial_answer(event, answers[name.split(" ", 1)[1]], limits[name])
    assert sum(e.finish is FinishReason.LENGTH for e in events.values()) > 7


@pytest.mark.parametrize("family", TWO)
def test_text_only(zoo: Zoo, family: str) -> None:
    """A vision model that never sees an image, or has just seen one."""
    engine = engine_driver.make_real_engine(zoo.vision(family))
    texts = {str(n): ids for n, ids in enumerate(text_models.prompts(2, [1, 3, 30]))}
    answers = {name: zoo.see(family, ids) for name, ids in texts.items()}
    requests = [engine_driver.make_text_request(name, ids) for name, ids in texts.items()]
    all_same(engine_driver.run_requests(engine, requests), answers)
    engine_driver.run_requests(
        engine, [engine_driver.make_vision_request(engine, "seen", *rendered(family, CASES["two"]))]
    )
    all_same(engine_driver.run_requests(engine, requests), answers)


@pytest.mark.parametrize("family", MROPE)
def test_served_as_a_text_model(zoo: Zoo, family: str) -> None:
    """`model.kind: text` loads the text part of the same files through the other library."""
    engine = engine_driver.make_real_engine(zoo.vision(family), kind="text")
    texts = {str(n): ids for n, ids in enumerate(text_models.prompts(2, [1, 3, 30]))}
    events = engine_driver.run_requests(
        engine, [engine_driver.make_text_request(name, ids) for name, ids in texts.items()]
    )
    all_same(events, {name: zoo.see(family, ids) for name, ids in texts.items()})


@pytest.mark.parametrize("kind", ["text", "vision"])
def test_missing_weights_are_not_made_up(zoo: Zoo, kind: str, tmp_path: Path) -> None:
    """A text part may leave the vision tower's weights; none of its own may be absent."""
    folder = tmp_path / "model"
    shutil.copytree(zoo.vision("qwen3_vl"), folder)
    file = str(folder / "model.safetensors")
    weights = mx.load(file)
    del weights["language_model.model.layers.1.mlp.down_proj.weight"]
    mx.save_safetensors(file, weights, metadata={"format": "mlx"})
    with pytest.raises(ModelLoadError, match=r"(?s)[Mm]issing.*layers\.1\.mlp\.down_proj"):
        engine_driver.make_real_engine(folder, kind=kind)


@pytest.mark.parametrize("family", MROPE)
def test_nothing_is_read_from_the_shared_module(zoo: Zoo, family: str) -> None:
    """Positions and deltas that another request left on the language model change nothing."""
    engine, answers = engine_driver.make_real_engine(zoo.vision(family)), wanted(zoo, family)
    language = engine_driver.get_runner(engine)._caller.model.language_model

    def poison(step: int) -> None:
        language._rope_deltas = mx.array([[1000 + step]])
        language._position_ids = mx.full((3, 1, 500), 77 + step)

    poison(0)
    all_same(engine_driver.run_requests(engine, asks(engine, family), poison), answers)


@pytest.mark.parametrize("family", EVERY)
def test_an_image_is_encoded_once(zoo: Zoo, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One pass through the vision tower for each image, however many chunks and steps its request takes; and
    two at the first prompt with several, to see whether they may be encoded one by one. Pixtral's processor
    pads the images of a prompt to one size: an image beside a larger one has other pixels."""
    engine = engine_driver.make_real_engine(zoo.vision(family), chunk=5, prefill_budget=10)
    caller = engine_driver.get_runner(engine)._caller
    calls: list[str] = []
    original = type(caller.model).get_input_embeddings

    def counted(*args: Any, **kwargs: Any) -> Any:
        if args[2] is not None:
            calls.append(family)
        return original(*args, **kwargs)

    monkeypatch.setattr(type(caller.model), "get_input_embeddings", counted)
    engine_driver.run_requests(engine, asks(engine, family))
    images = {id(part) for case in CASES.values() for part in case if isinstance(part, Image.Image)}
    assert 0 < len(calls) <= len(images) + 2 + (family == "pixtral")


@pytest.mark.parametrize("family", TWO)
def test_a_request_whose_images_fail_fails_alone(zoo: Zoo, family: str) -> None:
    """Pixels that the vision tower refuses."""
    engine, answers = engine_driver.make_real_engine(zoo.vision(family)), wanted(zoo, family)
    good = asks(engine, family)
    broken = good[0].request
    media = {key: value[..., :1] for key, value in broken.media.items()}
    bad = replace(broken, id="bad", media=media, image_digests=(b"other",) * len(broken.image_digests))
    events = engine_driver.run_requests(engine, [*good[:3], TimedRequest(bad, add_step=1), *good[3:]])
    event = events.pop("bad")
    assert event.finish is FinishReason.ERROR
    assert isinstance(event.error, RequestError)
    assert not event.tokens
    all_same(events, answers)


def test_a_text_model_takes_no_images(zoo: Zoo) -> None:
    """The request fails alone, with a reason."""
    engine = engine_driver.make_real_engine(zoo.text("llama"))
    prompt = text_models.prompts(0, [33])[0]
    media = replace(engine_driver.make_text_request("media", prompt), media={"pixel_values": np.zeros(1)})
    events = engine_driver.run_requests(engine, [engine_driver.make_text_request("text", prompt), media])
    engine_driver.check_answer(events["text"], zoo.answer("llama", prompt))
    assert events["media"].finish is FinishReason.ERROR
    assert "takes no images" in str(events["media"].error)


def make_pair(family: str, seed: int = 5) -> tuple[str, list[Image.Image]]:
    """A prompt with two images and text behind them."""
    text = vision_models.prompt(family, "what is in ", None, " and in ", None, " tell me all of it, please")
    return text, vision_models.images(seed, 2)


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "idefics3"])
def test_two_images_in_a_prefix_of_an_earlier_process(zoo: Zoo, family: str, tmp_path: Path) -> None:
    """Both lie in the prefix that is read from disk, and this process has seen no image yet."""
    prompt, images = make_pair(family)
    for name in ("first", "again"):
        engine = engine_driver.make_real_engine(
            zoo.vision(family), backend="disk", disk_path=str(tmp_path / "cache")
        )
        request = engine_driver.make_vision_request(engine, name, prompt, images, max_tokens=4)
        event = engine_driver.run_requests(engine, [TimedRequest(request)])[name]
        assert (event.num_cached_tokens > request.image_spans[-1][1]) == (name == "again")
        engine.prefix_cache.shutdown()
        engine_driver.check_answer(event, zoo.see(family, prompt, images, 4), 4)


def test_an_image_that_fails_when_its_chunk_comes_fails_alone(
    zoo: Zoo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six requests whose second image cannot be encoded, and a row of text: no step fails."""
    family = "qwen3_vl"
    engine = engine_driver.make_real_engine(zoo.vision(family), backend="none", max_running=8)
    prompt, images = make_pair(family)
    warm = engine_driver.make_vision_request(engine, "warm", prompt, images, max_tokens=2)
    engine_driver.run_requests(engine, [TimedRequest(warm)])

    def fail(self: Any, tokens: Any, media: Any) -> Any:
        raise RuntimeError("[malloc] Unable to allocate")

    monkeypatch.setattr(Embedder, "embed_prompt", fail)
    bad = [
        engine_driver.make_vision_request(
            engine, f"bad {seed}", prompt, [images[0], vision_models.images(seed, 1)[0]], max_tokens=4
        )
        for seed in range(99, 105)
    ]
    ids = text_models.prompts(3, [30])[0]
    good = engine_driver.make_text_request("good", ids)
    events = engine_driver.run_requests(engine, [TimedRequest(each) for each in (*bad, good)])
    assert {events[each.id].finish for each in bad} == {FinishReason.ERROR}
    assert "Unable to allocate" in str(events["bad 99"].error)
    assert engine.generation.errors == 0
    engine_driver.check_answer(events["good"], zoo.see(family, ids, [], engine_driver.COUNT))


@pytest.mark.parametrize("family", TWO)
def test_a_document_of_many_pages_holds_nobody_up(
    zoo: Zoo, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two tokens of a row, a step computes one block of the vision tower. All answers are those alone
    and cold."""
    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=itertools.count().__next__))
    engine = engine_driver.make_real_engine(zoo.vision(family), step_ms=200)
    parts = count_parts(engine, monkeypatch)
    pages = vision_models.images(7, 20, size=(32, 32))
    texts = {
        "document": vision_models.prompt(family, *(part for _ in pages for part in ("p", None)), "?"),
        "row": text_models.prompts(1, [30])[0],
        "short": text_models.prompts(2, [9])[0],
    }
    images = {"document": pages}
    counts = {"document": 6, "row": 150, "short": 3}
    made = {
        name: engine_driver.make_vision_request(
            engine, name, text, images.get(name, []), max_tokens=counts[name]
        )
        for name, text in texts.items()
    }
    sent = [
        TimedRequest(made[name], add_step=at) for name, at in (("row", 0), ("document", 5), ("short", 40))
    ]
    events = engine_driver.run_requests(engine, sent)
    for name, event in events.items():
        answer = zoo.see(family, texts[name], images.get(name, []), count=counts[name])
        engine_driver.check_answer(event, answer, counts[name])
    blocks = hook_blocks(engine_driver.get_runner(engine)._caller.model)
    assert set(parts) == {0, 1} and sum(parts) == len(pages) * blocks


def count_parts(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parts of images each step computes from now on."""
    own = engine_driver.get_runner(engine)
    execute, encode, parts = own.execute, own._caller.encode_part, list[int]()

    def count_step(plan: StepPlan) -> StepResult:
        parts.append(0)
        return execute(plan)  # type: ignore[no-any-return]

    def count_part(*given: Any, **named: Any) -> Any:
        parts[-1] += 1
        return encode(*given, **named)

    monkeypatch.setattr(own, "execute", count_step)
    monkeypatch.setattr(own._caller, "encode_part", count_part)
    return parts


def test_a_prompt_that_is_cached_whole_has_its_positions(zoo: Zoo) -> None:
    """Those behind its images, also where features are not cached: no chunk has them encoded then."""
    family, case = "qwen3_vl", CASES["middle"]
    engine = engine_driver.make_real_engine(zoo.vision(family), chunk=8, image_bytes=0)
    for _ in range(2):
        request = engine_driver.make_vision_request(engine, "again", *rendered(family, case))
        event = engine_driver.run_requests(engine, [request])["again"]
        engine_driver.check_answer(event, zoo.see(family, *rendered(family, case)))
    assert event.num_cached_tokens == len(request.prompt) - 1
