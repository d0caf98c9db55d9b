"""Which tokens of a launched step count once they are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.core.request import SamplingParams
from mlxrun.core.step_plan import SampledToken
from mlxrun.model.kv.ragged.row_group import BUFFER_STEP
from mlxrun.model.run import step_output
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from mlxrun.model.run.sampler import RowSampling
from mlxrun.model.run.step_output import (
    LaunchedStep,
    RowGrammar,
    RunningRow,
    SampledRows,
    collect_tokens,
    compute_capacity,
)


@pytest.fixture(autouse=True)
def _numbered_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a batch get the tokens 0, 1, 2, ..."""

    def read(batch: Any, params: list[SamplingParams]) -> list[SampledToken]:
        return [SampledToken(number) for number in range(len(params))]

    monkeypatch.setattr(step_output, "read_sampled", read)


def make_row(matcher: Any = None) -> RunningRow:
    params = SamplingParams()
    sampling = RowSampling.start(params, (1,), (), 300)
    grammar = None if matcher is None else RowGrammar(matcher)
    return RunningRow([1], TEXT_ONLY, sampling, [], mx.array([1]), grammar=grammar)


def launch(*names: str) -> LaunchedStep:
    sampled: Any = SimpleNamespace()
    return LaunchedStep([SampledRows(names, sampled)])


def collect(step: LaunchedStep, rows: dict[str, RunningRow], freed: Any = None) -> tuple[dict[str, int], Any]:
    tokens, errors = collect_tokens(step, rows, freed or {})
    return {name: sampled.token for name, (sampled,) in tokens.items()}, errors


def test_rows_get_their_tokens() -> None:
    assert collect(launch("a", "b"), {"a": make_row(), "b": make_row()}) == ({"a": 0, "b": 1}, {})


def test_a_preempted_row_keeps_the_token_under_way() -> None:
    assert collect(launch("a", "b"), {"b": make_row()}, {"a": SamplingParams()})[0] == {"a": 0, "b": 1}


def test_a_new_request_of_the_same_id_does_not_get_it() -> None:
    assert collect(launch("a", "b"), {"a": make_row(), "b": make_row()}, {"a": None})[0] == {"b": 1}


def test_a_row_that_has_gone_gets_nothing() -> None:
    assert collect(launch("a", "b"), {"b": make_row()})[0] == {"b": 1}


def test_a_grammar_that_refuses_the_token_fails_its_row_once() -> None:
    def refuse(token: int) -> None:
        raise ValueError(f"token {token}")

    row = make_row(SimpleNamespace(accept=refuse))
    tokens, errors = collect(launch("other", "a"), {"other": make_row(), "a": row})
    assert tokens == {"other": 0} and str(errors["a"]) == "token 1"
    assert row.grammar is None


@pytest.mark.parametrize(("max_tokens", "expected"), [(5, 8), (10**6, 3 + BUFFER_STEP)])
def test_a_row_reserves_room_for_its_answer_up_to_a_step(max_tokens: int, expected: int) -> None:
    assert compute_capacity([1, 2, 3], SamplingParams(max_tokens=max_tokens)) == expected
