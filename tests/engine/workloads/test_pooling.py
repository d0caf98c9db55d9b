"""Slices between steps: their size, who goes first, and what a failure costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxrun.config.settings import Config, ModelSettings, SchedulerSettings
from mlxrun.core.errors import EngineDead, RequestError
from mlxrun.core.memory_budget import Footprint, MemoryBudget, RequestLimits
from mlxrun.core.request import FinishReason, Request, SamplingParams
from mlxrun.core.step_plan import PoolingBatch, SampledToken, StepResult
from mlxrun.engine.build import build_engine
from mlxrun.engine.scheduler.prefill_pace import PrefillPace
from mlxrun.engine.scheduler.scheduler import Scheduler
from mlxrun.engine.workloads.pooling import PoolingSteps
from tests.helpers import engine_fakes
from tests.helpers.text_models import build


class FakeVectorRunner:
    """Takes a millisecond of a fake clock for each token, and fails for texts that begin with 13."""

    max_rows, max_tokens, max_padding, takes_whole_texts, checks = 256, 10_000, None, False, ()

    def __init__(self) -> None:
        self.now = 0.0
        self.slices: list[int] = []
        self.dead = False  # also a trial fails
        self.trials = 0

    def advance(self, batch: PoolingBatch, tokens: int) -> Sequence[bytes] | None:
        if any(request.prompt[0] == 13 for request in batch.requests):
            raise ValueError("bad text")
        stop = min(batch.length, batch.computed + max(1, tokens // len(batch.requests)))
        self.slices.append((stop - batch.computed) * len(batch.requests))
        self.now += self.slices[-1] / 1000
        batch.computed = stop
        return [b"v"] * len(batch.requests) if stop == batch.length else None

    def compute_trial(self) -> None:
        self.trials += 1
        if self.dead:
            raise ValueError("bad text")

    def close(self) -> None: ...


def make_request(name: str, size: int, first: int = 1, **options: Any) -> Request:
    ids = (first, *range(1, size))
    return Request(name, ids, SamplingParams(max_tokens=0), pooled=True, **options)


def make_steps(
    runner: FakeVectorRunner, step_ms: int = 200, max_errors: int = 5, *, decoding: bool = False
) -> PoolingSteps:
    """`decoding`: whether a row decodes meanwhile."""
    settings = SchedulerSettings(step_ms=step_ms, prefill_budget_busy=256)
    scheduler = Scheduler(settings, RequestLimits(1000))
    if decoding:
        scheduler.add(Request("chat", (1,), SamplingParams(max_tokens=5)))
        plan = scheduler.schedule()
        scheduler.update(plan, StepResult({"chat": (SampledToken(1),)}))
        assert [state.decoding for state in scheduler.requests] == [True]
    return PoolingSteps(runner, scheduler, max_errors, lambda: runner.now)


def run(steps: PoolingSteps) -> list[str]:
    found = []
    while steps.is_busy:
        found += [event.request_id for event in steps.step()]
    return found


def test_slices_take_as_long_as_a_step_may() -> None:
    runner = FakeVectorRunner()
    steps = make_steps(runner)
    steps.add(make_request("a", 1000))
    assert run(steps) == ["a"]
    assert runner.slices[0] == 64 and sum(runner.slices) == 1000
    assert max(runner.slices) in (199, 200) and runner.slices[1] >= 199


def test_slices_beside_decoding_rows_are_small() -> None:
    runner = FakeVectorRunner()
    steps = make_steps(runner, step_ms=0, decoding=True)
    steps.add(make_request("a", 1000))
    run(steps)
    assert max(runner.slices) == 256
    steps = make_steps(runner, step_ms=0)
    steps.add(make_request("b", 1000))
    run(steps)
    assert runner.slices[-1] == 1000


def test_a_text_that_fails_harms_no_other() -> None:
    steps = make_steps(FakeVectorRunner())
    for name, first in (("a", 1), ("b", 13), ("c", 1)):
        steps.add(make_request(name, 5, first))
    found = []
    while steps.is_busy:
        found += steps.step()
    ended = {event.request_id: event.finish for event in found}
    assert ended == {"a": FinishReason.STOP, "b": FinishReason.ERROR, "c": FinishReason.STOP}


def test_texts_that_fail_do_not_stop_the_engine() -> None:
    runner = FakeVectorRunner()
    steps = make_steps(runner, max_errors=2)
    for at in range(5):
        steps.add(make_request(f"bad{at}", 5, 13))
        assert steps.step()[0].finish is FinishReason.ERROR
    assert runner.trials == 2


def test_failures_between_which_a_text_is_computed_are_no_streak() -> None:
    runner = FakeVectorRunner()
    steps = make_steps(runner, max_errors=2)
    for at in range(3):
        steps.add(make_request(f"bad{at}", 5, 13))
        steps.add(make_request(f"good{at}", 500))
        assert run(steps) == [f"bad{at}", f"good{at}"]
    assert runner.trials == 0


def test_a_device_that_is_gone_stops_the_engine() -> None:
    runner = FakeVectorRunner()
    runner.dead = True
    steps = make_steps(runner, max_errors=2)
    steps.add(make_request("a", 5, 13))
    assert steps.step()[0].finish is FinishReason.ERROR
    steps.add(make_request("b", 5, 13))
    with pytest.raises(EngineDead, match="2 batches of texts failed in a row"):
        steps.step()


def test_chats_and_texts_share_an_engine(tmp_path: Path) -> None:
    """A chat model with model.pooling: a long background text is computed between the steps of a chat, not
    in those that have its prompt."""
    folder = build("llama", tmp_path / "model")
    engine = build_engine(
        Config(
            model=ModelSettings(path=str(folder), pooling="mean"),
            scheduler=SchedulerSettings(step_ms=0, chunk=16, prefill_budget=16),
        )
    )
    assert engine.model_info.pooled is not None and engine.model_info.pooled.generates
    engine.add(make_request("text", 200, background=True))
    engine.add(Request("chat", tuple(range(1, 40)), SamplingParams(max_tokens=6)))
    tokens, order = 0, []
    while engine.busy:
        for event in engine.step():
            tokens += len(event.tokens)
            if event.finish is not None:
                order.append(event.request_id)
                assert event.finish is FinishReason.LENGTH if event.request_id == "chat" else event.vector
    assert order == ["chat", "text"] and tokens == 6


def run_crowd(*, blind: bool = False) -> tuple[int, list[str]]:
    """The most bytes in use while chats and texts come that do not fit in memory together, and the order in
    which they end. `blind`: texts are not counted."""
    memory = MemoryBudget(limit=700, footprint=Footprint(per_token=1, step=1))
    vectors = FakeVectorRunner()
    engine = engine_fakes.make_engine(
        memory=memory,
        make_pooling=lambda rows: PoolingSteps(vectors, rows, 5, lambda: vectors.now),
    )
    assert engine.pooling is not None
    if blind:
        engine.pooling._memory = MemoryBudget()
    for at in range(8):
        engine.add(engine_fakes.make_request(f"chat {at}", 100, 30))
        engine.add(make_request(f"text {at}", 200))
    peak, order = 0, []
    while engine.busy:
        order += [event.request_id for event in engine.step() if event.finish is not None]
        rows = [s.projected_length for s in engine.scheduler.requests if s.running]
        texts = [r for batch in engine.pooling._batches.values() for r in batch.requests]
        peak = max(peak, memory.compute_needed_bytes(rows, 0) + sum(len(r.prompt) for r in texts))
    return peak, order


def test_an_id_is_one_request_whatever_it_asks_for() -> None:
    """Of one that waits, of one in a batch under way, and of a chat."""
    vectors = FakeVectorRunner()
    engine = engine_fakes.make_engine(
        make_pooling=lambda rows: PoolingSteps(vectors, rows, 5, lambda: vectors.now)
    )
    engine.add(make_request("text", 200))
    engine.add(engine_fakes.make_request("chat", 30))
    for _ in range(2):
        for taken in (make_request("text", 3), make_request("chat", 3), engine_fakes.make_request("text", 3)):
            with pytest.raises(RequestError, match="is already running"):
                engine.add(taken)
        engine.step()
    while engine.busy:
        engine.step()
    engine.add(make_request("chat", 3))


def test_chats_and_texts_share_the_memory() -> None:
    """A text that waits for memory gets it before chats that come later. The twin counts no texts."""
    peak, order = run_crowd()
    assert peak <= 700 and len(order) == 16
    assert order.index("text 0") < order.index("chat 4"), "chats that came later go on for ever"
    assert run_crowd(blind=True)[0] > 700


def test_a_model_without_vectors_refuses_texts(tmp_path: Path) -> None:
    engine = build_engine(Config(model=ModelSettings(path=str(build("llama", tmp_path / "model")))))
    with pytest.raises(RequestError, match="gives no embeddings"):
        engine.add(make_request("text", 3))


def test_the_time_between_texts_and_a_chat_is_that_of_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text ends after a chat; what passes until the next chat does not count as its first step."""
    config = Config(
        model=ModelSettings(path=str(build("llama", tmp_path / "model")), pooling="mean"),
        scheduler=SchedulerSettings(step_ms=0, chunk=16, prefill_budget=16),
    )
    engine, clock, seconds = build_engine(config), FakeVectorRunner(), []
    monkeypatch.setattr("mlxrun.engine.workloads.generation.time.monotonic", lambda: clock.now)
    monkeypatch.setattr(PrefillPace, "record_step", lambda self, plan, before, took: seconds.append(took))
    engine.add(make_request("text", 200, background=True))
    for name in ("first", "second"):
        engine.add(Request(name, tuple(range(1, 40)), SamplingParams(max_tokens=6)))
        while engine.busy:
            engine.step()
        clock.now += 1000
    assert len(seconds) > 10 and not any(seconds)
