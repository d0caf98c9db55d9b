"""The engine over small real models: the real runner, and the real thread where threads matter."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.core.request import Request, TokenEvent
from mlxrun.engine.build import build_engine
from mlxrun.engine.client import EngineClient
from mlxrun.engine.engine import Engine
from mlxrun.model.kv.snapshot.copier import SnapshotCopier
from mlxrun.model.kv.snapshot.snapshots import SnapshotCodec
from mlxrun.model.run import runner as runner_module
from mlxrun.model.run.runner import ModelRunner
from tests.helpers import engine_driver, text_models, vision_models
from tests.helpers.engine_fakes import merge_events
from tests.helpers.model_fixtures import Zoo

pytestmark = pytest.mark.thorough

BASE = tuple(text_models.prompts(41, [75])[0])
OTHER = tuple(text_models.prompts(42, [75])[0])


# -- prefill ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["memory", "none"])
def test_a_prompt_is_always_computed_in_chunks(zoo: Zoo, backend: str) -> None:
    """40 tokens in chunks of 5, each with an event of its progress; the answer equals the ORACLE's."""
    sizes = {"chunk": 5, "prefill_budget": 5, "prefill_budget_busy": 5}
    engine = engine_driver.make_real_engine(zoo.text("llama"), backend=backend, **sizes)
    engine.add(engine_driver.make_text_request("a", BASE[:40]))
    events = []
    while engine.busy:
        events += engine.step()
    progress = [event.num_computed_tokens for event in events if not event.tokens and event.finish is None]
    assert len(progress) >= 8 and progress == sorted(set(progress))
    assert all(b - a <= 5 for a, b in zip([0, *progress], progress, strict=False))
    whole = events[0]
    for event in events[1:]:
        whole = merge_events(whole, event)
    engine_driver.check_answer(whole, zoo.answer("llama", BASE[:40]))


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2"])
def test_steps_of_a_millisecond(zoo: Zoo, family: str) -> None:
    """The shortest steps, of 64 tokens: the answers are those of whole chunks."""
    sizes = {"chunk": 256, "prefill_budget": 1024, "prefill_budget_busy": 256}
    prompts = {str(n): ids for n, ids in enumerate(text_models.prompts(44, [300, 77, 190]))}
    answers, steps = [], []
    for step_ms in (1, 0):
        engine = engine_driver.make_real_engine(zoo.text(family), step_ms=step_ms, **sizes)
        requests = [
            engine_driver.TimedRequest(engine_driver.make_text_request(*each)) for each in prompts.items()
        ]
        events = engine_driver.run_requests(engine, requests)
        answers.append({name: event.tokens for name, event in events.items()})
        steps.append(engine.generation.steps)
    assert answers[0] == answers[1] and steps[0] > steps[1]


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_a_prompt_of_ten_windows(zoo: Zoo, family: str) -> None:
    """Windows of 8, prompts of 80 and more in chunks of 5, alone and beside each other."""
    engine = engine_driver.make_real_engine(
        zoo.text(family), chunk=5, prefill_budget=20, prefill_budget_busy=5
    )
    prompts = {str(n): ids for n, ids in enumerate(text_models.prompts(43, [80, 83, 97]))}
    for name, event in engine_driver.run_requests(
        engine, [engine_driver.make_text_request(n, ids) for n, ids in prompts.items()]
    ).items():
        engine_driver.check_answer(event, zoo.answer(family, prompts[name]))


# -- memory -----------------------------------------------------------------------------------------------


