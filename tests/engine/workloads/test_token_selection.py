"""Which prompts a draft model reads, in which order and slices, and what a request becomes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mlxrun.config.settings import PrefillSettings, SchedulerSettings
from mlxrun.core.errors import Overloaded
from mlxrun.core.request import FinishReason, Request, SamplingParams
from mlxrun.engine.scheduler.prefix_cache_interface import PrefixCacheInterface
from mlxrun.engine.scheduler.scheduler import Scheduler
from mlxrun.engine.workloads.token_selection import REMEMBERED, TokenSelection


class FakeReader:
    """Takes a millisecond of a fake clock for each token, and keeps every second token and the last one."""

    max_tokens = 5000

    def __init__(self) -> None:
        self.now = 0.0
        self.slices: list[int] = []
        self.started: list[int] = []
        self._left = self._size = self._known = 0
        self.read = False  # whether it holds arrays of a prompt

    def start(self, tokens: Sequence[int], known: int = 0) -> None:
        self._left = self._size = len(tokens)
        self._known, self.read = known, True
        self.started.append(self._size)

    def advance(self, limit: int) -> tuple[int, ...] | None:
        if self._size == 666:
            raise ValueError("bad prompt")
        self.slices.append(min(limit, self._left))
        self.now += self.slices[-1] / 1000
        self._left -= self.slices[-1]
        kept = {*range(self._known), *range(0, self._size, 2), self._size - 1}
        return None if self._left else tuple(sorted(kept))

    def drop(self) -> None:
        self.read = False

    def close(self) -> None: ...


class CacheOf(PrefixCacheInterface):
    """Has so many tokens of every prompt."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def count_cached(self, request: Request) -> int:
        return self._tokens


class Taken(Scheduler):
    """Keeps the requests that it gets, of which none runs. `busy`: whether another row decodes."""

    busy = False

    def __init__(self, settings: SchedulerSettings, cached: int) -> None:
        self.settings = settings
        self.prefix_cache = CacheOf(cached)
        self.taken: list[Request] = []

    def add(self, request: Request) -> None:
        self.taken.append(request)

    @property
    def requests(self) -> Sequence[Any]:
        return [SimpleNamespace(decoding=self.busy)]


def make(cached: int = 0, *, decoding: bool = False, **settings: Any) -> tuple[TokenSelection, FakeReader]:
    reader = FakeReader()
    scheduler = Taken(
        SchedulerSettings(**{"prefill_budget": 400, "prefill_budget_busy": 100, "step_ms": 0} | settings),
        cached,
    )
    scheduler.busy = decoding
    prefill = PrefillSettings("draft", 0.5, 500)
    return TokenSelection(reader, prefill, scheduler, lambda: reader.now), reader


def ask(name: str, size: int = 1000, **fields: Any) -> Request:
    params = SamplingParams(**fields.pop("params", {}))
    return Request(name, tuple(range(size)), params, **fields)


def run(selection: TokenSelection) -> list[Request]:
    """What the scheduler gets."""
    while selection.is_busy:
        assert selection.step() == []
    found, selection._scheduler.taken = selection._scheduler.taken, []
    return found


def test_long_prompts_of_text_that_are_not_cached_are_taken() -> None:
    selection, _ = make()
    assert selection.takes(ask("a", 500)) and selection.takes(ask("a", 5000))
    refused = [
        ask("short", 499),
        ask("beyond the draft model's context", 5001),
        ask("switched off", sparse=False),
        ask("scored", params={"prompt_logprobs": 0}),
        ask("without an answer", params={"max_tokens": 0}),
        ask("with an image", image_spans=((3, 9),), media={}),
        ask("chosen already", positions=(1, 2)),
    ]
    assert [each.id for each in refused if selection.takes(each)] == []
    selection, _ = make(cached=501)
    assert not selection.takes(ask("a", 1000)) and selection.takes(ask("a", 1001))
    selection.add(ask("a", 1001))
    (ready,) = run(selection)
    assert ready.positions == (*range(501), *range(502, 1001, 2)), "what is cached is kept"


def test_what_is_left_of_a_request() -> None:
    selection, reader = make()
    selection.add(ask("a", 1000, cache_positions=(7,)))
    (ready,) = run(selection)
    assert reader.slices == [400, 400, 200]
    assert ready.positions == ready.prompt == (*range(0, 1000, 2), 999)
    assert ready.left_out == frozenset(range(1, 999, 2)) and ready.num_left_out == 499
    assert ready.cache_positions == ()
    described = {"method": "draft", "waiting": 0, "prompts": 1, "tokens": 1000, "left_out": 499}
    assert selection.describe() == described


def test_slices_are_smaller_while_rows_decode_and_take_as_long_as_a_step() -> None:
    selection, reader = make(decoding=True)
    selection.add(ask("a"))
    run(selection)
    assert set(reader.slices) == {100}
    selection, reader = make(step_ms=200, chunk=256)
    selection.add(ask("a"))
    run(selection)
    assert reader.slices == [256, *[128] * 5, 104], "halves of a chunk"
    selection, reader = make(step_ms=600, chunk=128)
    selection.add(ask("a"))
    run(selection)
    assert reader.slices == [128, 400, 400, 72], "whole chunks, and no more than the budget"


def test_background_prompts_come_last_and_known_ones_are_not_read_again() -> None:
    selection, reader = make()
    for name, size, background in (("a", 700, True), ("b", 800, False), ("c", 900, False), ("d", 800, False)):
        selection.add(ask(name, size, background=background))
    assert [ready.id for ready in run(selection)] == ["b", "c", "d", "a"]
    assert reader.started == [800, 900, 700]
    selection.add(ask("i", 950, background=True))
    selection.step()
    selection.add(ask("j", 850))
    assert [ready.id for ready in run(selection)] == ["j", "i"], "who waits comes before the background"
    selection._scheduler.settings = SchedulerSettings(policy="priority")
    for name, priority in (("f", 3), ("g", -3), ("h", 3)):
        selection.add(ask(name, 800, priority=priority))
    assert [ready.id for ready in run(selection)] == ["g", "f", "h"]
    selection._scheduler.settings = SchedulerSettings(prefill_budget=400, step_ms=0)
    for size in range(1000, 1000 + REMEMBERED):
        selection.add(ask(str(size), size))
    selection.add(ask("e", 800))
    run(selection)
    assert reader.started[-1] == 800


def test_aborted_and_failed_prompts() -> None:
    selection, reader = make()
    selection.add(ask("a"))
    selection.add(ask("b", 666))
    selection.step()
    assert reader.read
    event = selection.abort("a")
    assert not reader.read, "its arrays are freed"
    assert event is not None and event.finish is FinishReason.ABORT and selection.abort("a") is None
    (ready,) = run(selection)
    assert ready == ask("b", 666), "the draft model failed: all tokens are computed"
    selection.add(ask("c"))
    assert run(selection)[0].num_left_out > 0


def test_too_many_prompts() -> None:
    selection, _ = make(max_queue=1)
    selection.add(ask("a"))
    selection.add(ask("b", background=True))
    with pytest.raises(Overloaded, match=r"the queue is full \(1 long"):
        selection.add(ask("c"))
