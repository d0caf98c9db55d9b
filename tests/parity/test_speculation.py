"""Speculation changes no answer: drafts of any length, right or wrong, in any company.

Drafts are made of the answer that the row must get, with wrong tokens in some places, so that blocks of every
length are accepted. Decoding is by pages, whose attention on a CPU is gathered.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import mlx.core as mx
import pytest

from mlxrun.config.settings import SpeculationSettings
from mlxrun.core.errors import ConfigError, RequestError
from mlxrun.core.request import FinishReason, TokenEvent
from mlxrun.engine import build_drafts
from mlxrun.engine.engine import Engine
from mlxrun.engine.scheduler.draft_planner import DraftCounts
from mlxrun.engine.scheduler.row_drafter import RowDrafter
from mlxrun.model.hooks.draft_layout import DraftRecurrence
from mlxrun.model.kv.paged.paged_batch import PagedDecodeBatch
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.run.decode import DecodeRunner
from mlxrun.model.run.sampler import RowSampling
from mlxrun.model.run.step_output import RowGrammar, SampledRows
from mlxrun.model.speculation.drafted_rows import DraftedRows
from tests.helpers import drafted_state_bugs, engine_driver, text_models, vision_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.model_fixtures import Zoo, mark_sweep

Patch = pytest.MonkeyPatch
ROWS = 12
PROMPTS = text_models.prompts(7, (3, 9, 17, 40))
JOINS = (0, 3, 0, 5)
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 3, "top_p": 0.9},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "temperature": 0.7, "seed": 5},
    {"min_tokens": 6, "logprobs": 3},
)
COUNT = 16


@pytest.fixture(autouse=True)
def no_costs(monkeypatch: Patch) -> None:
    """What a drafted token costs recurrent layers, which is measured: nothing."""
    monkeypatch.setattr(build_drafts, "measure_row_cost", lambda *given: 0.0)


class EveryOtherToken:
    """A grammar and its matcher: a token at position n of the answer differs from n by an odd number."""

    done = False

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def start(self, output: Sequence[int], stop_ids: frozenset[int]) -> EveryOtherToken:
        return EveryOtherToken(len(output))

    def mask(self) -> bytes:
        return (b"\xaa", b"\x55")[self.position % 2] * 32

    def accept(self, token: int) -> None:
        if (token - self.position) % 2 == 0:
            raise RequestError(f"token {token} at position {self.position}")
        self.position += 1

    def fork(self) -> EveryOtherToken:
        return EveryOtherToken(self.position)


class FailingGrammar(EveryOtherToken):
    """Fails at position 6: its mask raises, or allows nothing, or it does not take in the token."""

    def __init__(self, how: str, position: int = 0) -> None:
        super().__init__(position)
        self.how = how

    def start(self, output: Sequence[int], stop_ids: frozenset[int]) -> FailingGrammar:
        return FailingGrammar(self.how, len(output))

    def mask(self) -> bytes:
        if self.position == 6 and self.how == "mask":
            raise RequestError("no mask at position 6")
        return bytes(32) if self.position == 6 and self.how == "nothing" else super().mask()

    def accept(self, token: int) -> None:
        if self.position == 6 and self.how == "accept":
            raise RequestError("no token at position 6")
        self.position += 1

    def fork(self) -> FailingGrammar:
        return FailingGrammar(self.how, self.position)


def make_engine(
    zoo: Zoo,
    family: str,
    method: Any = "ngram",
    width: int = ROWS,
    recurrence: DraftRecurrence = "wide_passes",
    **options: Any,
) -> Engine:
    methods = ComputeMethods("paged", fixed_width=width, recurrence=recurrence)
    speculation = SpeculationSettings(method, max_tokens=5)
    return engine_driver.make_real_engine(
        zoo.text(family), methods, speculation=speculation, max_running=ROWS, **options
    )


def list_asks(**more: Any) -> list[TimedRequest]:
    """One with a grammar, one with penalties, one that is sampled and one that may not end yet."""
    given = [{"max_tokens": COUNT, "logprobs": 1} | s | more for s in SETTINGS]
    asks = [engine_driver.make_text_request(str(i), p, **given[i]) for i, p in enumerate(PROMPTS)]
    asks[0] = replace(asks[0], grammar=EveryOtherToken())
    return [TimedRequest(ask, at) for ask, at in zip(asks, JOINS, strict=True)]


def draft_from(monkeypatch: Patch, asks: Sequence[TimedRequest], answers: dict[str, TokenEvent]) -> None:
    """Make each row's drafts of its answer, every fifth token of it replaced by a wrong one."""
    known = {ask.request.prompt: answers[ask.id].tokens for ask in asks}

    def propose(self: RowDrafter, limit: int) -> tuple[int, ...]:
        tokens = tuple(self._lookup._tokens)
        prompt = next(p for p in known if tokens[: len(p)] == p)
        at = len(tokens) - len(prompt)
        rest = [t ^ (i % 5 == 4) for i, t in enumerate(known[prompt])][at:]
        return tuple(rest[: min(limit, self._max_tokens)])

    monkeypatch.setattr(RowDrafter, "propose", propose)
    monkeypatch.setattr(RowDrafter, "expect", lambda self: 2.0)


