"""Rows with a grammar in the engine: right in any company, and their neighbours never notice (B21, B23)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.engine.engine import Engine
from mlxrun.errors import RequestError
from mlxrun.model import runner, step_output
from mlxrun.model.compute_methods import ComputeMethods
from mlxrun.scheduler.request import FinishReason, Request, TokenEvent
from mlxrun.structured.grammar import CompiledGrammar, compile_grammar
from mlxrun.structured.matcher import ReasoningBounds
from tests.helpers import engine_driver, schema_cases, text_models
from tests.helpers.byte_tokenizer import EOS, TOKEN_ID
from tests.helpers.engine_driver import Ask
from tests.helpers.model_fixtures import Zoo
from tests.structured.test_schemas import CLOSERS, judged

PROMPTS = text_models.prompts(3, (7, 2, 21, 12, 33, 5))
SCHEMAS = [schema_cases.drawn(seed) for seed in (1, 2, 5, 8)]
STOP = frozenset({EOS})


def compiled(engine: Engine, schema: Any) -> CompiledGrammar:
    return compile_grammar("json_schema", schema, engine.model_info, param="schema")


def bound(engine: Engine, name: str, schema: Any = schema_cases.PERSON, **params: Any) -> Request:
    """A request that must answer by the schema; it would rather end soon."""
    given = {
        "max_tokens": 300,
        "temperature": 1.0,
        "seed": 7,
        "stop_ids": STOP,
        "logit_bias": CLOSERS,
    } | params
    request = engine_driver.text(name, PROMPTS[int(name) % len(PROMPTS)], **given)
    return replace(request, grammar=compiled(engine, schema))


def text(event: TokenEvent) -> str:
    assert event.error is None, event.error
    return bytes(event.tokens).decode()


def fits(event: TokenEvent, schema: Any) -> None:
    assert event.finish is FinishReason.STOP, event
    assert judged(schema, event.tokens)[1] is None, text(event)


# -- company ----------------------------------------------------------------------------------------------


def mixed(engine: Engine) -> list[Ask]:
    """Rows 0 to 3 follow a schema each; "a" to "c" follow none. They come in turns."""
    ruled = [bound(engine, str(i), schema, seed=i) for i, schema in enumerate(SCHEMAS)]
    free = [engine_driver.text(name, PROMPTS[i]) for i, name in enumerate("abc")]
    return [Ask(r, 2 * i) for i, r in enumerate(ruled)] + [Ask(r, 3 * i) for i, r in enumerate(free)]


WAYS: dict[str, tuple[str, ComputeMethods | None, dict[str, Any]]] = {
    "llama": ("llama", None, {}),
    "windows": ("gemma3_text", None, {}),
    "hybrid": ("qwen3_next", None, {}),
    "grouped": ("llama", ComputeMethods("grouped"), {}),
    "alone": ("llama", ComputeMethods("alone"), {}),
    "launched first": ("llama", ComputeMethods("ragged", launch_first=True), {}),
    "reproducible": ("llama", None, {"reproducible": True}),
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_without_a_grammar_are_the_oracle_s_beside_rows_with_one(zoo: Zoo, way: str) -> None:
    """B23: a mixed batch changes no token and no probability of the others; those with a schema fit it."""
    family, methods, options = WAYS[way]
    engine = engine_driver.engine(zoo.text(family, ends=True), methods, **options)
    events = engine_driver.run(engine, mixed(engine))
    for i, name in enumerate("abc"):
        engine_driver.same(events[name], zoo.answer(family, PROMPTS[i], ends=True))
    for i, schema in enumerate(SCHEMAS):
        fits(events[str(i)], schema)


def test_masks_on_the_wrong_rows_are_seen(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: each row has its neighbour's mask."""
    made = step_output.make_grammar_mask

    def shifted(guards: Sequence[Any], vocab: int) -> mx.array | None:
        mask = made(guards, vocab)
        return None if mask is None else mx.roll(mask, 1, axis=0)

    monkeypatch.setattr(step_output, "allowed", shifted)
    engine = engine_driver.engine(zoo.text("llama", ends=True))
    events = engine_driver.run(engine, mixed(engine))
    assert any(
        engine_driver.differs(events[name], zoo.answer("llama", PROMPTS[i], ends=True))
        for i, name in enumerate("abc")
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_a_grammar_says_the_same_alone_and_in_a_batch(zoo: Zoo, temperature: float) -> None:
    """B21: different schemas and settings beside each other."""
    folder = zoo.text("llama", ends=True)
    engine = engine_driver.engine(folder)
    todo = [bound(engine, str(i), s, temperature=temperature, seed=i) for i, s in enumerate(SCHEMAS)]
    together = engine_driver.run(engine, [Ask(r, i) for i, r in enumerate(todo)])
    for request in todo:
        alone = engine_driver.run(engine_driver.engine(folder), [request])
        assert alone[request.id].tokens == together[request.id].tokens
    assert len({e.tokens for e in together.values()}) == len(todo)


def test_one_grammar_serves_many_rows(zoo: Zoo) -> None:
    """n > 1: choices share the compiled grammar, and each follows it by itself."""
    engine = engine_driver.engine(zoo.text("llama", ends=True))
    first = bound(engine, "0", logprobs=None)
    todo = [replace(first, id=str(i), params=replace(first.params, seed=i)) for i in range(6)]
    events = engine_driver.run(engine, todo)
    for event in events.values():
        fits(event, schema_cases.PERSON)
    assert len({e.tokens for e in events.values()}) > 1


# -- the step ---------------------------------------------------------------------------------------------


def order_of_steps(engine: Engine, request: Request, monkeypatch: pytest.MonkeyPatch) -> str:
    """What each step does, by letters: (l)aunch, (d)raw, (r)ead."""
    seen: list[str] = []

    def noted(owner: Any, name: str, letter: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a: (seen.append(letter), original(*a))[1])

    noted(runner, "sample", "d")
    noted(runner, "collect", "r")
    noted(runner.mx, "async_eval", "l")
    engine_driver.run(engine, [request], lambda step: seen.append(" "))
    return "".join(seen)


def test_a_batch_without_grammars_is_drawn_ahead(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Design 4: nothing changes for it: the draw is part of what is launched."""
    engine = engine_driver.engine(zoo.text("llama"))
    steps = order_of_steps(engine, engine_driver.text("a", PROMPTS[0]), monkeypatch)
    assert " drl drl drl " in steps
    assert "rd" not in steps.replace(" ", "|")


def test_the_forward_is_launched_before_the_masks_are_made(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 5.6: masks off the critical path: only the draw waits for the last token."""
    engine = engine_driver.engine(zoo.text("llama", ends=True))
    steps = order_of_steps(engine, bound(engine, "0"), monkeypatch)
    assert " rldl rldl rldl " in steps


def test_logprobs_are_the_models_own(zoo: Zoo) -> None:
    """TokenLogprob: before the grammar, so a token that the model would never say is told as unlikely."""
    engine = engine_driver.engine(zoo.text("llama", ends=True))
    request = bound(engine, "0", temperature=0.0, logit_bias={}, max_tokens=3, logprobs=2)
    event = engine_driver.run(engine, [request])["0"]
    oracle = zoo.answer("llama", PROMPTS[0], ends=True)
    assert event.tokens[0] == ord("{") != oracle.tokens[0]
    assert event.logprobs[0].logprob == pytest.approx(oracle.logprobs[0][ord("{")], abs=1e-4)
    assert event.logprobs[0].top[0][0] == oracle.tokens[0]


# -- other shapes -----------------------------------------------------------------------------------------

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
    """Issue 5.6: a regular expression, a choice, a grammar in Lark or EBNF, any JSON object."""
    kind, value, check = SHAPES[shape]
    engine = engine_driver.engine(zoo.text("llama", ends=True))
    made = compile_grammar(kind, value, engine.model_info, param="p")
    todo = [replace(bound(engine, str(i), seed=i), grammar=made) for i in range(4)]
    for event in engine_driver.run(engine, todo).values():
        assert event.finish is FinishReason.STOP
        assert check(text(event)), text(event)


@pytest.mark.parametrize("opened", [True, False])
def test_the_schema_holds_after_the_thought_and_not_in_it(zoo: Zoo, opened: bool) -> None:
    """Issue 5.6: the thought is free, but for stop tokens; then whitespace; then the schema."""
    engine = engine_driver.engine(zoo.text("llama", ends=True))
    thought = ReasoningBounds("</think>", () if opened else (TOKEN_ID["<think>"],))
    bias = CLOSERS | {TOKEN_ID["</think>"]: 6.0} | ({} if opened else {TOKEN_ID["<think>"]: 4.0})
    todo = []
    for i in range(4):
        request = bound(engine, str(i), seed=i, logit_bias=bias)
        todo.append(replace(request, grammar=compiled(engine, schema_cases.PERSON).after(thought)))
    thoughts = set()
    for event in engine_driver.run(engine, todo).values():
        assert event.finish is FinishReason.STOP
        said = list(event.tokens)
        assert opened or said[0] == TOKEN_ID["<think>"]
        end = said.index(TOKEN_ID["</think>"])
        thoughts.add(bytes(t for t in said[:end] if t < 256))
        assert judged(schema_cases.PERSON, said[end + 1 :])[1] is None
    assert len(thoughts) > 2
    assert not any(thought.startswith(b"{") for thought in thoughts)


def test_max_tokens_inside_the_answer(zoo: Zoo) -> None:
    """The end of max_tokens is LENGTH, as elsewhere; what came is the beginning of what would have come."""
    engine = engine_driver.engine(zoo.text("llama", ends=True))
    whole, cut = bound(engine, "0"), replace(bound(engine, "6", max_tokens=9), prompt=tuple(PROMPTS[0]))
    events = engine_driver.run(engine, [whole, cut])
    assert events["6"].finish is FinishReason.LENGTH
    assert events["6"].tokens == events["0"].tokens[:9]


# -- starting again ---------------------------------------------------------------------------------------


def wanted(zoo: Zoo) -> dict[str, tuple[int, ...]]:
    engine = engine_driver.engine(zoo.text("llama", ends=True))
    return {name: event.tokens for name, event in engine_driver.run(engine, ruled(engine)).items()}


def ruled(engine: Engine) -> list[Request]:
    return [bound(engine, str(i), schema, seed=i) for i, schema in enumerate(SCHEMAS)]


@pytest.mark.parametrize("backend", ["none", "memory"])
def test_preempted_rows_follow_their_grammar_again(zoo: Zoo, backend: str) -> None:
    """B16: a row that is computed again, from the prefix cache too, says what it would have said."""
    engine = engine_driver.engine(zoo.text("llama", ends=True), backend=backend)
    dropped = 0

    def preempt(step: int) -> None:
        nonlocal dropped
        running = [e for e in engine.scheduler.requests if e.running and e.output]
        if step % 5 == 4 and running and dropped < 12:
            engine.scheduler._preempt(running[dropped % len(running)])
            dropped += 1

    events = engine_driver.run(engine, ruled(engine), preempt)
    assert dropped == 12
    assert {name: event.tokens for name, event in events.items()} == wanted(zoo)


def test_a_failed_step_changes_no_answer(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A32: all rows are lost and computed again, one after the other."""
    expected = wanted(zoo)
    engine = engine_driver.engine(zoo.text("llama", ends=True))
    original, calls = runner.sample, [0]

    def failing(*given: Any) -> Any:
        calls[0] += 1
        if calls[0] == 12:
            raise RuntimeError("as scripted")
        return original(*given)

    monkeypatch.setattr(runner, "sample", failing)
    events = engine_driver.run(engine, ruled(engine))
    assert calls[0] > 12
    assert {name: event.tokens for name, event in events.items()} == expected


@pytest.mark.parametrize("known", [1, 5, -1])
def test_an_answer_is_resumed(zoo: Zoo, known: int) -> None:
    """Batch resume: the tokens of an earlier run are replayed; the rest is the same."""
    expected = wanted(zoo)
    engine = engine_driver.engine(zoo.text("llama", ends=True))
    todo = [replace(r, prior_output=expected[r.id][:known]) for r in ruled(engine) if len(expected[r.id]) > 6]
    assert todo
    for name, event in engine_driver.run(engine, todo).items():
        assert event.tokens == expected[name][known:]
        assert event.finish is FinishReason.STOP


def test_an_earlier_answer_that_does_not_fit_fails_alone(zoo: Zoo) -> None:
    engine = engine_driver.engine(zoo.text("llama", ends=True))
    wrong = replace(bound(engine, "0"), prior_output=tuple(b"no"))
    events = engine_driver.run(engine, [wrong, engine_driver.text("a", PROMPTS[1])])
    assert "does not allow" in str(events["0"].error)
    engine_driver.same(events["a"], zoo.answer("llama", PROMPTS[1], ends=True))


# -- what fails, fails alone ------------------------------------------------------------------------------


@dataclass
class Broken:
    """A grammar whose rows fail at a token: in `mask`, in `accept`, or by allowing nothing."""

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
    """A32: its tokens so far are delivered, then its error; the others never notice."""
    engine = engine_driver.engine(zoo.text("llama", ends=True))
    todo = [
        replace(engine_driver.text("x", PROMPTS[4]), grammar=Broken(how)),
        bound(engine, "0"),
        engine_driver.text("a", PROMPTS[1]),
    ]
    events = engine_driver.run(engine, todo)
    assert reason in str(events["x"].error)
    oracle = zoo.answer("llama", PROMPTS[4], ends=True)
    # The error's own event stands in place of the token that it comes with.
    assert events["x"].tokens == (() if how == "start" else oracle.tokens[:4])
    fits(events["0"], schema_cases.PERSON)
    engine_driver.same(events["a"], zoo.answer("llama", PROMPTS[1], ends=True))


def test_a_complete_answer_needs_a_stop_token(zoo: Zoo) -> None:
    """ignore_eos with a grammar: nothing may follow, and nothing can end it."""
    engine = engine_driver.engine(zoo.text("llama", ends=True))
    made = compile_grammar("choice", ["ab"], engine.model_info, param="p")
    events = engine_driver.run(engine, [replace(bound(engine, "0", stop_ids=frozenset()), grammar=made)])
    assert events["0"].tokens == tuple(b"ab")
    assert "no stop token" in str(events["0"].error)


def test_a_matcher_that_runs_out_of_its_limits(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """B23: the time of a mask is bounded; what needs more fails alone, with llguidance's reason."""
    monkeypatch.setattr("mlxrun.structured.grammar.STEP_ITEMS", 40)
    engine = engine_driver.engine(zoo.text("llama", ends=True))
    hard = compile_grammar("lark", 'start: a\na: a a | "x" | "xx" | b\nb: b b | "x"', engine.model_info, param="p")
    todo = [
        replace(bound(engine, "0", stop_ids=frozenset({99})), grammar=hard),
        engine_driver.text("a", PROMPTS[1]),
    ]
    events = engine_driver.run(engine, todo)
    assert events["0"].error is not None and "the grammar cannot go on" in str(events["0"].error)
    engine_driver.same(events["a"], zoo.answer("llama", PROMPTS[1], ends=True))
