"""Rows with a grammar in the engine: valid beside any other rows, which do not change."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import pytest

from benchmarks.tiny.byte_tokenizer import EOS, TOKEN_ID
from mlxrun.api.structured.grammar import CompiledGrammar, compile_grammar
from mlxrun.api.structured.matcher import ReasoningBounds
from mlxrun.core.errors import RequestError
from mlxrun.core.request import FinishReason, Request, TokenEvent
from mlxrun.engine.engine import Engine
from mlxrun.model.run import runner
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.run.runner import ModelRunner
from tests.api.structured.test_schemas import CLOSERS, judge
from tests.helpers import engine_driver, schema_cases, text_models
from tests.helpers.engine_driver import TimedRequest
from tests.helpers.model_fixtures import Zoo

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("probed_once")]

PROMPTS = text_models.prompts(3, (7, 2, 21, 12, 33, 5))
SCHEMAS = [schema_cases.make_random(seed) for seed in (1, 2, 5, 8)]
STOP = frozenset({EOS})


def compile_schema(engine: Engine, schema: Any) -> CompiledGrammar:
    return compile_grammar("json_schema", schema, engine.model_info, param="schema")


def make_request(engine: Engine, name: str, schema: Any = schema_cases.PERSON, **params: Any) -> Request:
    """A request whose answer must match the schema; its bias makes for short answers."""
    given = {
        "max_tokens": 300,
        "temperature": 1.0,
        "seed": 7,
        "stop_ids": STOP,
        "logit_bias": CLOSERS,
    } | params
    request = engine_driver.make_text_request(name, PROMPTS[int(name) % len(PROMPTS)], **given)
    return replace(request, grammar=compile_schema(engine, schema))


def text(event: TokenEvent) -> str:
    assert event.error is None, event.error
    return bytes(event.tokens).decode()


def check_valid(event: TokenEvent, schema: Any) -> None:
    assert event.finish is FinishReason.STOP, event
    assert judge(schema, event.tokens)[1] is None, text(event)


# -- mixed batches ----------------------------------------------------------------------------------------


def make_mixed(engine: Engine) -> list[TimedRequest]:
    """Rows 0 to 3 follow a schema each; "a" to "c" follow none. They come in turns."""
    ruled = [make_request(engine, str(i), schema, seed=i) for i, schema in enumerate(SCHEMAS)]
    free = [engine_driver.make_text_request(name, PROMPTS[i]) for i, name in enumerate("abc")]
    return [TimedRequest(r, 2 * i) for i, r in enumerate(ruled)] + [
        TimedRequest(r, 3 * i) for i, r in enumerate(free)
    ]


ENGINES: dict[str, tuple[str, ComputeMethods | None, dict[str, Any]]] = {
    "llama": ("llama", None, {}),
    "windows": ("gemma3_text", None, {}),
    "hybrid": ("qwen3_next", None, {}),
    "grouped": ("llama", ComputeMethods("grouped"), {}),
    "row by row": ("llama", ComputeMethods("row_by_row"), {}),
    "launched first": ("llama", ComputeMethods("ragged", launch_first=True), {}),
    "reproducible": ("llama", None, {"reproducible": True}),
}


@pytest.mark.parametrize("which", ENGINES)
def test_rows_without_a_grammar_are_unchanged_beside_rows_with_one(zoo: Zoo, which: str) -> None:
    """A mixed batch changes no token and no probability of the others; those with a schema follow it."""
    family, methods, options = ENGINES[which]
    engine = engine_driver.make_real_engine(zoo.text(family, ends=True), methods, **options)
    events = engine_driver.run_requests(engine, make_mixed(engine))
    for i, name in enumerate("abc"):
        engine_driver.check_answer(events[name], zoo.answer(family, PROMPTS[i], ends=True))
    for i, schema in enumerate(SCHEMAS):
        check_valid(events[str(i)], schema)


def test_masks_on_the_wrong_rows_are_seen(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counterpart: each row has its neighbour's mask."""
    made = runner.make_grammar_mask

    def shifted(guards: Sequence[Any], vocab: int) -> mx.array | None:
        mask = made(guards, vocab)
        return None if mask is None else mx.roll(mask, 1, axis=0)

    monkeypatch.setattr(runner, "make_grammar_mask", shifted)
    engine = engine_driver.make_real_engine(zoo.text("llama", ends=True))
    events = engine_driver.run_requests(engine, make_mixed(engine))
    assert any(
        engine_driver.has_other_answer(events[name], zoo.answer("llama", PROMPTS[i], ends=True))
        for i, name in enumerate("abc")
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_a_grammar_has_the_same_answer_alone_and_in_a_batch(zoo: Zoo, temperature: float) -> None:
    """With different schemas and settings beside each other."""
    folder = zoo.text("llama", ends=True)
    engine = engine_driver.make_real_engine(folder)
    todo = [make_request(engine, str(i), s, temperature=temperature, seed=i) for i, s in enumerate(SCHEMAS)]
    together = engine_driver.run_requests(engine, [TimedRequest(r, i) for i, r in enumerate(todo)])
    for request in todo:
        alone = engine_driver.run_requests(engine_driver.make_real_engine(folder), [request])
        assert alone[request.id].tokens == together[request.id].tokens
    assert len({e.tokens for e in together.values()}) == len(todo)


def test_one_grammar_serves_many_rows(zoo: Zoo) -> None:
    """n > 1: choices share the compiled grammar, and each follows it independently."""
    engine = engine_driver.make_real_engine(zoo.text("llama", ends=True))
    first = make_request(engine, "0", logprobs=None)
    todo = [replace(first, id=str(i), params=replace(first.params, seed=i)) for i in range(6)]
    events = engine_driver.run_requests(engine, todo)
    for event in events.values():
        check_valid(event, schema_cases.PERSON)
    assert len({e.tokens for e in events.values()}) > 1


# -- the step ---------------------------------------------------------------------------------------------


def record_steps(engine: Engine, request: Request, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what each step does, by letters: (l)aunch, (s)ample, (r)ead."""
    seen: list[str] = []

    def record(owner: Any, name: str, letter: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a: (seen.append(letter), original(*a))[1])

    record(ModelRunner, "sample_rows", "s")
    record(runner, "collect_tokens", "r")
    record(runner.mx, "async_eval", "l")
    engine_driver.run_requests(engine, [request], lambda step: seen.append(" "))
    return "".join(seen)


def test_a_batch_without_grammars_is_sampled_ahead(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing changes for it: sampling is part of what is launched."""
    engine = engine_driver.make_real_engine(zoo.text("llama"))
    steps = record_steps(engine, engine_driver.make_text_request("a", PROMPTS[0]), monkeypatch)
    assert " srl srl srl " in steps
    assert "rs" not in steps.replace(" ", "|")


def test_the_forward_is_launched_before_the_masks_are_made(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are off the critical path: only sampling waits for the last token."""
    engine = engine_driver.make_real_engine(zoo.text("llama", ends=True))
    steps = record_steps(engine, make_request(engine, "0"), monkeypatch)
    assert " rlsl rlsl rlsl " in steps


def test_logprobs_are_the_models_own(zoo: Zoo) -> None:
    """Those before the grammar: a token that only the grammar forces is unlikely."""
    engine = engine_driver.make_real_engine(zoo.text("llama", ends=True))
    request = make_request(engine, "0", temperature=0.0, logit_bias={}, max_tokens=3, logprobs=2)
    event = engine_driver.run_requests(engine, [request])["0"]
    oracle = zoo.answer("llama", PROMPTS[0], ends=True)
    assert event.tokens[0] == ord("{") != oracle.tokens[0]
    assert event.logprobs[0].logprob == pytest.approx(oracle.logprobs[0][ord("{")], abs=1e-4)
    assert event.logprobs[0].top[0][0] == oracle.tokens[0]


# -- other kinds of grammars ------------------------------------------------------------------------------

SHAPES: dict[str, tuple[Any, Any, Callable[[str], bool]]] = {
    "regex": ("regex", "[a-c]{2}-[0-9]{3}", lambda t: len(t) == 6 and t[2] == "-"),
    "choice": (
        "choice",
        ["alpha", "beta\n", "\u00e9t\u00e9"],
        lambda t: t in ("alpha", "beta\n", "\u00e9t\u00e9"),
    ),
    "lark": ("lark", 'start: "(" (start | /[0-9]/) ")"', lambda t: t.strip("()") in "0123456789"),
    "ebnf": ("ebnf", 'root ::= ("ab" | "cd") [0-9]', lambda t: t[:2] in ("ab", "cd") and t[2].isdigit()),
    "json_object": ("json_object", None, lambda t: isinstance(json.loads(t), dict)),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_other_shapes(zoo: Zoo, shape: str) -> None:
    """A regular expression, a choice, a grammar in Lark or EBNF, any JSON object."""
    kind, value, check = SHAPES[shape]
    engine = engine_driver.make_real_engine(zoo.text("llama", ends=True))
    made = compile_grammar(kind, value, engine.model_info, param="p")
    todo = [replace(make_request(engine, str(i), seed=i), grammar=made) for i in range(4)]
    for event in engine_driver.run_requests(engine, todo).values():
        assert event.finish is FinishReason.STOP
        assert check(text(event)), text(event)


@pytest.mark.parametrize("opened", [True, False])
def test_the_schema_applies_behind_the_reasoning_and_not_in_it(zoo: Zoo, opened: bool) -> None:
    """Reasoning is free, but for stop tokens; then comes white space, then the schema."""
    engine = engine_driver.make_real_engine(zoo.text("llama", ends=True))
    bounds = ReasoningBounds("</think>", () if opened else (TOKEN_ID["<think>"],))
    bias = CLOSERS | {TOKEN_ID["</think>"]: 6.0} | ({} if opened else {TOKEN_ID["<think>"]: 4.0})
    todo = []
    for i in range(4):
        request = make_request(engine, str(i), seed=i, logit_bias=bias)
        todo.append(replace(request, grammar=compile_schema(engine, schema_cases.PERSON).begin_after(bounds)))
    reasoning = set()
    for event in engine_driver.run_requests(engine, todo).values():
        assert event.finish is FinishReason.STOP
        said = list(event.tokens)
        assert opened or said[0] == TOKEN_ID["<think>"]
        end = said.index(TOKEN_ID["</think>"])
        reasoning.add(bytes(t for t in said[:end] if t < 256))
        assert judge(schema_cases.PERSON, said[end + 1 :])[1] is None
    assert len(reasoning) > 2
    assert not any(text.startswith(b"{") for text in reasoning)


def test_max_tokens_inside_the_answer(zoo: Zoo) -> None:
    """The answer ends with LENGTH, as elsewhere, and is a prefix of the complete answer."""
    engine = engine_driver.make_real_engine(zoo.text("llama", ends=True))
    whole, cut = (
        make_request(engine, "0"),
        replace(make_request(engine, "6", max_tokens=9), prompt=tuple(PROMPTS[0])),
    )
    events = engine_driver.run_requests(engine, [whole, cut])
    assert events["6"].finish is FinishReason.LENGTH
    assert events["6"].tokens == events["0"].tokens[:9]


# -- restarts ---------------------------------------------------------------------------------------------


def answer_alone(zoo: Zoo) -> dict[str, tuple[int, ...]]:
    engine = engine_driver.make_real_engine(zoo.text("llama", ends=True))
    return {
        name: event.tokens for name, event in engine_driver.run_requests(engine, make_ruled(engine)).items()
    }


def make_ruled(engine: Engine) -> list[Request]:
    return [make_request(engine, str(i), schema, seed=i) for i, schema in enumerate(SCHEMAS)]


@pytest.mark.parametrize("backend", ["none", "memory"])
def test_preempted_rows_follow_their_grammar_again(zoo: Zoo, backend: str) -> None:
    """A preempted row has the same answer, also if it is restored from the prefix cache."""
    engine = engine_driver.make_real_engine(zoo.text("llama", ends=True), backend=backend)
    dropped = 0

    def preempt(step: int) -> None:
        nonlocal dropped
        running = [e for e in engine.scheduler.requests if e.running and e.output]
        if step % 5 == 4 and running and dropped < 12:
            engine.scheduler.preempt(running[dropped % len(running)])
            dropped += 1

    events = engine_driver.run_requests(engine, make_ruled(engine), preempt)
    assert dropped == 12
    assert {name: event.tokens for name, event in events.items()} == answer_alone(zoo)


def test_a_failed_step_changes_no_answer(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are lost and computed again, one after the other."""
    expected = answer_alone(zoo)
    engine = engine_driver.make_real_engine(zoo.text("llama", ends=True))
    original, calls = ModelRunner.sample_rows, [0]

    def failing(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 12:
            raise RuntimeError("as scripted")
        return original(*given)

    monkeypatch.setattr(ModelRunner, "sample_rows", failing)
    events = engine_driver.run_requests(engine, make_ruled(engine))
    assert calls[0] > 12
    assert {name: event.tokens for name, event in events.items()} == expected


@pytest.mark.parametrize("known", [1, 5, -1])
def test_an_answer_is_resumed(zoo: Zoo, known: int) -> None:
    """Resuming a job: the tokens of an earlier run are replayed, and the rest is the same."""
    expected = answer_alone(zoo)
    engine = engine_driver.make_real_engine(zoo.text("llama", ends=True))
    todo = [
        replace(r, prior_output=expected[r.id][:known]) for r in make_ruled(engine) if len(expected[r.id]) > 6
    ]
    assert todo
    for name, event in engine_driver.run_requests(engine, todo).items():
        assert event.tokens == expected[name][known:]
        assert event.finish is FinishReason.STOP


def test_an_earlier_answer_that_does_not_fit_fails_alone(zoo: Zoo) -> None:
    engine = engine_driver.make_real_engine(zoo.text("llama", ends=True))
    wrong = replace(make_request(engine, "0"), prior_output=tuple(b"no"))
    events = engine_driver.run_requests(engine, [wrong, engine_driver.make_text_request("a", PROMPTS[1])])
    assert "does not allow" in str(events["0"].error)
    engine_driver.check_answer(events["a"], zoo.answer("llama", PROMPTS[1], ends=True))


# -- failures of one row ----------------------------------------------------------------------------------


@dataclass
class Broken:
    """A grammar whose rows fail at a token: in `mask`, in `accept`, or because no token is allowed."""

    how: str
    after: int = 4
    said: int = 0

    def start(self, answered: Sequence[int], stop_ids: frozenset[int]) -> Broken:
        if self.how == "start":
            raise RequestError("start fails")
        return replace(self, said=len(answered))

    done = False

    def mask(self) -> bytes:
        if self.said == self.after and self.how == "mask":
            raise ValueError("mask fails")
        return bytes(38) if self.said == self.after and self.how == "nothing" else b"\xff" * 38

    def accept(self, token: int) -> None:
        if self.said == self.after and self.how == "accept":
            raise ValueError("accept fails")
        self.said += 1


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("start", "start fails"),
        ("mask", "mask fails"),
        ("accept", "accept fails"),
        ("nothing", "allows no token"),
    ],
)
def test_a_broken_matcher_fails_its_row_alone(zoo: Zoo, how: str, reason: str) -> None:
    """Its tokens so far are delivered, then its error; the other rows do not change."""
    engine = engine_driver.make_real_engine(zoo.text("llama", ends=True))
    todo = [
        replace(engine_driver.make_text_request("x", PROMPTS[4]), grammar=Broken(how)),
        make_request(engine, "0"),
        engine_driver.make_text_request("a", PROMPTS[1]),
    ]
    events = engine_driver.run_requests(engine, todo)
    assert reason in str(events["x"].error)
    oracle = zoo.answer("llama", PROMPTS[4], ends=True)
    # The error's own event stands in place of the token that it comes with.
    assert events["x"].tokens == (() if how == "start" else oracle.tokens[:4])
    check_valid(events["0"], schema_cases.PERSON)
    engine_driver.check_answer(events["a"], zoo.answer("llama", PROMPTS[1], ends=True))


def test_a_complete_answer_needs_a_stop_token(zoo: Zoo) -> None:
    """ignore_eos with a grammar: nothing may follow, and nothing can end it."""
    engine = engine_driver.make_real_engine(zoo.text("llama", ends=True))
    made = compile_grammar("choice", ["ab"], engine.model_info, param="p")
    events = engine_driver.run_requests(
        engine, [replace(make_request(engine, "0", stop_ids=frozenset()), grammar=made)]
    )
    assert events["0"].tokens == tuple(b"ab")
    assert "no stop token" in str(events["0"].error)


def test_a_matcher_that_exceeds_its_limits_fails_alone(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a mask is bounded; what needs more, later than compiling tries, fails alone."""
    monkeypatch.setattr("mlxrun.api.structured.grammar.STEP_MAX_ITEMS", 40)
    engine = engine_driver.make_real_engine(zoo.text("llama", ends=True))
    source = 'start: LATER a\nLATER: /[yz]{20}/\na: a a | "x" | "xx" | b\nb: b b | "x"'
    hard = compile_grammar("lark", source, engine.model_info, param="p")
    todo = [
        replace(make_request(engine, "0", stop_ids=frozenset({99})), grammar=hard),
        engine_driver.make_text_request("a", PROMPTS[1]),
    ]
    events = engine_driver.run_requests(engine, todo)
    error = events["0"].error
    assert isinstance(error, RequestError) and error.param == "p"
    assert str(error).startswith("p: the grammar ") and "too many alternatives" in str(error)
    assert len(events["0"].tokens) >= 20
    engine_driver.check_answer(events["a"], zoo.answer("llama", PROMPTS[1], ends=True))
