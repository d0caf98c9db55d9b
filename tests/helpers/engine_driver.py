"""Runs a real engine step by step on this thread; shared by the parity tests.

`make_real_engine(folder, ...)` builds one with small chunks and budgets; `run_requests` adds, aborts
and steps until all requests have ended; `check_answer` compares with the ORACLE.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from mlxrun.config.settings import (
    CacheSettings,
    Config,
    EngineSettings,
    ModelSettings,
    PrefillSettings,
    SchedulerSettings,
    SpeculationSettings,
)
from mlxrun.core.request import FinishReason, Request, SamplingParams, TokenEvent
from mlxrun.engine.build import build_engine
from mlxrun.engine.engine import Engine
from mlxrun.model.kv.paged import attention_kernel, page_table, paged_cache
from mlxrun.model.kv.ragged import decode_batch, row_group
from mlxrun.model.load_check.report import LoadCheckReport
from mlxrun.model.run.chunk_grouping import PrefillSharing
from mlxrun.model.run.compute_methods import ComputeMethods
from tests.helpers.engine_fakes import merge_events
from tests.helpers.oracle import Answer

COUNT = 24  # tokens of an answer
SMALL = {"chunk": 16, "prefill_budget": 64, "prefill_budget_busy": 32}

# Fields of the settings, and methods if the load check's choice is not taken.
VARIANTS: dict[str, dict[str, Any]] = {
    "one at a time": {"max_running": 1},
    "unshared": {"prefill_rows": 1},
    "chunk 5": {"chunk": 5, "prefill_budget": 20, "prefill_budget_busy": 7},
    "chunk 64, short steps": {"chunk": 64, "prefill_budget": 256, "prefill_budget_busy": 64, "step_ms": 1},
    "chunk 512": {"chunk": 512, "prefill_budget": 2048, "prefill_budget_busy": 512},
    "grouped": {"methods": ComputeMethods("grouped", PrefillSharing(4))},
    "decode row by row": {"methods": ComputeMethods("row_by_row", PrefillSharing(4))},
    "chunks joined, launched first": {
        "methods": ComputeMethods("ragged", PrefillSharing(4, merge_chunks=True), launch_first=True)
    },
    "reproducible": {"reproducible": True, "max_running": 4},
}


@dataclass(frozen=True)
class TimedRequest:
    """A request, the step before which it is added, and the step before which it is aborted."""

    request: Request
    add_step: int = 0
    abort_step: int | None = None

    @property
    def id(self) -> str:
        return self.request.id


def make_config(folder: Path, **options: Any) -> Config:
    """`options`: fields of the model, engine, scheduler and cache settings, by name; `speculation`,
    `prefill`: those."""

    def own(settings: Any) -> dict[str, Any]:
        return {f.name: options[f.name] for f in fields(settings) if f.name in options}

    return Config(
        model=ModelSettings(**{"path": str(folder)} | own(ModelSettings)),
        engine=EngineSettings(**own(EngineSettings)),
        scheduler=SchedulerSettings(**SMALL | own(SchedulerSettings)),
        cache=CacheSettings(**own(CacheSettings)),
        speculation=options.get("speculation", SpeculationSettings()),
        prefill=options.get("prefill", PrefillSettings()),
    )


def make_real_engine(folder: Path, methods: ComputeMethods | None = None, **options: Any) -> Engine:
    """A new engine. `methods`, if given, are used without a load check."""
    made = make_config(folder, **options)
    if methods is None:
        return build_engine(made)
    chosen = LoadCheckReport(methods, ())
    with (
        mock.patch("mlxrun.model.model_loading.choose_methods", lambda *given: chosen),
        mock.patch("mlxrun.engine.build_drafts.find_device_problem", lambda: None),
    ):
        return build_engine(made)


def use_small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups for up to 15, 31, 63, ... tokens, so that a few short prompts fill several of them; pages of
    8 tokens."""
    monkeypatch.setattr(decode_batch, "SHORTEST_BUCKET", 8)
    monkeypatch.setattr(row_group, "BUFFER_STEP", 16)
    monkeypatch.setattr(row_group, "SPARE_TOKENS", 64)
    for module in (attention_kernel, paged_cache, page_table):
        monkeypatch.setattr(module, "PAGE", 8)