def count_accepted(engine: Engine) -> int:
    return engine.scheduler.drafts.counts.accepted


def is_same(first: TokenEvent, second: TokenEvent) -> bool:
    """Tokens, how the answer ended, and logprobs but for the rounding of a CPU, which knows a row's place."""
    return (
        first.tokens == second.tokens
        and first.finish is second.finish
        and first.stop_id == second.stop_id
        and len(first.logprobs) == len(second.logprobs) == len(first.tokens)
        and all(
            abs(a.logprob - b.logprob) < 1e-4 and [t for t, _ in a.top] == [t for t, _ in b.top]
            for a, b in zip(first.logprobs, second.logprobs, strict=True)
        )
    )


Plain = Callable[[str], dict[str, TokenEvent]]


@pytest.fixture(scope="module")
def plain(zoo: Zoo) -> Plain:
    """The answers of a family without drafts."""
    return functools.cache(
        lambda family: engine_driver.run_requests(make_engine(zoo, family, "off"), list_asks())
    )


def run_drafts(
    zoo: Zoo, monkeypatch: Patch, family: str, without: dict[str, TokenEvent], **options: Any
) -> tuple[bool, DraftCounts]:
    """Whether all answers are the same with drafts; and how many there were."""
    asks = list_asks()
    draft_from(monkeypatch, asks, without)
    engine = make_engine(zoo, family, **options)
    found = engine_driver.run_requests(engine, asks)
    same = all(is_same(found[ask.id], without[ask.id]) for ask in asks)
    return same, engine.scheduler.drafts.counts


FAMILIES = (
    *itertools.product(("llama", "gemma3_text", "gpt_oss"), ["blocks"]),
    *itertools.product(("qwen3_next", "nemotron_h"), get_args(DraftRecurrence)),
    *(("qwen3_5", "blocks"), ("lfm2", "blocks"), ("mamba2", "passes")),
)


@pytest.mark.parametrize(("family", "recurrence"), FAMILIES)
def test_drafts_change_no_answer(
    zoo: Zoo, plain: Plain, monkeypatch: Patch, family: str, recurrence: DraftRecurrence
) -> None:
    """Greedy, sampled, with penalties, among others, joining late; keys of all tokens, windows, recurrent
    states and those of short convolutions."""
    same, counts = run_drafts(zoo, monkeypatch, family, plain(family), recurrence=recurrence)
    assert counts.drafted > counts.accepted > 15, "too little was drafted to prove anything"
    assert same


@pytest.mark.parametrize(("cost", "drafts"), [(0.05, True), (2.0, False)])
def test_recurrent_layers_draft_where_that_gains_more_than_it_costs(
    zoo: Zoo, plain: Plain, monkeypatch: Patch, cost: float, drafts: bool
) -> None:
    without = plain("qwen3_next")
    monkeypatch.setattr(build_drafts, "measure_row_cost", lambda *given: cost)
    same, counts = run_drafts(zoo, monkeypatch, "qwen3_next", without)
    assert same and bool(counts.drafted) == drafts


