"""`thinking_budget`: which tokens may follow, in bytes; and answers of the embedded model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.tiny import byte_tokenizer
from benchmarks.tiny.byte_tokenizer import TOKEN_ID
from mlxrun.api.choice import Choice
from mlxrun.api.openai.request import prepare_request
from mlxrun.api.parsers.answer_parser import AnswerParser
from mlxrun.api.parsers.registry import REASONING_FAMILIES, detect_formats, find_reasoning_family
from mlxrun.api.prepared import ApiContext
from mlxrun.api.structured import matcher as rows
from mlxrun.api.structured.grammar import compile_grammar
from mlxrun.api.structured.thinking_budget import ThinkingBudget, build_thinking_budget
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.config.settings import Config
from mlxrun.core.errors import RequestError
from mlxrun.core.request import Grammar, GrammarMatcher
from mlxrun.engine.client import EngineClient
from mlxrun.model.load.model_info import load_model_info
from tests.helpers.parser_driver import Item, Reasoning, merge_deltas
from tests.helpers.served_model import THINK as QUESTION

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("probed_once")]

EOS, THINK, UNTHINK = (TOKEN_ID[text] for text in ("<|im_end|>", "<think>", "</think>"))
STOP = frozenset({EOS})
OPENED, CLOSED = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n"
CLOSE = [10, UNTHINK, 10, 10]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import PreTrainedTokenizerFast

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer.save_tokenizer(folder)
    made = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return SimpleNamespace(tokenizer=made, eos_ids=STOP)


def budget(
    model: Any, max_tokens: int, prompt: str = OPENED, inner: Grammar | None = None, think: str = "think"
) -> ThinkingBudget:
    return build_thinking_budget(max_tokens, find_reasoning_family(think), prompt, model, inner)


def open_to(row: GrammarMatcher) -> set[int]:
    """Return the tokens that may follow."""
    return {
        int(i) for i in np.flatnonzero(np.unpackbits(np.frombuffer(row.mask(), np.uint8), bitorder="little"))
    }


def say(row: GrammarMatcher, tokens: Iterable[int]) -> GrammarMatcher:
    """Accept the tokens, each of which the mask must allow."""
    for token in tokens:
        assert token in open_to(row), token
        row.accept(token)
    return row


def forced(row: GrammarMatcher) -> list[int]:
    """Accept tokens as long as only one may follow, and return them."""
    said = []
    while len(only := open_to(row)) == 1 and not row.done:
        said.append(*only)
        row.accept(said[-1])
    return said


def everything(row: GrammarMatcher) -> bool:
    return open_to(row) >= {*range(256), EOS, THINK, UNTHINK}


# -- the row ----------------------------------------------------------------------------------------------


def test_reasoning_that_the_prompt_began_is_closed(model: Any) -> None:
    row = budget(model, 3).start((), STOP)
    say(row, b"ab")
    assert everything(row)
    say(row, b"c")
    assert open_to(row) == {10} and not row.done
    assert forced(row) == CLOSE
    assert everything(say(row, b"Yes. A long answer is not counted.")) and not row.done


def test_reasoning_that_the_model_begins_is_closed(model: Any) -> None:
    row = budget(model, 3, CLOSED).start((), STOP)
    assert everything(say(row, [10, THINK, *b"ab"]))
    assert forced(say(row, b"c")) == CLOSE


def test_an_answer_without_reasoning_is_not_counted(model: Any) -> None:
    row = budget(model, 3, CLOSED).start((), STOP)
    assert everything(say(row, b"Yes, use <think> so: "))
    assert everything(say(row, [THINK, *b"abcdef"]))  # in the middle of text the tag is text


def test_reasoning_that_ends_in_time_is_not_changed(model: Any) -> None:
    row = budget(model, 3).start((), STOP)
    assert everything(say(row, [*b"ab", UNTHINK, *b"Yes, it is."]))


def test_a_budget_of_no_tokens(model: Any) -> None:
    assert forced(budget(model, 0).start((), STOP)) == CLOSE
    row = budget(model, 0, CLOSED).start((), STOP)
    assert everything(row)
    assert forced(say(row, [THINK])) == CLOSE


def test_the_tokens_of_two_stretches_of_reasoning_count_together(model: Any) -> None:
    row = budget(model, 4).start((), STOP)
    say(row, [*b"ab", UNTHINK, 10, THINK, ord("c")])
    assert forced(say(row, b"d")) == CLOSE
    assert forced(say(row, [THINK])) == CLOSE  # and a third is closed as it begins


def test_an_end_may_follow_in_reasoning_but_not_in_its_closing(model: Any) -> None:
    """A stop token is no part of the closing text, so reasoning is always closed."""
    row = budget(model, 2).start((), STOP)
    assert EOS in open_to(say(row, b"a"))
    assert EOS not in open_to(say(row, b"b"))
    assert not budget(model, 2).start((), frozenset({5000})).done
    assert 5000 in open_to(budget(model, 2).start((), frozenset({5000})))


@pytest.mark.parametrize(
    ("said", "rest"),
    [(b"ab\n", CLOSE[1:]), (b"a</", b"think>\n\n"), (b"</think", b">\n\n"), (b"</thin ", CLOSE)],
)
def test_a_closing_that_was_begun_is_not_written_twice(model: Any, said: bytes, rest: Sequence[int]) -> None:
    """A line break at the end, or a tag that the model spells out itself."""
    row = budget(model, len(said)).start((), STOP)
    assert forced(say(row, said)) == [*rest]


def test_a_character_is_not_split(model: Any) -> None:
    """Reasoning ends behind a character of several tokens."""
    for text in ("é", "日", "🙂"):
        data = text.encode()
        for max_tokens in range(1, len(data)):
            row = budget(model, max_tokens).start((), STOP)
            assert forced(say(row, data)) == CLOSE
            assert everything(say(budget(model, max_tokens).start((), STOP), data[:max_tokens]))


def test_earlier_output_is_replayed(model: Any) -> None:
    made = budget(model, 2)
    for count in range(8):
        said = [*b"ab", *CLOSE, *b"Y"][:count]
        assert made.start(said, STOP).mask() == say(made.start((), STOP), said).mask()


def test_rows_of_one_budget_are_independent(model: Any) -> None:
    made = budget(model, 1)
    one, other = made.start((), STOP), made.start((), STOP)
    say(one, b"a")
    assert everything(other)


def test_another_token_than_the_closing_fails_the_row(model: Any) -> None:
    """The counterpart of the masks."""
    row = say(budget(model, 1).start((), STOP), b"a")
    with pytest.raises(RequestError, match="thinking_budget: token 98 where the reasoning must end with 10"):
        row.accept(98)


# -- the request's own grammar ----------------------------------------------------------------------------


def test_a_grammar_begins_behind_the_reasoning(model: Any) -> None:
    """The grammar applies to the answer, and the budget to the reasoning."""
    inner = compile_grammar("choice", ["yes", "no"], model, param="p")
    row = budget(model, 2, inner=inner.begin_after(rows.ReasoningBounds("</think>"))).start((), STOP)
    assert EOS not in open_to(say(row, b"a"))
    assert forced(say(row, b"b")) == CLOSE
    assert open_to(row) & set(range(97, 123)) == {ord("y"), ord("n")}
    assert not row.done
    assert say(row, b"yes").done and open_to(row) == {EOS}


def test_a_grammar_with_reasoning_that_the_model_may_begin(model: Any) -> None:
    inner = compile_grammar("choice", ["yes", "no"], model, param="p")
    made = budget(model, 1, CLOSED, inner.begin_after(rows.ReasoningBounds("</think>", (THINK,))))
    assert say(made.start((), STOP), b"no").done
    row = say(made.start((), STOP), [THINK, ord("a")])
    assert forced(row) == CLOSE
    assert say(row, b"no").done
    assert (
        made.start([THINK, ord("a"), *CLOSE], STOP).mask()
        == say(made.start((), STOP), [THINK, ord("a"), *CLOSE]).mask()
    )


# -- formats ----------------------------------------------------------------------------------------------


def read(think: str, opened: bool, said: Iterable[int], model: Any) -> list[Item]:
    parser = AnswerParser(None, find_reasoning_family(think), opened=opened)
    text = model.tokenizer.decode([*said], skip_special_tokens=False)
    return merge_deltas([*parser.feed(text), *parser.finish()])


@pytest.mark.parametrize("think", [family.name for family in REASONING_FAMILIES])
def test_every_format_is_closed_in_its_own_way(model: Any, think: str) -> None:
    """The parser of the format reads the row as reasoning and an answer."""
    opener, _ = find_reasoning_family(think).pairs[0]
    ids = model.tokenizer(opener, add_special_tokens=False)["input_ids"]
    row = say(budget(model, 6, CLOSED, think=think).start((), STOP), [*ids, *b"hm so"])
    assert everything(row)
    closing = forced(say(row, b"."))
    assert closing and everything(row)
    assert read(think, False, [*ids, *b"hm so.", *closing, *b"Yes."], model) == [Reasoning("hm so."), "Yes."]


@pytest.mark.parametrize("name", ["gemma4", "mistral", "cohere", "harmony"])
def test_special_tokens_open_anywhere(model: Any, name: str) -> None:
    opener, _ = find_reasoning_family(name).pairs[0]
    ids = model.tokenizer(opener, add_special_tokens=False)["input_ids"]
    row = say(budget(model, 2, CLOSED, think=name).start((), STOP), [*b"First text. ", *ids, *b"h"])
    assert everything(row)
    assert forced(say(row, b"m"))


def test_a_model_of_no_known_format_rejects_the_field(model: Any) -> None:
    with pytest.raises(RequestError) as caught:
        build_thinking_budget(5, None, CLOSED, model, param="chat_template_kwargs.thinking_budget")
    assert caught.value.param == "chat_template_kwargs.thinking_budget"
    assert "format of reasoning is not known" in str(caught.value)
    with pytest.raises(RequestError, match="^thinking_budget: .*ends its reasoning is not known"):
        build_thinking_budget(5, replace(find_reasoning_family("think"), closing=""), CLOSED, model)


# -- the engine -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config() -> Config:
    return Config()


@pytest.fixture(scope="module")
def embedded(config: Config) -> Iterator[Any]:
    yield load_model_info(config.model, weights=True)


Ask = Callable[[int | None], Any]


async def ask(
    config: Config,
    model: Any,
    max_tokens: int | None,
    schema: Any = None,
    messages: Sequence[dict[str, str]] = QUESTION,
) -> Choice:
    """Return the embedded model's answer, by default to a question that it reasons about."""
    formats = detect_formats(model.chat_template, model.tokenizer, config.parsers)
    side = ApiContext(model, config, MediaLoader(config.media, None), formats)
    body: dict[str, Any] = {
        "messages": messages,
        "max_tokens": 100,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    prepared = await prepare_request("/v1/chat/completions", body, side)
    (request,) = prepared.requests
    inner = None if schema is None else compile_grammar("json_schema", schema, model, param="schema")
    if inner is not None:
        inner = inner.begin_after(rows.ReasoningBounds("</think>"))
    if max_tokens is not None:
        made = build_thinking_budget(max_tokens, formats.reasoning, prepared.prompts[0], model, inner)
        request = replace(request, grammar=made)
        prepared = replace(prepared, requests=(request,))
    choice = Choice(prepared, 0, model)
    client = await EngineClient.start(config, model)
    try:
        async for event in client.generate(request):
            choice.feed(event)
    finally:
        await client.close()
    return choice


async def test_the_embedded_model_answers_after_reasoning_was_closed(config: Config, embedded: Any) -> None:
    """The reasoning tokens are bounded and an answer follows; with a large budget nothing changes."""
    free = await ask(config, embedded, None)
    assert free.reasoning_tokens > 8 and free.content == "47"
    same = await ask(config, embedded, 100)
    assert (same.text, same.content) == (free.text, free.content)
    short = await ask(config, embedded, 8)
    assert short.reasoning and free.reasoning.startswith(short.reasoning)
    assert len(short.reasoning) < len(free.reasoning)
    assert short.content and short.finish_reason == "stop"
    assert short.reasoning_tokens <= 8 + len("\n</think>\n\n")


async def test_a_budget_and_a_schema(config: Config, embedded: Any) -> None:
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    answer = await ask(config, embedded, 4, schema | {"additionalProperties": False})
    assert answer.reasoning
    assert set(json.loads(answer.content)) == {"sum"}


async def test_an_integer_that_the_embedded_model_does_not_know_ends(config: Config, embedded: Any) -> None:
    """It writes one digit again and again. Without a bound for integers, 100 tokens end its answer."""
    schema = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
    sky = [{"role": "user", "content": "What colour is the sky?"}]
    answer = await ask(config, embedded, 0, schema | {"additionalProperties": False}, sky)
    assert answer.finish_reason == "stop"
    assert abs(json.loads(answer.content)["sum"]) > 10**17, "it ended by itself: ask another question"
