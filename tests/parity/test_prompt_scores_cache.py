"""Logprobs of prompts with the prefix cache: nothing is computed twice, and all are as cold."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.request import FinishReason, HitKind, Request, TokenEvent
from mlxrun.engine.engine import Engine
from mlxrun.engine.prefix_cache.entry_logprobs import EntryLogprobs, LogprobBook
from mlxrun.engine.prefix_cache.logprob_keeper import LogprobKeeper
from mlxrun.engine.scheduler.request_state import RequestLogprobs
from mlxrun.model.run.prefill import PrefillRunner
from tests.helpers import engine_driver, text_models
from tests.helpers.model_fixtures import Zoo, mark_sweep
from tests.parity.test_prompt_scores import TOLERANCE, make_scored, measure_error, score_cold

BASE = tuple(text_models.prompts(51, [75])[0])
OTHER = tuple(text_models.prompts(52, [75])[0])
CHOICES = [(*BASE[:70], *OTHER[i * 3 : i * 3 + 1 + i]) for i in range(4)]
FAMILIES = mark_sweep((*text_models.CORE, "falcon_h1"), ("llama", "gemma3_text", "qwen3_next"))

pytestmark = pytest.mark.usefixtures("probed_once")


def once(engine: Engine, request: Request) -> TokenEvent:
    event = engine_driver.run_requests(engine, [request])[request.id]
    while engine.busy:
        engine.step()
    return event


def count_computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each prompt chunk that is computed from now on."""
    sizes: list[int] = []
    forward: Callable[..., Any] = PrefillRunner.forward

    def count(self: Any, chunks: Any, *args: Any) -> Any:
        sizes.extend(chunk.stop - chunk.start for chunk in chunks)
        return forward(self, chunks, *args)

    monkeypatch.setattr(PrefillRunner, "forward", count)
    return sizes