def get_runner(engine: Engine) -> Any:
    """The ModelRunner, for tests that look at its state."""
    return engine.generation.runner


def make_text_request(name: str, ids: Sequence[int], **params: Any) -> Request:
    return Request(name, tuple(ids), _params(params))


def make_vision_request(
    engine: Engine, name: str, prompt: str | Sequence[int], images: Sequence[Image.Image] = (), **params: Any
) -> Request:
    """A request to a vision model, through its processor if it has images."""
    if not images:
        ids = engine.model_info.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return make_text_request(name, ids, **params)
    assert isinstance(prompt, str)
    made = engine.model_info.process(prompt, images)
    return Request(name, made.ids, _params(params), made.image_spans, made.media, made.image_digests)


def _params(given: dict[str, Any]) -> SamplingParams:
    return replace(SamplingParams(max_tokens=COUNT, logprobs=0), **given)


def run_requests(
    engine: Engine,
    requests: Iterable[TimedRequest | Request],
    each: Callable[[int], None] = lambda step: None,
) -> dict[str, TokenEvent]:
    """Each request's events, merged; checks that one is final. `each` is called after each step."""
    todo = [ask if isinstance(ask, TimedRequest) else TimedRequest(ask) for ask in requests]
    events: dict[str, TokenEvent] = {}
    step = 0
    while engine.busy or any(ask.add_step >= step for ask in todo):
        for ask in todo:
            if ask.add_step == step:
                engine.add(ask.request)
            if ask.abort_step == step:
                engine.abort(ask.id)
        for event in engine.step():
            old = events.get(event.request_id)
            assert old is None or old.finish is None, f"{event} after the end"
            events[event.request_id] = event if old is None else merge_events(old, event)
        each(step)
        step += 1
        assert step < 20_000, "the engine does not come to an end"
    assert {ask.id for ask in todo} == {i for i, e in events.items() if e.finish is not None}
    return events


def run_at_once(
    makers: Sequence[Callable[[], Engine]], asks: Sequence[TimedRequest | Request]
) -> list[dict[str, TokenEvent]]:
    """The events of these requests by engines that run at the same time, each on a thread of its own."""
    ready = threading.Barrier(len(makers))

    def run(make: Callable[[], Engine]) -> dict[str, TokenEvent]:
        engine = make()
        try:
            ready.wait(timeout=120)
            return run_requests(engine, asks)
        finally:
            engine.close()

    with ThreadPoolExecutor(len(makers)) as pool:
        return list(pool.map(run, makers))


def preempt_every(engine: Engine, steps: int) -> Callable[[int], None]:
    """What `run_requests` may call after each step: every `steps` steps a row that decodes is preempted, each
    in turn. 0: none is."""

    def each(step: int) -> None:
        rows = [state for state in engine.scheduler.requests if state.decoding]
        if steps and step % steps == steps - 1 and rows:
            engine.scheduler.preempt(rows[step % len(rows)])

    return each


def check_answer(event: TokenEvent, answer: Answer, count: int | None = None) -> None:
    """The whole answer (or its first `count` tokens), token by token, as the ORACLE gives it."""
    assert event.error is None, event.error
    assert event.finish is FinishReason.LENGTH, event.finish
    assert len(event.tokens) == len(event.logprobs) == (count or len(answer.tokens))
    answer.check(event.tokens, [p.logprob for p in event.logprobs])


def check_partial_answer(event: TokenEvent, answer: Answer, count: int | None = None) -> None:
    """The same for an answer that may have been aborted."""
    if event.finish is not FinishReason.ABORT:
        check_answer(event, answer, count)
    elif event.tokens:
        answer.check(event.tokens, [p.logprob for p in event.logprobs])


def has_other_answer(event: TokenEvent, answer: Answer) -> bool:
    """Whether parity fails, for mutation tests: an error, other tokens, or logprobs off by the tolerance."""
    try:
        check_answer(event, answer)
    except AssertionError:
        return True
    return False


def list_logprobs(event: TokenEvent) -> np.ndarray:
    return np.array([p.logprob for p in event.logprobs], dtype=np.float32)
