"""Text models in the engine give what the ORACLE gives: alone, together, joining, leaving.

Groups are made small here (`small`), so that a few short prompts already fill several of them and move
between them. That these tests can fail is shown in test_mutations_text.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.core.errors import RequestError
from mlxrun.core.request import FinishReason, TokenEvent
from mlxrun.core.step_plan import StepPlan, StepResult
from mlxrun.engine.engine import Engine
from mlxrun.engine.scheduler import token_budget
from mlxrun.engine.scheduler.scheduler import Scheduler
from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.kv.ragged.layer_caches import LayerKind
from mlxrun.model.load import footprint
from tests.helpers import engine_driver, text_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.engine_fakes import merge_events
from tests.helpers.model_fixtures import Zoo, mark_sweep

LENGTHS = (1, 2, 5, 12, 14, 33, 40, 60, 100, 170)  # the windows of gemma3_text and gpt_oss are 8
PROMPTS = text_models.prompts(0, LENGTHS)
SHORT = range(8)
PICKED = (0, 1, 2, 4, 5, 8)  # 1, 2, 5, 14, 33 and 100 tokens
SHORT_ONE = "gpt_bigcode"  # its context is 512 tokens
SWEEP = [pytest.mark.sweep]
# By default one family of each decode method and kind of cache; a plain, a windowed and a hybrid one where
# all ways are tried.
FAMILIES = mark_sweep(text_models.TEXT, (*text_models.CORE, "deepseek_v3", "gemma2"))
EVERY = mark_sweep(text_models.TEXT, text_models.CORE)
THREE = mark_sweep(text_models.TEXT, ("llama", "gemma3_text", "qwen3_next"))

pytestmark = pytest.mark.usefixtures("probed_once")

WAYS = engine_driver.VARIANTS | {"shortest first, three rows": {"policy": "shortest", "max_running": 3}}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    engine_driver.use_small_groups(monkeypatch)


def asks(which: Iterable[int] = range(len(PROMPTS)), **params: Any) -> list[TimedRequest]:
    return [TimedRequest(engine_driver.make_text_request(str(i), PROMPTS[i], **params)) for i in which]


def all_same(events: dict[str, TokenEvent], zoo: Zoo, family: str, count: int | None = None) -> None:
    """Events named by the index of their prompt."""
    for name, event in events.items():
        engine_driver.check_answer(event, zoo.answer(family, PROMPTS[int(name)]), count)


# -- ways of computing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_together(zoo: Zoo, family: str, small: None) -> None:
    """Everything at once, as the load check chose it; then one after the other."""
    engine = engine_driver.make_real_engine(zoo.text(family))
    assert engine.load_check is not None
    chosen = engine.load_check.methods
    assert (chosen.decode, chosen.sharing.max_rows, chosen.sharing.max_padded) == expected(family)
    which = range(len(PROMPTS)) if family in text_models.CORE else PICKED
    all_same(engine_driver.run_requests(engine, asks(which)), zoo, family)
    joins = [
        TimedRequest(a.request, add_step=(0, 30, 1, 3, 3, 12, 2, 9, 0, 20)[int(a.id)]) for a in asks(which)
    ]
    all_same(engine_driver.run_requests(engine, joins), zoo, family)


def expected(family: str) -> tuple[str, int, int]:
    """What the load check is known to choose, in float32: a change upstream shows here."""
    decode = "row_by_row" if family == "gpt_bigcode" else "ragged"
    padded = {"gemma3_text": 8, "gpt_oss": 8, "gemma4_text": 8}.get(family, 16)
    recurrent = ("qwen3_next", "qwen3_5", "mamba2", "nemotron_h", "falcon_h1", "lfm2", "granitemoehybrid")
    return decode, 16, 0 if family in recurrent else padded


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", THREE)
def test_every_way(zoo: Zoo, family: str, way: str, small: None) -> None:
    """Chunk sizes, budgets, sharing and decode methods; the longest first or last."""
    options = WAYS[way]
    if "methods" in options and expected(family)[0] != "ragged":
        options = options | {"methods": replace(options["methods"], decode=expected(family)[0])}
    if way == "grouped" and family == "gemma2":  # whose own attention takes no mask of a group
        options = options | {"methods": replace(options["methods"], decode="row_by_row")}
    engine = engine_driver.make_real_engine(zoo.text(family), **options)
    order = asks(PICKED, max_tokens=12)
    events = engine_driver.run_requests(engine, order if len(way) % 2 else reversed(order))
    assert len(events) == len(PICKED)
    all_same(events, zoo, family, 12)


@pytest.mark.parametrize(
    "family", mark_sweep([f for f in text_models.TEXT if f != SHORT_ONE], ("gemma3_text", "qwen3_next"))
)
def test_groups_of_the_usual_size(zoo: Zoo, family: str) -> None:
    """One group of short rows, and a row that outgrows it at 512 tokens."""
    (long,) = text_models.prompts(1, [500])
    engine = engine_driver.make_real_engine(zoo.text(family), chunk=64, prefill_budget=1024)
    events = engine_driver.run_requests(engine, [*asks(SHORT), engine_driver.make_text_request("long", long)])
    engine_driver.check_answer(events.pop("long"), zoo.answer(family, long))
    all_same(events, zoo, family)


@pytest.mark.parametrize("family", mark_sweep(["llama", "gemma3_text", "mamba2"], ["llama", "mamba2"]))
def test_half_precision(zoo: Zoo, family: str, small: None) -> None:
    """bfloat16 weights, keys and states; logprobs are float32: those of one token sum to one."""
    engine = engine_driver.make_real_engine(zoo.text(family), dtype="bfloat16")
    assert engine.load_check is not None and engine.load_check.methods.decode == "ragged"
    events = engine_driver.run_requests(engine, asks(PICKED, max_tokens=8, logprobs=300))
    dtypes: set[mx.Dtype] = set()
    engine_driver.run_requests(
        engine, asks(PICKED, max_tokens=4), lambda step: dtypes.update(kept_dtypes(engine))
    )
    assert mx.bfloat16 in dtypes and (family == "mamba2" or dtypes == {mx.bfloat16})
    for ask in asks(PICKED, max_tokens=8):
        alone = engine_driver.run_requests(engine, [ask])[ask.id]
        together = events[ask.id]
        assert together.tokens == alone.tokens
        assert np.abs(engine_driver.list_logprobs(together) - engine_driver.list_logprobs(alone)).max() < 0.1
        for token in together.logprobs:
            assert abs(sum(np.exp(value) for _, value in token.top) - 1) < 1e-4


def kept_dtypes(engine: Engine) -> set[mx.Dtype]:
    batch = engine_driver.get_runner(engine)._decoder.batch
    buffers = [b for rows in batch.groups for b in rows.buffers]
    return {a.dtype for b in buffers for a in (b.keys, b.values)} | {
        a.dtype for a in batch.list_state_arrays()
    }


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_prompts_share_a_forward_where_that_is_exact(
    zoo: Zoo, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are split off forwards of several, padded on the right only where attention is the only state."""
    split: list[tuple[int, int]] = []
    original = layer_caches.split_row

    def watched(cache: Any, index: int, length: int, **options: Any) -> Any:
        keyed = [
            layer
            for layer in layer_caches.flatten_caches(cache)
            if layer_caches.get_kind(layer) is not LayerKind.STATE
        ]
        split.append((length, max(layer.offset for layer in keyed)))
        return original(cache, index, length, **options)

    engine = engine_driver.make_real_engine(zoo.text(family), step_ms=0)  # steps of any length
    monkeypatch.setattr(layer_caches, "split_row", watched)
    prompts = text_models.prompts(4, (8, 7, 9, 15, 15, 14, 33))
    events = engine_driver.run_requests(
        engine, [engine_driver.make_text_request(str(i), p) for i, p in enumerate(prompts)]
    )
    for i, prompt in enumerate(prompts):
        engine_driver.check_answer(events[str(i)], zoo.answer(family, prompt))
    padded = [longest for length, longest in split if length < longest]
    assert len(split) > len(padded)
    assert max(padded, default=0) == {"llama": 14, "gemma3_text": 8, "qwen3_next": 0}[family]


