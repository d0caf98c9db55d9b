"""Prompts that share a forward join the decode batch together, and still give the ORACLE's answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mlxrun.engine.engine import Engine
from mlxrun.model.kv.paged.stacked_rows import StackedRows
from mlxrun.model.run import decode
from mlxrun.model.run.chunk_grouping import PrefillSharing
from mlxrun.model.run.compute_methods import ComputeMethods
from tests.helpers import engine_driver, text_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.model_fixtures import Zoo

COUNT = 6
PADDED = text_models.prompts(71, [23, 25, 25, 20, 41, 40, 3])
EQUAL = text_models.prompts(72, [18, 18, 18, 33, 33, 7])
PREFIX = PADDED[0][:16]  # two pages
# deepseek_v3: latent attention; gemma3_text: windows, whose rows join one by one; qwen3_next: a hybrid, whose
# prompts share a forward only if they are equally long.
FAMILIES = {"llama": PADDED, "deepseek_v3": PADDED, "gemma3_text": EQUAL, "qwen3_next": EQUAL}


@pytest.fixture(autouse=True)
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows in each stack of all joins."""
    engine_driver.use_small_groups(monkeypatch)
    sizes: list[int] = []
    find = StackedRows.find_places

    def find_places(stack: StackedRows, *given: Any) -> Any:
        sizes.append(len(stack.rows))
        return find(stack, *given)

    monkeypatch.setattr(StackedRows, "find_places", find_places)
    return sizes


def make_engine(zoo: Zoo, family: str, **options: Any) -> Engine:
    padded = 0 if family == "qwen3_next" else 64
    methods = ComputeMethods("paged", PrefillSharing(max_rows=4, max_padded=padded))
    options = {"chunk": 64, "prefill_budget": 256, "max_running": 8} | options
    return engine_driver.make_real_engine(zoo.text(family), methods, **options)


def make_requests(prompts: Any) -> list[Any]:
    return [engine_driver.make_text_request(str(i), ids, max_tokens=COUNT) for i, ids in enumerate(prompts)]


@pytest.mark.parametrize("preempted", [0, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_each_request_alone(
    zoo: Zoo, family: str, preempted: int, stacks: list[int]
) -> None:
    engine, prompts = make_engine(zoo, family), FAMILIES[family]
    each = engine_driver.preempt_every(engine, preempted)
    events = engine_driver.run_requests(engine, make_requests(prompts), each)
    for i, ids in enumerate(prompts):
        engine_driver.check_answer(events[str(i)], zoo.answer(family, ids, COUNT))
    assert (max(stacks) > 1) == (family != "gemma3_text")
    assert engine.generation.errors == 0, "rows of a step that fails are computed again"


def test_rows_that_are_aborted_meanwhile_leave_the_others_as_they_are(zoo: Zoo, stacks: list[int]) -> None:
    """They have been filled, and do not join."""
    engine = make_engine(zoo, "llama")
    asks = [
        TimedRequest(request, abort_step=1 if i in (0, 2) else None)
        for i, request in enumerate(make_requests(PADDED))
    ]
    events = engine_driver.run_requests(engine, asks)
    for i, ids in enumerate(PADDED):
        engine_driver.check_partial_answer(events[str(i)], zoo.answer("llama", ids, COUNT))
    assert max(stacks) > 1 and engine.generation.errors == 0


def test_prompts_that_begin_alike_share_their_pages(zoo: Zoo, stacks: list[int]) -> None:
    prompts = [[*PREFIX, i, i + 1] for i in range(1, 5)]
    engine = make_engine(zoo, "llama")
    events = engine_driver.run_requests(engine, make_requests(prompts))
    for i, ids in enumerate(prompts):
        engine_driver.check_answer(events[str(i)], zoo.answer("llama", ids, COUNT))
    assert max(stacks) > 1 and engine.generation.errors == 0


@pytest.mark.parametrize("mistake", ["row", "tokens", "stale"])
def test_a_mistake_is_found(zoo: Zoo, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another row of the forward; places one token on; a row that has computed more since."""
    if mistake == "tokens":
        place = StackedRows.find_places

        def find_places(stack: StackedRows, *given: Any) -> Any:
            first, slots = place(stack, *given)
            return first, slots[::-1].copy() if len(stack.rows) > 1 else slots

        monkeypatch.setattr(StackedRows, "find_places", find_places)
    else:
        make = decode.make_joining

        def make_joining(*given: Any) -> Any:
            made = make(*given)
            together = made.together
            if together is None:
                return made
            if mistake == "row":
                return replace(made, together=replace(together, index=together.index - 1))
            return replace(
                made, together=replace(together, length=together.length - 1), length=made.length - 1
            )

        monkeypatch.setattr(decode, "make_joining", make_joining)
    events = engine_driver.run_requests(make_engine(zoo, "llama"), make_requests(PADDED))
    answers = [zoo.answer("llama", ids, COUNT) for ids in PADDED]
    assert any(engine_driver.has_other_answer(events[str(i)], each) for i, each in enumerate(answers))
