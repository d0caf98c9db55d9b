"""Drives an engine on this thread, one step after the other: what the parity tests share.

`engine(folder, ...)` builds one with settings that make small things happen (chunks of 16, little budget);
`run(engine, asks)` adds, aborts and steps until all is done; `check` compares with the ORACLE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    SchedulerSettings,
)
from mlxrun.engine.engine import Engine
from mlxrun.engine.factory import build_engine
from mlxrun.model.chunk_grouping import PrefillSharing
from mlxrun.model.compute_methods import ComputeMethods
from mlxrun.model.probe import ProbeReport
from mlxrun.model.ragged import decode_batch, row_group
from mlxrun.scheduler.request import FinishReason, Request, SamplingParams, TokenEvent
from tests.helpers.engine_fakes import merge_events
from tests.helpers.oracle import Answer

COUNT = 24  # tokens of an answer
SMALL = {"chunk": 16, "prefill_budget": 64, "prefill_budget_busy": 32}

# Fields of the settings, and methods if the probe's choice is not taken.
WAYS: dict[str, dict[str, Any]] = {
    "one at a time": {"max_running": 1},
    "unshared": {"prefill_rows": 1},
    "chunk 5": {"chunk": 5, "prefill_budget": 20, "prefill_budget_busy": 7},
    "chunk 64": {"chunk": 64, "prefill_budget": 256, "prefill_budget_busy": 64},
    "chunk 512": {"chunk": 512, "prefill_budget": 2048, "prefill_budget_busy": 512},
    "grouped": {"methods": ComputeMethods("grouped", PrefillSharing(4))},
    "decode row by row": {"methods": ComputeMethods("row_by_row", PrefillSharing(4))},
    "chunks joined, launched first": {
        "methods": ComputeMethods("ragged", PrefillSharing(4, merge_chunks=True), launch_first=True)
    },
    "reproducible": {"reproducible": True, "max_running": 4},
}


@dataclass(frozen=True)
class Ask:
    """A request, the step before which it is added, and the one before which it is aborted."""

    request: Request
    joins: int = 0
    leaves: int | None = None

    @property
    def id(self) -> str:
        return self.request.id


def config(folder: Path, **options: Any) -> Config:
    """`options`: fields of the settings of model, engine, scheduler and cache by their names."""

    def own(settings: Any) -> dict[str, Any]:
        return {f.name: options[f.name] for f in fields(settings) if f.name in options}

    return Config(
        model=ModelSettings(**{"path": str(folder)} | own(ModelSettings)),
        engine=EngineSettings(**own(EngineSettings)),
        scheduler=SchedulerSettings(**SMALL | own(SchedulerSettings)),
        cache=CacheSettings(**own(CacheSettings)),
    )


def engine(folder: Path, methods: ComputeMethods | None = None, **options: Any) -> Engine:
    """A fresh engine; `methods` are taken unprobed if given."""
    made = config(folder, **options)
    if methods is None:
        return build_engine(made)
    chosen = ProbeReport(methods, ())
    with mock.patch("mlxrun.engine.factory.choose_methods", lambda adapter, vocab, config: chosen):
        return build_engine(made)


def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups for up to 15, 31, 63, ... tokens, buffers that grow by 16: a few short prompts fill several."""
    monkeypatch.setattr(decode_batch, "SHORTEST_BUCKET", 8)
    monkeypatch.setattr(row_group, "BUFFER_STEP", 16)
    monkeypatch.setattr(row_group, "SPARE_TOKENS", 64)


def runner(engine: Engine) -> Any:
    """The ModelRunner, for tests that look at what it holds."""
    return engine._runner


def text(name: str, ids: Sequence[int], **params: Any) -> Request:
    return Request(name, tuple(ids), _params(params))


def seen(
    engine: Engine, name: str, prompt: str | Sequence[int], images: Sequence[Image.Image] = (), **params: Any
) -> Request:
    """A request to a vision model, through its processor if it has images."""
    if not images:
        ids = engine.model_info.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return text(name, ids, **params)
    assert isinstance(prompt, str)
    made = engine.model_info.process(prompt, images)
    return Request(name, made.ids, _params(params), made.image_spans, made.media, made.image_digests)


def _params(given: dict[str, Any]) -> SamplingParams:
    return replace(SamplingParams(max_tokens=COUNT, logprobs=0), **given)


def run(
    engine: Engine, asks: Iterable[Ask | Request], each: Callable[[int], None] = lambda step: None
) -> dict[str, TokenEvent]:
    """Every request's events, merged; each has one final event. `each` is called after each step."""
    todo = [ask if isinstance(ask, Ask) else Ask(ask) for ask in asks]
    events: dict[str, TokenEvent] = {}
    step = 0
    while engine.busy or any(ask.joins >= step for ask in todo):
        for ask in todo:
            if ask.joins == step:
                engine.add(ask.request)
            if ask.leaves == step:
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


def same(event: TokenEvent, answer: Answer, count: int | None = None) -> None:
    """The whole answer (or its first `count` tokens), token by token, as the ORACLE gives it."""
    assert event.error is None, event.error
    assert event.finish is FinishReason.LENGTH, event.finish
    assert len(event.tokens) == len(event.logprobs) == (count or len(answer.tokens))
    answer.check(event.tokens, [p.logprob for p in event.logprobs])


def beginning(event: TokenEvent, answer: Answer, count: int | None = None) -> None:
    """As far as it came, if it was aborted."""
    if event.finish is not FinishReason.ABORT:
        same(event, answer, count)
    elif event.tokens:
        answer.check(event.tokens, [p.logprob for p in event.logprobs])


def differs(event: TokenEvent, answer: Answer) -> bool:
    """Whether parity fails, for mutation tests: an error, other tokens, or logprobs off by the tolerance."""
    try:
        same(event, answer)
    except AssertionError:
        return True
    return False


def probabilities(event: TokenEvent) -> np.ndarray:
    return np.array([p.logprob for p in event.logprobs], dtype=np.float32)