@pytest.mark.parametrize("family", mark_sweep(("qwen3_vl", "qwen3_5"), ("qwen3_5",)))
def test_rows_with_images_draft(zoo: Zoo, monkeypatch: Patch, family: str) -> None:
    """Rotary positions behind an image are not those in the cache; recurrent states are those of mlx-vlm."""
    folder, methods = zoo.vision(family), ComputeMethods("paged", fixed_width=ROWS)
    plain = engine_driver.make_real_engine(folder, methods)
    (image,) = vision_models.images(5, 1, size=(64, 48))
    text = vision_models.prompt(family, "what is ", None, " and why?")
    asks = [
        TimedRequest(engine_driver.make_vision_request(plain, "image", text, [image], max_tokens=COUNT)),
        TimedRequest(engine_driver.make_text_request("text", PROMPTS[1], max_tokens=COUNT), 2),
    ]
    without = engine_driver.run_requests(plain, asks)
    draft_from(monkeypatch, asks, without)
    settings = SpeculationSettings("ngram", max_tokens=5)
    engine = engine_driver.make_real_engine(folder, methods, speculation=settings)
    found = engine_driver.run_requests(engine, asks)
    assert count_accepted(engine) > 10
    assert all(is_same(found[ask.id], without[ask.id]) for ask in asks)


@pytest.mark.parametrize(("family", "width"), [("llama", 0), ("llama", 8), ("qwen3_next", 0)])
def test_stops_and_limits_inside_a_block(
    zoo: Zoo, plain: Plain, monkeypatch: Patch, family: str, width: int
) -> None:
    """A stop token, or the last token, that is accepted in the middle of a draft ends the answer there. What
    follows it in the next turn is computed from the row's cache, which has no token too many."""
    known = plain(family)
    asks = [
        TimedRequest(replace(ask.request, params=replace(ask.request.params, **change)))
        for ask, change in zip(
            list_asks(),
            (
                {"stop_ids": frozenset(known["0"].tokens[7:8])},
                {"stop_ids": frozenset(known["1"].tokens[11:12])},
                {"max_tokens": 8},
                {"max_tokens": 7, "stop_ids": frozenset(known["3"].tokens[6:7])},
            ),
            strict=True,
        )
    ]
    draft_from(monkeypatch, asks, known)
    engine = make_engine(zoo, family, width=width, recurrence="blocks")
    events = engine_driver.run_requests(engine, asks)
    assert count_accepted(engine) > 10
    for ask in asks:
        event, tokens = events[ask.id], known[ask.id].tokens
        ends = [i for i, t in enumerate(tokens) if t in ask.request.params.stop_ids]
        size = min([ask.request.params.max_tokens, *ends])
        assert event.tokens == tokens[:size]
        assert event.finish is (FinishReason.STOP if size in ends else FinishReason.LENGTH)
        assert event.stop_id == (tokens[size] if size in ends else None)
    turns = [
        TimedRequest(engine_driver.make_text_request(f"next {ask.id}", (*ask.request.prompt, *rest, 5)))
        for ask in asks
        for rest in [known[ask.id].tokens[: len(events[ask.id].tokens) + 1]]
    ]
    monkeypatch.setattr(RowDrafter, "expect", lambda self: 0.0)
    again = engine_driver.run_requests(engine, turns)
    assert all(again[turn.id].num_cached_tokens >= len(turn.request.prompt) - 4 for turn in turns)
    for turn in turns:
        engine_driver.check_answer(again[turn.id], zoo.answer(family, turn.request.prompt))


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_preempted_and_aborted_rows(zoo: Zoo, plain: Plain, monkeypatch: Patch, family: str) -> None:
    """Rows that draft lose their place and come back; others end while their drafts are verified."""
    without = plain(family)
    draft_from(monkeypatch, list_asks(), without)
    engine = make_engine(zoo, family)
    preempted = []

    def preempt(step: int) -> None:
        rows = [s for s in engine.scheduler.requests if s.decoding and not s.num_in_flight and s.output]
        if rows and len(preempted) < 4:
            engine.scheduler.preempt(rows[0])
            preempted.append(rows[0].id)

    noise = [
        TimedRequest(engine_driver.make_text_request(f"noise {i}", p), i, i + 7)
        for i, p in enumerate(PROMPTS[:3])
    ]
    events = engine_driver.run_requests(engine, [*list_asks(), *noise], preempt)
    assert len(preempted) == 4 and count_accepted(engine) > 15
    assert all(is_same(events[rid], without[rid]) for rid in without)