def test_free_buffers_are_given_back_rarely(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every few steps: at most once in 256, and only if there is much to give back."""
    cleared: list[int] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(1))
    engine = engine_driver.make_real_engine(zoo.text("llama"))
    steps = 0

    def count(step: int) -> None:
        nonlocal steps
        steps = step

    cleared.clear()
    engine_driver.run_requests(engine, [engine_driver.make_text_request("a", BASE, max_tokens=300)], count)
    assert steps > 256 and not cleared  # a tiny model's pool is not worth it
    monkeypatch.setattr(runner_module, "POOL_LIMIT", -1)
    engine_driver.run_requests(engine, [engine_driver.make_text_request("b", BASE, max_tokens=300)], count)
    assert 1 <= len(cleared) <= steps // 256 + 1


# -- one thread -------------------------------------------------------------------------------------------


class Watched:
    """Where MLX is asked to compute, and by which thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for owner, name in (
                (mx, "eval"),
                (mx, "async_eval"),
                (mx, "synchronize"),
                (mx, "clear_cache"),
                (mx, "clear_streams"),
                (ModelRunner, "execute"),
                (ModelRunner, "collect"),
                (ModelRunner, "reset"),
                (ModelRunner, "close"),
                (SnapshotCopier, "copy_rows"),
                (SnapshotCodec, "restore"),
                (SnapshotCodec, "encode"),
                (SnapshotCodec, "decode"),
            ):
                patch.setattr(owner, name, self._spy(f"{owner.__name__}.{name}", getattr(owner, name)))
            yield

    def _spy(self, name: str, real: Any) -> Any:
        def spy(*given: Any, **named: Any) -> Any:
            self.calls.append((name, threading.get_ident()))
            return real(*given, **named)

        return spy

    def threads(self) -> set[int]:
        return {thread for _, thread in self.calls}

    def names(self) -> set[str]:
        return {name for name, _ in self.calls}


async def collect(client: EngineClient, request: Request) -> list[TokenEvent]:
    events = []
    async with aclosing(client.generate(request)) as answers:
        async for event in answers:
            events.append(event)
    return events


def tokens(events: Sequence[TokenEvent]) -> tuple[int, ...]:
    return tuple(token for event in events for token in event.tokens)


async def test_all_of_mlx_is_on_one_thread(zoo: Zoo, tmp_path: Any) -> None:
    """Load, load_check, images, steps, aborts, hits from disk, saves and the end of it all, with
    several streams at once, text and images. Images are prepared beside it, as a server does."""
    config = engine_driver.make_config(zoo.vision("qwen3_vl"), backend="disk", disk_path=str(tmp_path))
    watched = Watched()
    owner: list[int] = []

    def build() -> Engine:
        owner.append(threading.get_ident())
        return build_engine(config)

    images = vision_models.images(7, 2, size=(64, 48))
    prompts = [vision_models.prompt("qwen3_vl", "what is ", None, end) for end in ("?", " here, and why?")]
    with watched.watching():
        for _ in range(2):  # the second engine finds on disk what the first one left
            owner.clear()
            watched.calls.clear()
            client = await EngineClient.start_with(build)
            try:
                make = partial(engine_driver.make_vision_request, client._ready.result())
                requests = [
                    await asyncio.to_thread(make, f"{i}", prompt, [image], max_tokens=12)
                    for i, (prompt, image) in enumerate(zip(prompts, images, strict=True))
                ]
                requests.append(engine_driver.make_text_request("text", BASE, max_tokens=12))
                leaving = asyncio.create_task(
                    collect(client, engine_driver.make_text_request("gone", OTHER, max_tokens=500))
                )
                found = await asyncio.gather(*(collect(client, request) for request in requests))
                leaving.cancel()
                again = await collect(client, replace(requests[0], id="again"))
            finally:
                await client.close()
            assert watched.threads() == set(owner) and threading.get_ident() not in owner
    assert {
        "ModelRunner.execute",
        "ModelRunner.close",
        "SnapshotCodec.restore",
        "SnapshotCodec.decode",
    } <= watched.names()
    for prompt, image, events in zip(prompts, images, found, strict=False):
        assert tokens(events) == tuple(zoo.see("qwen3_vl", prompt, [image], 12).tokens)
    assert tokens(found[2]) == tuple(zoo.see("qwen3_vl", BASE, (), 12).tokens)
    assert tokens(again) == tokens(found[0])
    assert again[-1].num_cached_tokens == len(requests[0].prompt) - 1


async def test_work_on_another_thread_is_seen(zoo: Zoo) -> None:
    """The twin: one evaluation on the loop's thread."""
    watched, owner = Watched(), list[int]()

    def build() -> Engine:
        owner.append(threading.get_ident())
        return build_engine(engine_driver.make_config(zoo.text("llama")))

    with watched.watching():
        client = await EngineClient.start_with(build)
        await collect(client, engine_driver.make_text_request("a", BASE, max_tokens=2))
        mx.eval(mx.array([1]) + 1)
        await client.close()
    assert watched.threads() == {*owner, threading.get_ident()}


async def test_answers_to_images_come_token_by_token(zoo: Zoo) -> None:
    """Five events or more, each as soon as its token is known, and together the whole answer."""
    client = await EngineClient.start(engine_driver.make_config(zoo.vision("gemma3")))
    try:
        image = vision_models.images(8, 1)
        prompt = vision_models.prompt("gemma3", "what is ", None, "?")
        request = await asyncio.to_thread(
            engine_driver.make_vision_request, client._ready.result(), "a", prompt, image, max_tokens=16
        )
        events = await collect(client, request)
        assert sum(bool(event.tokens) for event in events) >= 5
        assert tokens(events) == tuple(zoo.see("gemma3", prompt, image, 16).tokens)
    finally:
        await client.close()