def check(zoo: Zoo, family: str, event: TokenEvent, request: Request) -> None:
    error = measure_error(event, request, score_cold(zoo, family, request.prompt))
    assert error < TOLERANCE, f"{request.id}: {error}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_repeated_request_computes_nothing(zoo: Zoo, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_driver.make_real_engine(zoo.text(family))
    for size in (75, 74, 48, 33):  # prompts that are parts of the first one
        request = make_scored(f"first {size}", BASE[:size])
        check(zoo, family, once(engine, request), request)
    sizes = count_computed(monkeypatch)
    for size in (75, 48):
        for count in (0, 1):
            request = make_scored(f"again {size} {count}", BASE[:size], count)
            event = once(engine, request)
            check(zoo, family, event, request)
            assert (event.hit_kind, event.num_cached_tokens, sizes) == (HitKind.EXACT, size, [])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_that_wants_more_is_computed(
    zoo: Zoo, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_driver.make_real_engine(zoo.text(family))
    once(engine, make_scored("first", BASE))
    sizes = count_computed(monkeypatch)
    request = make_scored("more", BASE, 3)
    check(zoo, family, once(engine, request), request)
    assert sum(sizes) == 74
    late = make_scored("late", BASE, 3, 60)
    check(zoo, family, once(engine, late), late)
    assert family != "llama" or sum(sizes) <= 74 + 32


@pytest.mark.parametrize("family", FAMILIES)
def test_entries_without_scores_are_not_taken_for_scored_ones(zoo: Zoo, family: str) -> None:
    """What an ordinary request has stored helps only up to the first wanted token, and gets scores then."""
    engine = engine_driver.make_real_engine(zoo.text(family))
    plain = engine_driver.make_text_request("plain", BASE, max_tokens=8)
    engine_driver.check_answer(once(engine, plain), zoo.answer(family, BASE, 8))
    for name, start in (("late", 60), ("all", 1), ("again", 1)):
        request = make_scored(name, BASE, 1, start)
        event = once(engine, request)
        check(zoo, family, event, request)
        assert event.num_cached_tokens <= start - 1 or name == "again"
    assert event.num_cached_tokens == len(BASE)
    again = engine_driver.make_text_request("plain again", BASE, max_tokens=8)
    event = once(engine, again)
    engine_driver.check_answer(event, zoo.answer(family, BASE, 8))
    assert event.num_cached_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("start", [1, 70])
def test_choices_share_their_context(
    zoo: Zoo, family: str, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent together, they compute it once if the engine knows where they part, or can cut anywhere."""
    engine = engine_driver.make_real_engine(zoo.text(family), chunk=48)
    sizes = count_computed(monkeypatch)
    requests = [make_scored(f"c{i}", ids, 1, start) for i, ids in enumerate(CHOICES)]
    events = engine_driver.run_requests(engine, requests)
    for request in requests:
        check(zoo, family, events[request.id], request)
    if start == 70 or family == "llama":
        assert sum(sizes) <= 70 + sum(len(ids) - 69 for ids in CHOICES), sizes


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "mamba2"])
def test_scores_outlive_the_process(
    zoo: Zoo, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"backend": "disk", "disk_path": str(tmp_path)}
    request = make_scored("first", BASE)
    engine = engine_driver.make_real_engine(zoo.text(family), **options)
    first = once(engine, request)
    plain = once(engine, engine_driver.make_text_request("plain", OTHER, max_tokens=1))
    assert plain.finish
    late = make_scored("late", OTHER)
    once(engine, late)
    engine.prefix_cache.shutdown()
    engine = engine_driver.make_real_engine(zoo.text(family), **options)
    sizes = count_computed(monkeypatch)
    again = once(engine, make_scored("again", BASE, 0))
    assert [s and s.logprob for s in again.prompt_logprobs] == [
        s and s.logprob for s in first.prompt_logprobs
    ]
    assert sizes == []
    check(zoo, family, once(engine, late), late)
    assert sizes == []
    engine.prefix_cache.shutdown()


def test_reproducible_scores_do_not_depend_on_the_cache(zoo: Zoo, tmp_path: Path) -> None:
    """Byte for byte: cold, after other prompts, repeated, from disk, and beside others."""
    rng = random.Random(9)
    prompts = [BASE, *CHOICES, BASE[:64], (*BASE[:32], *OTHER[:30])]
    for family in ("llama", "qwen3_next"):
        folder, options = zoo.text(family), {"reproducible": True, "max_running": 4}
        cold = {}
        for i, ids in enumerate(prompts):
            engine = engine_driver.make_real_engine(folder, backend="none", **options)
            cold[i] = once(engine, make_scored(str(i), ids)).prompt_logprobs
        disk = {"backend": "disk", "disk_path": str(tmp_path / family)}
        for _ in range(2):
            engine = engine_driver.make_real_engine(folder, **options, **disk)
            for turn in range(2):
                order = list(enumerate(prompts))
                rng.shuffle(order)
                starts = {i: rng.choice([1, 1, 40]) for i, _ in order}
                requests = [make_scored(f"{turn} {i}", ids, i % 2, starts[i]) for i, ids in order]
                others = [engine_driver.make_text_request(f"{turn} plain", BASE[:70], max_tokens=4)]
                events = engine_driver.run_requests(engine, [*requests, *others])
                for (i, _), request in zip(order, requests, strict=True):
                    found = [score and score[::2] for score in events[request.id].prompt_logprobs]
                    assert found == [score and score[::2] for score in cold[i][starts[i] - 1 :]]
            engine.prefix_cache.shutdown()


# -- mutation twins ---------------------------------------------------------------------------------------


def has_wrong_scores(zoo: Zoo, *requests: Request) -> bool:
    engine = engine_driver.make_real_engine(zoo.text("llama"))
    for request in requests:
        event = once(engine, request)
    return measure_error(event, request, score_cold(zoo, "llama", request.prompt)) > TOLERANCE


def test_scores_that_are_off_by_one_are_found(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    take = LogprobBook.take

    def take_late(self: LogprobBook, scores: EntryLogprobs, matched: int) -> None:
        take(self, replace(scores, first=scores.first - 1), matched)

    monkeypatch.setattr(LogprobBook, "take", take_late)
    assert has_wrong_scores(zoo, make_scored("a", BASE), make_scored("b", BASE))


def test_ranks_that_are_off_by_many_are_found(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    read = LogprobBook.read
    monkeypatch.setattr(
        LogprobBook, "read", lambda *a: [each._replace(rank=each.rank + 30) for each in read(*a)]
    )
    assert has_wrong_scores(zoo, make_scored("a", BASE), make_scored("b", BASE))


def test_scores_of_another_prompt_are_found(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    overlaps = LogprobKeeper.list_overlaps

    def take_all(self: LogprobKeeper, tracked: Any) -> Any:
        return overlaps(self, tracked) or [(entry, entry.stop) for entry in self._index.entries.values()]

    assert not has_wrong_scores(zoo, make_scored("a", BASE), make_scored("b", OTHER))
    monkeypatch.setattr(LogprobKeeper, "list_overlaps", take_all)
    assert has_wrong_scores(zoo, make_scored("a", BASE), make_scored("b", OTHER))


def test_a_hit_beyond_the_first_unknown_score_is_found(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entries of an ordinary request have no scores: taken as scored, some would never come."""
    plain = engine_driver.make_text_request("plain", BASE, max_tokens=2)
    assert not has_wrong_scores(zoo, plain, make_scored("a", BASE, max_tokens=1))
    monkeypatch.setattr(RequestLogprobs, "limit_hit", lambda self, tokens: tokens)
    assert has_wrong_scores(zoo, plain, make_scored("a", BASE, max_tokens=1))


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_prompt_that_the_cache_holds_ends_at_once(zoo: Zoo, family: str) -> None:
    """Without an answer and without logprobs nothing is left to compute of it; the row is free again."""
    engine = engine_driver.make_real_engine(zoo.text(family), max_running=1)
    for name in ("a", "b"):
        event = once(engine, engine_driver.make_text_request(name, BASE, max_tokens=0))
        assert event.finish is FinishReason.LENGTH and event.num_computed_tokens == len(BASE)
    pair = [engine_driver.make_text_request(f"n-{i}", OTHER, max_tokens=0) for i in range(2)]
    events = engine_driver.run_requests(
        engine, [*pair, engine_driver.make_text_request("c", BASE, max_tokens=3)]
    )
    assert [event.finish for event in events.values()] == [FinishReason.LENGTH] * 3
    assert len(events["c"].tokens) == 3
