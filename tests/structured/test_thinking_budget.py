"""`thinking_budget` (issue 5.5, B26): what a row may say, in bytes; and on the embedded model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlxrun.api.choice import Choice
from mlxrun.api.context import ApiContext
from mlxrun.api.openai.request import prepare_request
from mlxrun.config.settings import Config
from mlxrun.engine.client import EngineClient
from mlxrun.errors import RequestError
from mlxrun.model.model_info import load_model_info
from mlxrun.parsers.answer_parser import AnswerParser
from mlxrun.parsers.registry import REASONING_FAMILIES, detect_formats, find_reasoning_family
from mlxrun.scheduler.request import Grammar, GrammarMatcher
from mlxrun.structured import matcher as rows
from mlxrun.structured.grammar import compile_grammar
from mlxrun.structured.thinking_budget import ThinkingBudget, budget_of
from mlxrun.text.images import MediaLoader
from tests.helpers import byte_tokenizer
from tests.helpers.byte_tokenizer import TOKEN_ID
from tests.helpers.parser_driver import Item, Thought, merged
from tests.helpers.served_model import THINK as QUESTION

EOS, THINK, UNTHINK = (TOKEN_ID[text] for text in ("<|im_end|>", "<think>", "</think>"))
STOP = frozenset({EOS})
OPENED, ASKED = "<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n"
CLOSE = [10, UNTHINK, 10, 10]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import PreTrainedTokenizerFast

    folder: Path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer.save_tokenizer(folder)
    made = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return SimpleNamespace(tokenizer=made, eos_ids=STOP)


def budget(
    host: Any, most: int, prompt: str = OPENED, inner: Grammar | None = None, think: str = "think"
) -> ThinkingBudget:
    return budget_of(most, find_reasoning_family(think), prompt, host, inner)


def open_to(row: GrammarMatcher) -> set[int]:
    """What may follow."""
    return {
        int(i) for i in np.flatnonzero(np.unpackbits(np.frombuffer(row.mask(), np.uint8), bitorder="little"))
    }


def say(row: GrammarMatcher, tokens: Iterable[int]) -> GrammarMatcher:
    """Each token must be allowed before it is said."""
    for token in tokens:
        assert token in open_to(row), token
        row.accept(token)
    return row


def forced(row: GrammarMatcher) -> list[int]:
    """Says all that has no other choice."""
    said = []
    while len(only := open_to(row)) == 1 and not row.done:
        said.append(*only)
        row.accept(said[-1])
    return said


def everything(row: GrammarMatcher) -> bool:
    return open_to(row) >= {*range(256), EOS, THINK, UNTHINK}


# -- the row ----------------------------------------------------------------------------------------------


def test_a_thought_that_the_prompt_began_is_closed(host: Any) -> None:
    row = budget(host, 3).start((), STOP)
    say(row, b"ab")
    assert everything(row)
    say(row, b"c")
    assert open_to(row) == {10} and not row.done
    assert forced(row) == CLOSE
    assert everything(say(row, b"Yes. A long answer is not counted.")) and not row.done


def test_a_thought_that_the_model_begins_is_closed(host: Any) -> None:
    row = budget(host, 3, ASKED).start((), STOP)
    assert everything(say(row, [10, THINK, *b"ab"]))
    assert forced(say(row, b"c")) == CLOSE


def test_an_answer_without_a_thought_is_not_counted(host: Any) -> None:
    row = budget(host, 3, ASKED).start((), STOP)
    assert everything(say(row, b"Yes, use <think> so: "))
    assert everything(say(row, [THINK, *b"abcdef"]))  # in the middle of text the tag is text


def test_a_thought_that_ends_in_time_is_left_alone(host: Any) -> None:
    row = budget(host, 3).start((), STOP)
    assert everything(say(row, [*b"ab", UNTHINK, *b"Yes, it is."]))


def test_no_tokens_at_all(host: Any) -> None:
    assert forced(budget(host, 0).start((), STOP)) == CLOSE
    row = budget(host, 0, ASKED).start((), STOP)
    assert everything(row)
    assert forced(say(row, [THINK])) == CLOSE


def test_the_tokens_of_two_thoughts_are_one_budget(host: Any) -> None:
    row = budget(host, 4).start((), STOP)
    say(row, [*b"ab", UNTHINK, 10, THINK, ord("c")])
    assert forced(say(row, b"d")) == CLOSE
    assert forced(say(row, [THINK])) == CLOSE  # and a third is over before it begins


def test_an_end_may_follow_in_a_thought_but_not_in_its_closing(host: Any) -> None:
    """A stop token is no part of the closing text, so the thought is always closed."""
    row = budget(host, 2).start((), STOP)
    assert EOS in open_to(say(row, b"a"))
    assert EOS not in open_to(say(row, b"b"))
    assert not budget(host, 2).start((), frozenset({5000})).done
    assert 5000 in open_to(budget(host, 2).start((), frozenset({5000})))


@pytest.mark.parametrize(
    ("said", "rest"),
    [(b"ab\n", CLOSE[1:]), (b"a</", b"think>\n\n"), (b"</think", b">\n\n"), (b"</thin ", CLOSE)],
)
def test_what_was_begun_is_not_written_twice(host: Any, said: bytes, rest: Sequence[int]) -> None:
    """A line break at the end, or a tag that the model spells out itself."""
    row = budget(host, len(said)).start((), STOP)
    assert forced(say(row, said)) == [*rest]


def test_a_character_is_not_torn(host: Any) -> None:
    """Tokens that are parts of one: the thought ends behind it."""
    for text in ("é", "日", "🙂"):
        data = text.encode()
        for most in range(1, len(data)):
            row = budget(host, most).start((), STOP)
            assert forced(say(row, data)) == CLOSE
            assert everything(say(budget(host, most).start((), STOP), data[:most]))


def test_what_was_said_is_replayed(host: Any) -> None:
    made = budget(host, 2)
    for count in range(8):
        said = [*b"ab", *CLOSE, *b"Y"][:count]
        assert made.start(said, STOP).mask() == say(made.start((), STOP), said).mask()


def test_rows_of_one_budget_do_not_touch_each_other(host: Any) -> None:
    made = budget(host, 1)
    one, other = made.start((), STOP), made.start((), STOP)
    say(one, b"a")
    assert everything(other)


def test_another_token_than_the_closing_fails_the_row(host: Any) -> None:
    """The twin of the masks."""
    row = say(budget(host, 1).start((), STOP), b"a")
    with pytest.raises(RequestError, match="thinking_budget: token 98 where the thought must end with 10"):
        row.accept(98)


# -- the request's own grammar ----------------------------------------------------------------------------


def test_a_grammar_begins_behind_the_thought(host: Any) -> None:
    """B23: it holds the answer, and the budget the thought."""
    inner = compile_grammar("choice", ["yes", "no"], host, param="p")
    row = budget(host, 2, inner=inner.after(rows.ReasoningBounds("</think>"))).start((), STOP)
    assert EOS not in open_to(say(row, b"a"))
    assert forced(say(row, b"b")) == CLOSE
    assert open_to(row) & set(range(97, 123)) == {ord("y"), ord("n")}
    assert not row.done
    assert say(row, b"yes").done and open_to(row) == {EOS}


def test_a_grammar_whose_thought_the_model_may_begin(host: Any) -> None:
    inner = compile_grammar("choice", ["yes", "no"], host, param="p")
    made = budget(host, 1, ASKED, inner.after(rows.ReasoningBounds("</think>", (THINK,))))
    assert say(made.start((), STOP), b"no").done
    row = say(made.start((), STOP), [THINK, ord("a")])
    assert forced(row) == CLOSE
    assert say(row, b"no").done
    assert (
        made.start([THINK, ord("a"), *CLOSE], STOP).mask()
        == say(made.start((), STOP), [THINK, ord("a"), *CLOSE]).mask()
    )


# -- formats ----------------------------------------------------------------------------------------------


def read(think: str, opened: bool, said: Iterable[int], host: Any) -> list[Item]:
    parser = AnswerParser(None, find_reasoning_family(think), opened=opened)
    text = host.tokenizer.decode([*said], skip_special_tokens=False)
    return merged([*parser.feed(text), *parser.finish()])


@pytest.mark.parametrize("think", [family.name for family in REASONING_FAMILIES])
def test_every_format_is_closed_in_its_own_way(host: Any, think: str) -> None:
    """What the row says is a thought and an answer to the parser of the format."""
    opener, _ = find_reasoning_family(think).pairs[0]
    ids = host.tokenizer(opener, add_special_tokens=False)["input_ids"]
    row = say(budget(host, 6, ASKED, think=think).start((), STOP), [*ids, *b"hm so"])
    assert everything(row)
    closing = forced(say(row, b"."))
    assert closing and everything(row)
    assert read(think, False, [*ids, *b"hm so.", *closing, *b"Yes."], host) == [Thought("hm so."), "Yes."]


@pytest.mark.parametrize("name", ["gemma4", "mistral", "cohere", "harmony"])
def test_special_tokens_open_anywhere(host: Any, name: str) -> None:
    opener, _ = find_reasoning_family(name).pairs[0]
    ids = host.tokenizer(opener, add_special_tokens=False)["input_ids"]
    row = say(budget(host, 2, ASKED, think=name).start((), STOP), [*b"First text. ", *ids, *b"h"])
    assert everything(row)
    assert forced(say(row, b"m"))


def test_a_model_without_thoughts_refuses_the_field(host: Any) -> None:
    with pytest.raises(RequestError) as caught:
        budget_of(5, None, ASKED, host, param="chat_template_kwargs.thinking_budget")
    assert caught.value.param == "chat_template_kwargs.thinking_budget"
    assert "no format of thoughts" in str(caught.value)
    with pytest.raises(RequestError, match="^thinking_budget: .*ends a thought is not known"):
        budget_of(5, replace(find_reasoning_family("think"), closing=""), ASKED, host)


# -- the engine -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config() -> Config:
    return Config()


@pytest.fixture(scope="module")
def embedded(config: Config) -> Iterator[Any]:
    yield load_model_info(config.model, weights=True)


Ask = Callable[[int | None], Any]


async def ask(config: Config, host: Any, most: int | None, schema: Any = None) -> Choice:
    """The embedded model's answer to a question that it thinks about."""
    formats = detect_formats(host.chat_template, host.tokenizer, config.parsers)
    side = ApiContext(host, config, MediaLoader(config.media, None), formats)
    body: dict[str, Any] = {
        "messages": QUESTION,
        "max_tokens": 100,
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    prepared = await prepare_request("/v1/chat/completions", body, side)
    (request,) = prepared.requests
    inner = None if schema is None else compile_grammar("json_schema", schema, host, param="schema")
    if inner is not None:
        inner = inner.after(rows.ReasoningBounds("</think>"))
    if most is not None:
        made = budget_of(most, formats.reasoning, prepared.prompts[0], host, inner)
        request = replace(request, grammar=made)
        prepared = replace(prepared, requests=(request,))
    choice = Choice(prepared, 0, host)
    client = await EngineClient.start(config, host)
    try:
        async for event in client.generate(request):
            choice.feed(event)
    finally:
        await client.close()
    return choice


async def test_the_embedded_model_answers_after_a_cut_thought(config: Config, embedded: Any) -> None:
    """Issue 5.5: reasoning tokens are bounded, the answer is one; with enough of them nothing changes."""
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
