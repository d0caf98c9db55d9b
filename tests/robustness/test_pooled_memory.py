"""Texts and chats that share little memory, and clients of either that vanish: the limit holds, each request
ends once, and nobody waits for memory that nobody uses any more.
"""

from __future__ import annotations

import random

import pytest

from mlxrun.core.memory_budget import Footprint, MemoryBudget
from mlxrun.core.request import TokenEvent
from mlxrun.engine.engine import Engine
from mlxrun.engine.scheduler.token_budget import TokenBudget
from mlxrun.engine.workloads.pooling import PoolingQueue, PoolingSteps
from tests.engine.workloads.test_pooling import FakeVectorRunner, make_request
from tests.helpers import engine_fakes
from tests.helpers.storm_counts import count, make_rng

LIMIT = 700  # bytes, of which a token of a text takes one, and a token of the longest chat two
STEPS = 20_000  # a hang


def make_engine() -> Engine:
    memory = MemoryBudget(limit=LIMIT, footprint=Footprint(per_token=1, step=1))
    vectors = FakeVectorRunner()
    return engine_fakes.make_engine(
        settings=engine_fakes.make_settings(prefill_budget=200),
        memory=memory,
        make_pooling=lambda rows: PoolingSteps(vectors, rows, 5, lambda: vectors.now),
    )


class Crowd:
    """Requests that come at random moments, and of which some are aborted. `most`: the most bytes in use;
    `ended`: ids of those that have got their last event."""

    def __init__(self, rng: random.Random, number: int) -> None:
        self.engine = make_engine()
        self.most = 0
        self.ended: list[str] = []
        self.ids = [f"{kind}-{at}" for at in range(number) for kind in ("chat", "text")]
        rng.shuffle(self.ids)
        self._rng = rng

    def run(self) -> None:
        """Until all have ended."""
        left, come = list(self.ids), list[str]()
        for _ in range(STEPS):
            while left and (not self.engine.busy or self._rng.random() < 0.3):
                come.append(left.pop())
                self._add(come[-1])
            if self._rng.random() < 0.15:
                self.engine.abort(self._rng.choice(come))
            events = self.engine.step()
            self.ended += [event.request_id for event in events if event.finish is not None]
            self.most = max(self.most, self._count_bytes())
            if not left and not self.engine.busy:
                return
        raise AssertionError(f"these never end: {sorted({*come} - {*self.ended})}")

    def _add(self, name: str) -> None:
        rng = self._rng
        if name.startswith("text"):
            size = rng.choice((rng.randrange(1, 60), rng.randrange(1, LIMIT)))
            self.engine.add(make_request(name, size, background=rng.random() < 0.5))
        else:
            size = rng.randrange(1, LIMIT // 2 - 5)
            self.engine.add(engine_fakes.make_request(name, size, 5, background=rng.random() < 0.3))
        count("texts and chats that share little memory")

    def _count_bytes(self) -> int:
        """Of the rows without the token that each gets in the next step, and of the texts."""
        pooling, scheduler = self.engine.pooling, self.engine.scheduler
        assert pooling is not None
        rows = [state.projected_length - 1 for state in scheduler.requests if state.running]
        memory = scheduler.limits.memory
        return memory.compute_needed_bytes(rows, 0) + pooling.held_bytes

    def check(self) -> None:
        self.run()
        assert sorted(self.ended) == sorted(self.ids), "each ends once"
        assert self.most <= LIMIT
        assert self.engine.pooling is not None
        queue, budget = self.engine.pooling, self.engine.scheduler.token_budget
        assert queue.count()["running"] == queue.count()["waiting"] == queue.held_bytes == 0
        self.engine.step()
        assert budget.texts.held_bytes == budget.texts.wanted_bytes == 0


@pytest.mark.parametrize("seed", range(12))
def test_texts_and_chats_in_little_memory(seed: int, night: int) -> None:
    Crowd(make_rng(seed, night), 20).check()


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_texts_and_chats_in_little_memory(seed: int, night: int) -> None:
    rng = make_rng(seed, night)
    for _ in range(10):
        Crowd(rng, rng.randrange(5, 60)).check()


def test_a_chat_beside_texts_of_which_nothing_is_counted_would_be_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutation: a lone chat starts, whatever the texts hold."""
    monkeypatch.setattr(
        TokenBudget, "is_shared_with_texts", property(lambda self: self.texts.wanted_bytes > 0)
    )
    with pytest.raises(AssertionError, match="assert [0-9]+ <= 700"):
        for seed in range(12):
            Crowd(random.Random(seed), 20).check()


def run_after_text_is_gone() -> list[str]:
    """A text waits for the memory of a chat, its client vanishes, and a longer chat comes: what has ended."""
    engine, ended = make_engine(), list[str]()
    engine.add(engine_fakes.make_request("first chat", 200, 30))
    engine.step()
    engine.add(make_request("text", 500))
    engine.step()
    engine.abort("text")
    engine.add(engine_fakes.make_request("next chat", 300, 5))
    for _ in range(200):
        ended += [event.request_id for event in engine.step() if event.finish is not None]
    return ended


def test_a_text_that_is_gone_wants_no_memory() -> None:
    assert run_after_text_is_gone() == ["text", "first chat", "next chat"]


def test_memory_that_a_gone_text_still_wants_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: it stays reserved, as it did, and a chat that needs it never starts."""
    abort = PoolingQueue.abort

    def abort_and_want(queue: PoolingQueue, name: str) -> TokenEvent | None:
        wanted, event = queue.wanted_bytes, abort(queue, name)
        queue.wanted_bytes = wanted
        return event

    monkeypatch.setattr(PoolingQueue, "abort", abort_and_want)
    assert run_after_text_is_gone() == ["text", "first chat"]
