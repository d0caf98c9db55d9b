"""Text models in the engine give what the ORACLE gives: alone, together, joining, leaving, in any chunks (F1-F5).

Groups are made small here (`small`), so that a few short prompts already fill several of them and move between
them. What must fail is in test_parity_mutations.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import drive
import models
import numpy as np
import pytest
from drive import Ask
from fixtures_models import Zoo
from oracle import Answer

from mlxrun.engine.engine import Engine
from mlxrun.model import group, rows, runner
from mlxrun.model.methods import Methods
from mlxrun.model.prefill import Sharing
from mlxrun.scheduler.request import TokenEvent

LENGTHS = (1, 2, 5, 12, 14, 33, 40, 100, 170)  # F2's and F5's window is 8
PROMPTS = models.prompts(0, LENGTHS)
SOME = ("nemotron_h", "deepseek_v3", "gemma4_text", "falcon_h1", "gpt_bigcode")
NOW = (*models.CORE, *SOME)
FAMILIES = [pytest.param(f, marks=[] if f in NOW else [pytest.mark.slow]) for f in models.TEXT]
EVERY = [pytest.param(f, marks=[] if f in models.CORE else [pytest.mark.slow]) for f in models.TEXT]

# How the engine is set up: fields of the settings, and methods if the probe's choice is not taken.
WAYS: dict[str, dict[str, Any]] = {
    "one at a time": {"max_running": 1},
    "unshared": {"prefill_rows": 1},
    "chunk 5": {"chunk": 5, "prefill_budget": 20, "prefill_budget_busy": 7},
    "chunk 64": {"chunk": 64, "prefill_budget": 256, "prefill_budget_busy": 64},
    "chunk 512": {"chunk": 512, "prefill_budget": 2048, "prefill_budget_busy": 512},
    "shortest first, three rows": {"policy": "shortest", "max_running": 3},
    "grouped": {"methods": Methods("grouped", Sharing(4))},
    "decode alone": {"methods": Methods("alone", Sharing(4))},
    "reproducible": {"reproducible": True, "max_running": 4},
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of rows of up to 15, 31, 63, ... tokens, in buffers that grow by 16."""
    shrink(monkeypatch)


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "SHORTEST_BUCKET", 8)
    monkeypatch.setattr(group, "STEP", 16)


def answers(zoo: Zoo, family: str) -> list[Answer]:
    return [zoo.answer(family, prompt) for prompt in PROMPTS]


def asks(**params: Any) -> list[Ask]:
    return [Ask(drive.text(str(i), prompt, **params)) for i, prompt in enumerate(PROMPTS)]


def all_same(events: dict[str, TokenEvent], wanted: list[Answer]) -> None:
    assert len(events) == len(wanted)
    for i, answer in enumerate(wanted):
        drive.same(events[str(i)], answer)


# -- ways of computing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_together(zoo: Zoo, family: str, small: None) -> None:
    """A1, A29, A30, A48, A68, B7: everything at once, as the probe chose it, and joining one after the other."""
    engine = drive.engine(zoo.text(family))
    methods = engine.probe and engine.probe.methods
    assert methods == expected_methods(family)
    all_same(drive.run(engine, asks()), answers(zoo, family))
    joins = [Ask(a.request, joins=(0, 30, 1, 3, 3, 12, 2, 0, 20)[i]) for i, a in enumerate(asks())]
    all_same(drive.run(engine, joins), answers(zoo, family))


def expected_methods(family: str) -> Methods:
    """What the probe is known to choose: a change upstream shows here."""
    decode = {"deepseek_v3": "grouped", "gpt_bigcode": "alone"}.get(family, "ragged")
    padded = {"gemma3_text": 8, "gpt_oss": 8, "gemma4_text": 8}.get(family, 16)
    recurrent = ("qwen3_next", "qwen3_5", "mamba2", "nemotron_h", "falcon_h1", "lfm2", "granitemoehybrid")
    return Methods(decode, Sharing(8, 0 if family in recurrent else padded))  # type: ignore[arg-type]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", EVERY)
def test_every_way(zoo: Zoo, family: str, way: str, small: None) -> None:
    """A1, A68: chunk sizes, budgets, sharing and decode methods; each in two orders."""
    engine = drive.engine(zoo.text(family), **WAYS[way])
    all_same(drive.run(engine, asks()), answers(zoo, family))
    all_same(drive.run(engine, reversed(asks())), answers(zoo, family))


@pytest.mark.parametrize("family", EVERY)
def test_groups_of_the_usual_size(zoo: Zoo, family: str) -> None:
    """One group of short rows, and a row that outgrows it at 512 tokens."""
    (long,) = models.prompts(1, [500])
    engine = drive.engine(zoo.text(family), chunk=64, prefill_budget=1024)
    events = drive.run(engine, [*asks(), drive.text("long", long)])
    drive.same(events.pop("long"), zoo.answer(family, long))
    all_same(events, answers(zoo, family))
