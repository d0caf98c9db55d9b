"""A prepared request: its counts, and the parser of each choice."""

from __future__ import annotations

import dataclasses

from mlxrun.api.parsers.delta import PlainParser
from mlxrun.api.parsers.registry import choose_formats
from mlxrun.api.text.continuation import ContinuationParser
from tests.helpers.openai_api import TOOL, chat, complete, join
from tests.helpers.tokenizers import TOOLS, FakeModelInfo


def test_prompts_count_once_whatever_n_is() -> None:
    two = complete(prompt=["a", "bcd"], n=3)
    lengths = [len(request.prompt) for request in two.requests]
    assert len(lengths) == 6 and two.prompt_tokens == lengths[0] + lengths[3]


def test_logprobs_are_those_of_the_requests() -> None:
    assert complete(logprobs=0).has_logprobs and not complete().has_logprobs


def test_completions_are_plain_text() -> None:
    assert isinstance(complete().make_parser(0), PlainParser)


def test_calls_of_each_choice_have_ids_of_their_own() -> None:
    """The same for the same seed, so that a resumed answer has them again."""
    made = chat(FakeModelInfo(chat_template=TOOLS), tools=[TOOL], n=2, seed=7)
    made = dataclasses.replace(made, formats=choose_formats(None, [], "hermes", "none"))
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'

    def ids(index: int) -> list[str]:
        parser = made.make_parser(index)
        return [delta.id for delta in [*parser.feed(text), *parser.finish()] if delta.id]

    assert ids(0) == ids(0) != ids(1) and len(ids(0)) == 1


def test_a_continued_answer_has_a_parser_that_has_read_the_text() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "one"}]
    made = chat(messages=messages, continue_final_message=True)
    parser = made.make_parser(0)
    assert isinstance(parser, ContinuationParser)
    assert join([*parser.feed(" two"), *parser.finish()]) == " two"