def run_failing_grammars(zoo: Zoo, method: Any) -> list[tuple[Any, ...]]:
    """What a client sees of requests whose grammars fail at position 6."""
    asks = [
        TimedRequest(replace(list_asks(logprobs=None)[0].request, id=how, grammar=FailingGrammar(how)))
        for how in ("mask", "nothing", "accept")
    ]
    engine = make_engine(zoo, "llama", method)
    events = [engine_driver.run_requests(engine, [ask])[ask.id] for ask in asks]
    assert method == "off" or count_accepted(engine) > 10
    return [(event.tokens, event.finish, str(event.error)) for event in events]


def test_grammars_that_fail_inside_a_draft(zoo: Zoo, plain: Plain, monkeypatch: Patch) -> None:
    """The answer ends where it does without drafts. The twin does not know that a mask of a draft failed."""
    without = run_failing_grammars(zoo, "off")
    assert [(len(tokens), finish) for tokens, finish, _ in without] == [(6, FinishReason.ERROR)] * 3
    draft_from(monkeypatch, list_asks(), plain("llama"))
    assert run_failing_grammars(zoo, "ngram") == without
    original = RowGrammar.accept_all
    monkeypatch.setattr(RowGrammar, "accept_all", lambda self, sampled, forks: original(self, sampled))
    assert run_failing_grammars(zoo, "ngram") != without


def run_preempted_grammar(zoo: Zoo, monkeypatch: Patch, how: str) -> TokenEvent:
    """The answer of a row that is preempted while the token whose mask failed is under way."""
    request = replace(list_asks(logprobs=None)[0].request, grammar=FailingGrammar(how))
    engine = make_engine(zoo, "llama", "off")
    admit, held = engine.scheduler.admit, list[tuple[()]]()
    monkeypatch.setattr(engine.scheduler, "admit", lambda queue: held.pop() if held else admit(queue))

    def preempt(step: int) -> None:
        for state in engine.scheduler.requests:
            if len(state.output) == 6 and state.num_in_flight and state.running:
                engine.scheduler.preempt(state)
                held.append(())  # no row is free for it in the next step

    return engine_driver.run_requests(engine, [TimedRequest(request)], preempt)[request.id]


@pytest.mark.parametrize("how", ["mask", "nothing"])
def test_a_grammar_that_fails_while_its_row_is_preempted(zoo: Zoo, monkeypatch: Patch, how: str) -> None:
    """What was sampled without a mask is not part of the answer. The twin forgets which mask failed."""
    event = run_preempted_grammar(zoo, monkeypatch, how)
    assert (len(event.tokens), event.finish) == (6, FinishReason.ERROR)
    monkeypatch.setattr(SampledRows, "list_forks", lambda self: [()] * len(self.ids))
    assert len(run_preempted_grammar(zoo, monkeypatch, how).tokens) > 6


def test_a_row_that_is_aborted_with_drafts_under_way_fails_no_step(
    zoo: Zoo, plain: Plain, monkeypatch: Patch
) -> None:
    """The other rows do not draft, so that nothing but the runner knows of the drafts."""
    without, asks = plain("llama"), list_asks()
    draft_from(monkeypatch, asks, without)
    engine = make_engine(zoo, "llama")
    others = [replace(ask.request, speculation=False) for ask in asks[1:]]
    for request in (asks[0].request, *others):
        engine.add(request)
    runner = engine_driver.get_runner(engine)
    while not runner.awaits_drafts:
        engine.step()
    engine.abort(asks[0].request.id)
    events: dict[str, TokenEvent] = {}
    while engine.busy:
        events |= {event.request_id: event for event in engine.step() if event.finish is not None}
    assert engine.generation.errors == 0
    assert all(events[request.id].error is None for request in others)


