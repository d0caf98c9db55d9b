"""docs/architecture.md tells one decode step as a list of calls; a real engine makes them in that order."""

from __future__ import annotations

import pkgutil
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import mlxrun
from mlxrun.engine.engine import Engine
from tests.helpers import engine_driver, text_models
from tests.helpers.model_fixtures import Zoo

PAGE = (Path(mlxrun.__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
SECTION = PAGE.split("## One engine step\n")[1].split("\n## ")[0]
STORY = re.findall(r"^\d+\. `(mlxrun[\w.]+)`", SECTION, re.MULTILINE)


def read_code(name: str) -> CodeType | None:
    """The code of a function by its full name; None if there is no such function."""
    try:
        function = pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return None
    return getattr(function, "__code__", None)


@pytest.fixture(scope="module")
def called(zoo: Zoo) -> list[CodeType]:
    """The code of all Python functions that one decode step calls, in order: the third token of one row."""
    engine = engine_driver.make_real_engine(zoo.text("llama"))
    engine.add(engine_driver.make_text_request("a", text_models.prompts(41, [9])[0]))
    tokens = 0
    while tokens < 2:
        tokens += sum(len(event.tokens) for event in engine.step())
    return record_step(engine)


def record_step(engine: Engine) -> list[CodeType]:
    """Run a step, which must decode a token; returns what it called."""
    calls: list[CodeType] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            calls.append(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        events = engine.step()
    finally:
        sys.setprofile(before)
    assert [len(event.tokens) for event in events] == [1]
    return calls


def is_described(story: Sequence[str], called: Sequence[CodeType]) -> bool:
    """Whether the functions of the story were called one after the other, with any others in between."""
    left = iter(called)
    return all(any(code is each for each in left) for code in map(read_code, story))


def test_the_page_tells_a_decode_step_in_ten_calls(called: list[CodeType]) -> None:
    assert 8 <= len(STORY) <= 10
    assert STORY[0].endswith("Engine.step") and STORY[-1].endswith("Scheduler.update")
    assert is_described(STORY, called)


@pytest.mark.parametrize("at", range(len(STORY)))
def test_a_wrong_name_is_seen(called: list[CodeType], at: int) -> None:
    """A function that does not exist, and one that exists and is not called here."""
    for wrong in (f"{STORY[at]}s", "mlxrun.model.run.runner.ModelRunner.collect"):
        assert not is_described([*STORY[:at], wrong, *STORY[at + 1 :]], called)


@pytest.mark.parametrize("at", range(len(STORY) - 1))
def test_a_wrong_order_is_seen(called: list[CodeType], at: int) -> None:
    """Any two neighbours the other way round."""
    assert not is_described([*STORY[:at], STORY[at + 1], STORY[at], *STORY[at + 2 :]], called)
