"""`min_tokens`: the library's loop with masked ends of answers gives the same tokens, alone and in a batch.

The ends are tokens that the models want to say early, or exactly when they may, so that every mistake in
counting shows. Each twin plants one mistake, and parity must fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.core.request import FinishReason, Request, TokenEvent
from mlxrun.engine.engine import Engine
from mlxrun.model.run.sampler import RowSampling, Sampler
from tests.helpers import engine_driver, text_models
from tests.helpers.engine_driver import COUNT, TimedRequest
from tests.helpers.model_fixtures import Zoo

pytestmark = pytest.mark.usefixtures("probed_once")

Patch = pytest.MonkeyPatch
PROMPTS = text_models.prompts(11, (2, 5, 14, 40, 9, 21))
MINIMUMS = (0, 1, 6, 9, 17, 24)
JOINS = (0, 9, 0, 4, 2, 1)
FAMILIES = ("llama", "mamba2", "gemma3_text")


def compute_reference(
    zoo: Zoo, family: str, ids: Sequence[int], ends: Sequence[int], minimum: int
) -> list[int]:
    """The answer by the library's loop, which masks the ends until so many tokens were generated."""
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(zoo.text(family))
    mask = mx.zeros(model(mx.array([[1]])).shape[-1])
    mask[mx.array(list(ends))] = -mx.inf

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits + mask if len(tokens) - len(ids) < minimum else logits

    answer: list[int] = []
    steps = generate_step(mx.array(list(ids)), model, max_tokens=COUNT, logits_processors=[process])
    for token, _ in steps:
        if int(token) in ends:
            break
        answer.append(int(token))
    return answer


@dataclass(frozen=True)
class Case:
    """A prompt with its ends and its minimum, and the answer that the library gives."""

    ends: frozenset[int]
    minimum: int
    answer: list[int]


_cases: dict[str, list[Case]] = {}


def list_cases(zoo: Zoo, family: str) -> list[Case]:
    """Every other answer may end with its next token once it may; the others want to end early."""
    if family not in _cases:
        plain = [zoo.answer(family, prompt).tokens for prompt in PROMPTS]
        early = {answer[i] for answer in plain for i in (0, 1, 4)}
        _cases[family] = []
        for prompt, answer, minimum in zip(PROMPTS, plain, MINIMUMS, strict=True):
            exact = minimum < COUNT and answer[minimum] not in answer[:minimum]
            ends = {answer[minimum]} if exact and len(_cases[family]) % 2 else early
            reference = compute_reference(zoo, family, prompt, sorted(ends), minimum)
            assert len(reference) >= minimum
            _cases[family].append(Case(frozenset(ends), minimum, reference))
        assert not _cases[family][0].answer and len({len(case.answer) for case in _cases[family]}) > 3
    return _cases[family]


def make_requests(cases: Sequence[Case]) -> list[Request]:
    return [
        engine_driver.make_text_request(
            str(i),
            prompt,
            stop_ids=case.ends,
            min_tokens=case.minimum,
            end_ids=case.ends if case.minimum else frozenset(),
        )
        for i, (prompt, case) in enumerate(zip(PROMPTS, cases, strict=True))
    ]


def matches(events: dict[str, TokenEvent], cases: Sequence[Case]) -> bool:
    """Whether all answers are those of the cases, and ended for the right reason."""
    assert [event.error for event in events.values() if event.error is not None] == []
    for i, answer in enumerate(case.answer for case in cases):
        event = events[str(i)]
        reason = FinishReason.LENGTH if len(answer) == COUNT else FinishReason.STOP
        if list(event.tokens) != answer or event.finish is not reason:
            return False
    return True


@pytest.fixture
def small(monkeypatch: Patch) -> None:
    engine_driver.use_small_groups(monkeypatch)


def run(engine: Engine, requests: Sequence[Request], preempt_every: int = 0) -> dict[str, TokenEvent]:
    def preempt(step: int) -> None:
        for state in engine.scheduler.requests:
            if preempt_every and step % preempt_every == int(state.id) and state.running:
                engine.scheduler.preempt(state)  # type: ignore[arg-type]

    timed = [TimedRequest(request, JOINS[int(request.id)]) for request in requests]
    return engine_driver.run_requests(engine, timed, preempt)