def accept_all(monkeypatch: Patch) -> None:
    """Drafted tokens count without being compared."""
    monkeypatch.setattr(DraftedRows, "count_accepted", lambda self, sampled: self.counts)


def keep_rejected(monkeypatch: Patch) -> None:
    """Rejected tokens stay in the row's cache."""
    monkeypatch.setattr(PagedDecodeBatch, "accept", lambda self, lengths: None)


def repeat_positions(monkeypatch: Patch) -> None:
    """Drafted tokens have the position of the newest one."""

    def expand(self: DraftedRows, first: Sequence[int]) -> list[int]:
        return [at for at, count in zip(first, self.counts, strict=True) for _ in range(count)]

    monkeypatch.setattr(DraftedRows, "expand_positions", expand)


def forget_drafted(monkeypatch: Patch) -> None:
    """Penalties do not know the drafted tokens before."""
    monkeypatch.setattr(RowSampling, "follow", lambda self, fork: None)


def mask_as_before_the_draft(monkeypatch: Patch) -> None:
    """The grammar does not advance with drafted tokens."""
    monkeypatch.setattr(RowGrammar, "fork_along", lambda self, draft: [self] * (len(draft) + 1))


def take_last_token(monkeypatch: Patch) -> None:
    """A row goes on from the last token of its forward, not from the last accepted one."""
    original = DecodeRunner.accept

    def accept(self: DecodeRunner, sampled: Any, rows: Any) -> None:
        original(self, sampled, rows)
        ends = list(itertools.accumulate(sampled.drafted.counts))
        self.newest_tokens = sampled.batch.tokens[mx.array(ends) - 1]

    monkeypatch.setattr(DecodeRunner, "accept", accept)


@pytest.mark.parametrize(
    "plant",
    [
        *(accept_all, keep_rejected, repeat_positions, forget_drafted, take_last_token),
        mask_as_before_the_draft,
    ],
)
def test_planted_bugs_are_found(
    zoo: Zoo, plain: Plain, monkeypatch: Patch, plant: Callable[[Patch], None]
) -> None:
    """The twins of the tests above."""
    without = plain("llama")
    plant(monkeypatch)
    assert not run_drafts(zoo, monkeypatch, "llama", without)[0]


@pytest.mark.parametrize("plant", drafted_state_bugs.PLANTS)
@pytest.mark.parametrize(("family", "recurrence"), [("qwen3_next", "blocks"), ("nemotron_h", "passes")])
def test_planted_bugs_of_recurrent_states_are_found(
    zoo: Zoo,
    plain: Plain,
    monkeypatch: Patch,
    plant: Callable[[Patch], None],
    family: str,
    recurrence: DraftRecurrence,
) -> None:
    """The twins for models with recurrent states; tests/model/load_check/test_text_checks_drafts.py has the
    load check's."""
    without = plain(family)
    plant(monkeypatch)
    assert not run_drafts(zoo, monkeypatch, family, without, recurrence=recurrence)[0]


@pytest.mark.parametrize(
    ("methods", "reason"),
    [
        (ComputeMethods("ragged"), "decodes ragged"),
        (ComputeMethods("paged", draft_problem="they differ"), "they differ"),
    ],
)
def test_what_cannot_draft_says_so(zoo: Zoo, methods: ComputeMethods, reason: str) -> None:
    """`auto` decodes without drafts, and `ngram` is an error."""
    folder = zoo.text("llama")
    auto, ngram = SpeculationSettings("auto"), SpeculationSettings("ngram")
    engine = engine_driver.make_real_engine(folder, methods, speculation=auto)
    found = engine.scheduler.drafts.describe()
    assert (found["method"], found["configured"]) == ("off", "auto")
    assert found["problem"].startswith("off because ") and reason in found["problem"]
    with pytest.raises(ConfigError, match=r"speculation\.method: ngram cannot be used"):
        engine_driver.make_real_engine(folder, methods, speculation=ngram)