# -- rows that come and go ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=SWEEP), pytest.param(2, marks=SWEEP)])
@pytest.mark.parametrize("family", EVERY)
def test_fuzz(zoo: Zoo, family: str, seed: int, small: None) -> None:
    """Random joins, aborts, preemptions, limits and settings; what was answered is the ORACLE's."""
    rng = np.random.default_rng([seed, 5])
    todo, limits = [], {}
    for number in range(24):
        index = int(rng.integers(len(SHORT)))
        limits[f"{index}-{number}"] = count = int(rng.integers(1, engine_driver.COUNT + 1))
        request = engine_driver.make_text_request(f"{index}-{number}", PROMPTS[index], max_tokens=count)
        joins = int(rng.integers(0, 36))
        ends_at = joins + int(rng.integers(0, 30)) if rng.random() < 0.3 else None
        todo.append(TimedRequest(request, joins, ends_at))
    chunk = int(rng.choice([5, 16, 64]))
    engine = engine_driver.make_real_engine(
        zoo.text(family),
        chunk=chunk,
        prefill_budget=3 * chunk,
        prefill_budget_busy=2 * chunk,
        max_running=int(rng.integers(3, 9)),
        policy=str(rng.choice(["fcfs", "shortest", "fair"])),
    )

    def preempt(step: int) -> None:
        for entry in engine.scheduler.requests:
            if entry.running and rng.random() < 0.02:
                engine.scheduler.preempt(entry)  # type: ignore[arg-type]

    events = engine_driver.run_requests(engine, todo, preempt)
    for name, event in events.items():
        answer = zoo.answer(family, PROMPTS[int(name.split("-")[0])])
        engine_driver.check_partial_answer(event, answer, limits[name])
    assert sum(e.finish is FinishReason.LENGTH for e in events.values()) > 10
    assert sum(e.finish is FinishReason.ABORT for e in events.values()) > 1
    assert not engine_driver.get_runner(engine)._rows


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "gpt_oss"])
def test_rows_that_memory_pushes_out_and_back(
    zoo: Zoo, family: str, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for two or three rows: some are preempted while they decode, nothing is lost or doubled."""
    monkeypatch.setattr(footprint, "BUFFER_STEP", 16)
    monkeypatch.setattr(footprint, "ACTIVATION_FACTOR", 0)
    monkeypatch.setattr(token_budget, "DECODE_RESERVE", 1)
    preempted = count_calls(monkeypatch, Scheduler, "preempt")
    engine = engine_driver.make_real_engine(zoo.text(family))
    limit = engine.scheduler.limits.memory.compute_needed_bytes([40, 40, 60, 96], 16)
    engine = engine_driver.make_real_engine(zoo.text(family), memory_limit=limit, memory_headroom=0.0)
    events = engine_driver.run_requests(engine, asks(SHORT))
    assert len(events) == len(SHORT)
    all_same(events, zoo, family)
    assert preempted


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[str]:
    calls: list[str] = []
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_all_rows_pushed_out_at_once_and_at_any_step(zoo: Zoo, family: str, every: int, small: None) -> None:
    """A preempted row may be admitted in the step that frees it: a token in flight must not count twice."""
    engine = engine_driver.make_real_engine(zoo.text(family))
    last = {"step": 0}

    def preempt(step: int) -> None:
        if step % 4 == 3 and step < 40:
            for entry in engine.scheduler.requests[::every]:
                if entry.running:
                    engine.scheduler.preempt(entry)  # type: ignore[arg-type]
                    last["step"] = step

    events = engine_driver.run_requests(engine, asks(SHORT), preempt)
    all_same(events, zoo, family)
    assert last["step"] > 20


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "mamba2"])
@pytest.mark.parametrize("at", [0, 3, 9])
def test_a_failed_step_costs_no_answer(zoo: Zoo, family: str, at: int, small: None) -> None:
    """Every row is computed again from its tokens after a step that raised once."""
    engine = engine_driver.make_real_engine(zoo.text(family))
    fail_at(engine, at)
    events = engine_driver.run_requests(engine, asks(range(6), max_tokens=12))
    all_same(events, zoo, family, 12)


def fail_at(engine: Engine, step: int) -> None:
    runner = engine_driver.get_runner(engine)
    original, count = runner.execute, iter(range(1_000_000))

    def execute(plan: StepPlan) -> StepResult:
        result = original(plan)
        if next(count) == step:
            raise RuntimeError("injected")
        return result

    runner.execute = execute


def test_an_id_that_is_used_again_gets_its_own_tokens(zoo: Zoo) -> None:
    """A token of an aborted request that is still under way is not the next one's."""
    engine = engine_driver.make_real_engine(zoo.text("llama"))
    first, second = (
        engine_driver.make_text_request("a", PROMPTS[6]),
        engine_driver.make_text_request("a", PROMPTS[2]),
    )
    engine.add(
        engine_driver.make_text_request("b", PROMPTS[4], max_tokens=200)
    )  # else it starts a step later
    engine.add(first)
    for _ in range(9):
        engine.step()
    engine.abort("a")
    engine.add(second)
    assert [e.finish for e in engine.step() if e.request_id == "a"] == [FinishReason.ABORT, None]
    engine.abort("b")
    with pytest.raises(RequestError):
        engine.add(second)
    event = TokenEvent("a")
    while engine.busy:
        for news in engine.step():
            event = merge_events(event, news) if news.request_id == "a" else event
    engine_driver.check_answer(event, zoo.answer("llama", PROMPTS[2]))


def test_stop_ids_end_an_answer_and_are_not_part_of_it(zoo: Zoo, small: None) -> None:
    """Rows that stop early leave the others as they are."""
    engine = engine_driver.make_real_engine(zoo.text("gemma3_text"))
    wanted = [zoo.answer("gemma3_text", prompt) for prompt in PROMPTS]
    stops = {i: a.tokens[3 + i] for i, a in enumerate(wanted)}
    todo = [
        engine_driver.make_text_request(str(i), p, stop_ids=frozenset({stops[i]}))
        for i, p in enumerate(PROMPTS)
    ]
    events = engine_driver.run_requests(engine, todo)
    for i, answer in enumerate(wanted):
        event, end = events[str(i)], answer.tokens.index(stops[i])
        assert event.finish is FinishReason.STOP
        assert event.tokens == answer.tokens[:end]
        assert not end or np.abs(engine_driver.list_logprobs(event) - answer.chosen[:end]).max() < 1e-4