@pytest.mark.parametrize("family", FAMILIES)
def test_together_preempted_and_one_at_a_time(zoo: Zoo, family: str, small: None) -> None:
    cases = list_cases(zoo, family)
    for options, preempt_every in (
        ({}, 7),
        ({"max_running": 1}, 0),
        ({"max_running": 3, "policy": "shortest"}, 7),
    ):
        engine = engine_driver.make_real_engine(zoo.text(family), **options)
        assert matches(run(engine, make_requests(cases), preempt_every), cases)
        if not options:
            assert matches(run(engine, make_requests(cases)), cases)


@pytest.mark.parametrize("known", [1, 5, 6, 8])
def test_an_answer_that_an_earlier_run_began_goes_on(zoo: Zoo, known: int, small: None) -> None:
    """The tokens of the earlier run count."""
    cases = list_cases(zoo, "llama")
    requests = [
        replace(request, prior_output=tuple(case.answer[:known]))
        for request, case in zip(make_requests(cases), cases, strict=True)
        if len(case.answer) > known
    ]
    events = run(engine_driver.make_real_engine(zoo.text("llama")), requests)
    assert len(requests) > 2
    for request in requests:
        assert list(events[request.id].tokens) == cases[int(request.id)].answer[known:]


# -- the twins ----------------------------------------------------------------------------------------------


def none(monkeypatch: Patch) -> None:
    """Nothing."""


def ends_never_masked(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Sampler, "suppress_ends", lambda self, x, positions: x)


def one_token_fewer(monkeypatch: Patch) -> None:
    """Counts the token that is sampled as one that was."""
    change_positions(monkeypatch, lambda positions: [n + 1 for n in positions])


def one_token_more(monkeypatch: Patch) -> None:
    change_positions(monkeypatch, lambda positions: [n - 1 for n in positions])


def positions_of_the_next_row(monkeypatch: Patch) -> None:
    change_positions(monkeypatch, lambda positions: [*positions[1:], *positions[:1]])


def change_positions(monkeypatch: Patch, change: Callable[[list[int]], list[int]]) -> None:
    original = Sampler.suppress_ends
    monkeypatch.setattr(
        Sampler, "suppress_ends", lambda self, x, positions: original(self, x, change(list(positions)))
    )


def mask_of_a_step_ago(monkeypatch: Patch) -> None:
    """The mask stays once it was made."""
    original = Sampler.suppress_ends

    def suppress(self: Sampler, x: mx.array, positions: Sequence[int]) -> mx.array:
        if self._suppressed is not None:
            return x + self._suppressed[1]
        return original(self, x, positions)

    monkeypatch.setattr(Sampler, "suppress_ends", suppress)


def counted_from_the_preemption(monkeypatch: Patch) -> None:
    """A row that runs again has to generate as many tokens once more."""
    original: Any = RowSampling.start.__func__  # type: ignore[attr-defined]

    def start(cls: Any, params: Any, prompt: Any, output: Any, *others: Any) -> RowSampling:
        row: RowSampling = original(cls, params, prompt, output, *others)
        row.end_position += len(output)
        return row

    monkeypatch.setattr(RowSampling, "start", classmethod(start))


PLANTS = [
    none,
    ends_never_masked,
    one_token_fewer,
    one_token_more,
    positions_of_the_next_row,
    mask_of_a_step_ago,
    counted_from_the_preemption,
]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_mistake_shows(
    zoo: Zoo, plant: Callable[[Patch], None], monkeypatch: Patch, small: None
) -> None:
    cases = list_cases(zoo, "llama")
    engine = engine_driver.make_real_engine(zoo.text("llama"))
    plant(monkeypatch)
    ways = [matches(run(engine, make_requests(cases), preempt_every=steps), cases) for steps in (0, 7)]
    assert all(ways) is (plant is none)
