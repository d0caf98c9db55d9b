"""Random requests over rows in pages: each has the answer that it has by itself, and no page is lost or kept.

A seed decides all: prompts with common beginnings, settings of requests, when they come and are aborted,
which rows are preempted, how prompts share forwards, and which parts of steps fail.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.core.request import FinishReason, TokenEvent
from mlxrun.engine.engine import Engine
from mlxrun.model.kv.paged import paged_batch
from mlxrun.model.kv.paged.paged_batch import PagedDecodeBatch
from mlxrun.model.kv.paged.paged_cache import PagePool
from mlxrun.model.run.chunk_grouping import PrefillSharing
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.run.prefill import PrefillRunner
from tests.helpers import engine_driver, text_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.model_fixtures import Zoo, mark_sweep

PAGE = 8  # of use_small_groups
LENGTHS = (1, 2, 7, 8, 9, 16, 17, 18, 24, 25, 33, 41, 62, 150)
# The longest prompt that may be padded: recurrent layers take the padding in, windows have 8 tokens.
FAMILIES = {"llama": 64, "deepseek_v3": 64, "gemma3_text": 8, "qwen3_next": 0}
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
    {"temperature": 0.8, "top_p": 0.9, "seed": 3},
)
MOST_PAGES = 4  # that a pool without rows may have
SEEDS = [(family, 10 * at + seed) for at, family in enumerate(FAMILIES) for seed in range(8)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools shrink, and forwards are compiled, after little."""
    engine_driver.use_small_groups(monkeypatch)
    monkeypatch.setattr(paged_batch, "FEW_PAGES", MOST_PAGES)
    monkeypatch.setattr(paged_batch, "COMPILE_AFTER", 1)


@pytest.fixture(scope="module")
def answers() -> dict[object, TokenEvent]:
    """Those of requests by themselves, which several seeds may have."""
    return {}


def list_asks(choose: random.Random) -> Iterator[TimedRequest]:
    beginnings = text_models.prompts(choose.randrange(3), [150] * 3)
    for number in range(choose.randint(5, 10)):
        size = choose.choice(LENGTHS)
        same = size if choose.random() < 0.4 else choose.randint(0, size)
        ids = [*choose.choice(beginnings)[:same], *(choose.randrange(256) for _ in range(size - same))]
        given = {"max_tokens": choose.choice((1, 8, 14, 20)), "logprobs": 3} | choose.choice(SETTINGS)
        add = choose.choice((0, 0, choose.randint(0, 20)))
        stop = add + choose.randint(0, 10) if choose.random() < 0.3 else None
        yield TimedRequest(engine_driver.make_text_request(str(number), ids, **given), add, stop)
    # At the end, a long prompt is aborted that may have been computed while another row has come and gone.
    long, short = text_models.prompts(choose.randrange(3), (900, 5))
    yield TimedRequest(engine_driver.make_text_request("long", long), 60, 60 + choose.randint(4, 9))
    yield TimedRequest(engine_driver.make_text_request("short", short, max_tokens=2, logprobs=3), 60)


def make_engine(zoo: Zoo, family: str, choose: random.Random) -> Engine:
    way: Any = choose.choice(("paged", "paged" if family == "qwen3_next" else "compiled"))
    sharing = PrefillSharing(choose.choice((2, 4, 8)), FAMILIES[family], choose.random() < 0.3)
    return engine_driver.make_real_engine(
        zoo.text(family),
        ComputeMethods(way, sharing, launch_first=choose.random() < 0.5),
        chunk=choose.choice((5, 16, 64)),
        prefill_budget=choose.choice((64, 256)),
        prefill_budget_busy=choose.choice((16, 64)),
        max_running=choose.choice((3, 6, 8)),
        backend=choose.choice(("memory", "memory", "none")),
        max_errors=50,
    )


def plant_failures(choose: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some calls fail, before or after they have done their work."""

    def plant(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def call(*given: Any, **more: Any) -> Any:
            chance = choose.random()
            if chance < 0.02:
                raise RuntimeError("planted")
            done = real(*given, **more)
            if chance > 0.98:
                raise RuntimeError("planted")
            return done

        monkeypatch.setattr(owner, name, call)

    for owner, name in ((PagePool, "write_rows"), (PagePool, "select"), (PagedDecodeBatch, "forward")):
        plant(owner, name)
    plant(PrefillRunner, "_forward_shared")


def check_pages(batch: PagedDecodeBatch) -> None:
    """Each page is free or of rows that run, and its rows are counted."""
    for window, table in batch._tables.items():
        assert table._rows.keys() == batch._lengths.keys()
        used = Counter(page for row in table._rows.values() for page in row.pages)
        free = Counter(table._free)
        assert {0, *used, *free} == set(range(table.capacity)) and not used & free
        assert len(free) == len(table._free) and 0 not in used
        assert set(table._shared.values()) <= set(used)
        shared = sum(count - 1 for count in used.values())
        assert shared == 0 if window else table.shared_tokens == shared * PAGE
        pools = [pool for _, pool in batch._list_pools(window) if pool.arrays]
        assert {pool.num_slots for pool in pools} <= {table.capacity * PAGE}


def watch(engine: Engine, choose: random.Random) -> Callable[[int], None]:
    """What is done after each step: some rows are preempted, and pages are checked."""

    def each(step: int) -> None:
        rows = [state for state in engine.scheduler.requests if state.running]
        if rows and step < 300 and choose.random() < 0.1:
            engine.scheduler.preempt(choose.choice(rows))
        check_pages(engine_driver.get_runner(engine)._decoder.batch)

    return each


def check_answer(found: TokenEvent, known: TokenEvent) -> None:
    """Compare the tokens of an answer, or what has come of it, up to a tie."""
    assert found.finish is not FinishReason.LENGTH or len(found.tokens) == len(known.tokens)
    for mine, other, own, logprob in zip(
        found.tokens, known.tokens, found.logprobs, known.logprobs, strict=False
    ):
        if mine != other:
            assert abs(dict(logprob.top)[mine] - logprob.logprob) < 2e-5
            return
        assert abs(own.logprob - logprob.logprob) < 2e-4


@pytest.mark.parametrize(("family", "seed"), mark_sweep(SEEDS, [each for each in SEEDS if each[1] % 10 < 2]))
def test_rows_in_pages(
    zoo: Zoo, family: str, seed: int, answers: dict[object, TokenEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose, fails = random.Random(seed), seed % 2 == 1
    engine, asks = make_engine(zoo, family, choose), list(list_asks(choose))
    with monkeypatch.context() as patch:
        patch.setattr(mx, "compile", lambda function: function)  # on a CPU it takes seconds
        if fails:
            plant_failures(choose, patch)
        events = engine_driver.run_requests(engine, asks, watch(engine, choose))
    assert fails or engine.generation.errors == 0, "rows of a step that fails are computed again"
    tables = engine_driver.get_runner(engine)._decoder.batch._tables.values()
    assert fails or all(table.used == 1 and table.capacity <= MOST_PAGES for table in tables)
    for ask in asks:
        key = (family, ask.request.prompt, repr(ask.request.params))
        if key not in answers:
            own = engine_driver.make_real_engine(
                zoo.text(family), ComputeMethods("row_by_row"), backend="none", chunk=512, max_running=1
            )
            answers[key] = engine_driver.run_requests(own, [replace(ask.request, id="own")])["own"]
        error = events[ask.id].error
        assert error is None or (fails and "planted" in repr(error.__cause__)), error
        check_answer(events[ask.id], answers[key])
