"""What the records of all families promise: texts that close reasoning, and texts around arguments."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.api.parsers.answer_parser import AnswerParser
from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.registry import (
    REASONING_FAMILIES,
    TOOL_CALL_FAMILIES,
    choose_formats,
    find_reasoning_family,
    find_tool_call_family,
)
from tests.helpers.parser_corpus.newer_formats import hunyuan_v3
from tests.helpers.parser_corpus.well_formed import FIRST
from tests.helpers.parser_driver import TOOLS, Call, Reasoning, make_tool_call_parser, merge_deltas


@pytest.mark.parametrize("thinking", REASONING_FAMILIES, ids=lambda thinking: thinking.name)
def test_a_reasoning_is_closed_in_the_model_s_own_way(thinking: Any) -> None:
    """The text that a budget writes ends the reasoning, and none of it is content."""
    opener, closers = thinking.pairs[0]
    parser = AnswerParser(None, thinking)
    deltas = [*parser.feed(f"{opener}\nhm{thinking.closing}Yes."), *parser.finish()]
    assert merge_deltas(deltas) == [Reasoning("hm"), "Yes."]
    assert closers[0] in thinking.closing


def test_text_around_arguments_makes_a_call() -> None:
    """The parser reads what a grammar for `tool_choice: required` is built from."""
    for family in TOOL_CALL_FAMILIES:
        around = family.get_call_prefix_suffix("add")
        if around is None:
            continue
        before, after = around
        parser = make_tool_call_parser(family.name, new_id=lambda: "id0")
        deltas = [*parser.feed(f'{before}{{"a": 1, "b": 2.5}}{after}'), *parser.finish()]
        assert merge_deltas(deltas) == [Call("add", {"a": 1, "b": 2.5})], family.name


def test_a_name_in_a_call_is_written_as_it_is() -> None:
    """In quotes it is JSON, and what looks like a variable in a name is none."""
    family = ToolCallFamily("f", call='<a>{"name": $json_name, "parameters": $arguments}</a>$name')
    for name, json_name in (('f"', '"f\\""'), ("$arguments$name{}", '"$arguments$name{}"')):
        before, after = family.get_call_prefix_suffix(name) or ("", "")
        assert (before, after) == (f'<a>{{"name": {json_name}, "parameters": ', f"}}</a>{name}")
    assert ToolCallFamily("f").get_call_prefix_suffix("f") is None


def test_a_reader_is_given_for_what_begins_a_call() -> None:
    """An opener without a reader would stop an answer."""
    for family in TOOL_CALL_FAMILIES:
        if family.openers:
            assert family.read is not None, family.name
        assert bool(family.bare) is bool(family.read_bare), family.name
        assert family.read or family.read_start or family.read_answer, family.name


def test_what_is_left_out_is_shown_to_the_parser() -> None:
    """The detokenizer drops special tokens that are no markers: so every special token of a format is one."""
    for family in (*TOOL_CALL_FAMILIES, *REASONING_FAMILIES):
        for text in family.ignored:
            if "|" in text:
                assert any(marker in text for marker in family.markers), (family.name, text)


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ('<|open|>message role="assistant"<|sep|><|open|>think<|sep|>', True),
        ('<|open|>message role="assistant"<|sep|><|open|>response<|sep|>', False),
        ("<|open|>think<|sep|>hm<|close|>think<|sep|>", False),
        ("", False),
    ],
)
def test_reasoning_is_opened_by_a_prompt_that_ends_with_its_tag(prompt: str, opened: bool) -> None:
    assert find_reasoning_family("kimi_k3").is_opened_by(prompt) is opened
    assert find_reasoning_family("kimi_k3").is_opened_by(prompt + " \n") is opened


def test_the_tags_of_a_model_end_as_its_tokens_do() -> None:
    """The suffix of Hunyuan's tags is each model's own; without one the tags are plain."""
    for suffix in ("", ":opensource", ":x1"):
        tokens = [f"<{name}{suffix}>" for name in ("tool_calls", "tool_call", "arg_key", "think", "/think")]
        for names in ({}, {"tools": "hunyuan_v3", "reasoning": "hy_v3"}):
            chosen = choose_formats("<tool_calls{}><arg_key{}><think{}>", tokens, **names)
            parser = chosen.make_parser(TOOLS, f"x<think{suffix}>", "a")
            text = f"hm</think{suffix}>{hunyuan_v3(*FIRST, suffix=suffix)}"
            found = [*parser.feed(text), *parser.finish()]
            assert merge_deltas(found) == [Reasoning("hm"), Call(*FIRST)], (suffix, names)
            assert f"<tool_sep{suffix}>" in parser.markers
    assert choose_formats("", ["<think:x1>"]).reasoning != choose_formats("", ["<think:x2>"]).reasoning


def test_other_families_are_the_same_for_every_model() -> None:
    """The counterpart: only families that say so are made for a model."""
    chosen = choose_formats("", ["<think:x1>"], tools="glm", reasoning="think")
    assert chosen.tool_calls is find_tool_call_family("glm")
    assert chosen.reasoning is find_reasoning_family("think")
