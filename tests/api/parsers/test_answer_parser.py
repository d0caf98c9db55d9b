"""Which deltas an answer is split into, and when they come; ids of calls."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from mlxrun.api.parsers.answer_parser import AnswerParser, ModelFormats
from mlxrun.api.parsers.registry import (
    TOOL_CALL_FAMILIES,
    choose_formats,
    find_reasoning_family,
    find_tool_call_family,
)
from tests.helpers.parser_corpus.core import coder, hermes
from tests.helpers.parser_driver import TOOLS, Call, Reasoning, make_tool_call_parser, merge_deltas

PLAIN = [f" word{i}" if i % 7 else "\n" for i in range(10_000)]


@pytest.mark.parametrize("name", [family.name for family in TOOL_CALL_FAMILIES])
def test_plain_text_runs_no_reader(name: str) -> None:
    """Of ten thousand plain tokens only the first few are looked at, and no space is eaten.

    Families whose markers begin with a letter look up where that letter comes.
    """
    machine = make_tool_call_parser(name)
    family = find_tool_call_family(name)
    begun = {marker[0] for marker in (*family.openers, *family.bare)} & set("".join(PLAIN))
    deltas = [delta for token in PLAIN for delta in machine.feed(token)]
    assert "".join(delta.text for delta in deltas) == "".join(PLAIN).rstrip()
    assert machine.reads <= 3 or begun
    assert [*machine.finish()] == []


def test_a_marker_runs_the_reader() -> None:
    """The counterpart of the test above: `reads` counts."""
    machine = make_tool_call_parser("hermes")
    for token in ["a"] * 10 + ["<"] * 10:
        machine.feed(token)
    assert machine.reads == 11


@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_runs_no_reader(opened: bool) -> None:
    parser = AnswerParser(None, find_reasoning_family("think"), opened=opened)
    before = [] if opened else [*parser.feed("<think>")]
    deltas = [delta for token in PLAIN[1:] for delta in parser.feed(token)]
    assert not before
    assert {delta.kind for delta in deltas} == {"reasoning"}
    assert parser.reads <= 3


def test_text_is_not_held_back() -> None:
    """Only white space and what may become a marker wait; every other character is given at once."""
    parser = make_tool_call_parser("hermes")
    given = ""
    text = "a < b, x<tool_x> and </tool_call> <fun\n\nend <tool_call"
    for i, char in enumerate(text, 1):
        given += "".join(delta.text for delta in parser.feed(char))
        seen = text[:i]
        held = seen.rstrip(" \n")
        for marker in ("<tool_call>", "<function=", "<TOOLCALL>"):
            for size in range(1, len(marker)):
                if seen.endswith(marker[:size]):
                    held = seen[: len(seen) - size].rstrip(" \n")
        assert given == held
    assert given + "".join(delta.text for delta in parser.finish()) == text


@pytest.mark.parametrize("write", [hermes, coder])
def test_a_string_comes_as_it_is_written(write: Any) -> None:
    """The name with the first argument; then what has come of the text is passed on, but for an escape
    or an end tag that has begun."""
    content = "line one\n" * 50
    text = write("write_file", {"path": "p", "content": content})
    start, end = text.index("line one"), text.rindex("line one")
    parser = make_tool_call_parser("hermes")
    fragments, name = "", ""
    for i, char in enumerate(text, 1):
        for delta in parser.feed(char):
            assert delta.kind == "call"
            name += delta.name
            fragments += delta.text
        if start < i < end:
            assert name == "write_file"
            so_far = json.loads(fragments + '"}')["content"]
            assert content[: len(so_far)] == so_far
            assert text[start:i].count("line one") == so_far.count("line one")
    assert json.loads(fragments) == {"path": "p", "content": content}


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ('[TOOL_CALLS][{"name": "now", "id": "abcdef123", "arguments": {}}]', ["abcdef123"]),
        ('[TOOL_CALLS][{"id": "abcdef123", "arguments": {}, "name": "now"}]', ["abcdef123"]),
        ('[TOOL_CALLS][{"id": "abcdef123", "function": {"name": "now", "arguments": {}}}]', ["abcdef123"]),
        ('[TOOL_CALLS][{"id": "call 1", "name": "now"}]', ["ef0123450"]),
        ('[TOOL_CALLS][{"id": 123456789, "name": "now"}]', ["ef0123450"]),
        (
            '[TOOL_CALLS][{"id": "a1b2c3d4e", "name": "now"}, {"id": "a1b2c3d4e", "name": "now"}]',
            ["a1b2c3d4e", "ef0123450"],
        ),
        # Behind the arguments it comes too late: they are out by then.
        ('[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdef123"}]', ["ef0123450"]),
        ("[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}", ["ef0123450", "ef0123451"]),
        ("[TOOL_CALLS]now[CALL_ID]abcdef123[ARGS]{}", ["abcdef123"]),
    ],
)
def test_ids_of_mistral(text: str, ids: list[str]) -> None:
    """The model's own; else nine letters and digits, as its templates refuse any other."""
    for name in ("mistral", "mistral_v3"):
        count = itertools.count()
        parser = make_tool_call_parser(name, new_id=lambda: f"call_0123456789abcdef01234{next(count) + 50}")  # noqa: B023
        deltas = [*parser.feed(text), *parser.finish()]
        assert [delta.id for delta in deltas if delta.id] == ids


def test_ids_of_others_are_as_they_were_made() -> None:
    parser = make_tool_call_parser("hermes", new_id=lambda: "call_0123456789abcdef01234567")
    deltas = parser.feed('<tool_call>{"id": "abcdef123", "name": "now"}</tool_call>')
    assert [delta.id for delta in deltas if delta.id] == ["call_0123456789abcdef01234567"]


def test_a_call_in_one_chunk_is_complete() -> None:
    """Before the end of the answer."""
    deltas = make_tool_call_parser("hermes", new_id=lambda: "id0").feed(hermes("add", {"a": 1, "b": 2.0}))
    assert merge_deltas(deltas) == [Call("add", {"a": 1, "b": 2.0})]


def test_ids() -> None:
    """`call_` and 24 hexadecimal digits, all different."""
    parser = make_tool_call_parser("hermes")
    deltas = [*parser.feed(hermes("now", {}) * 20), *parser.finish()]
    ids = [delta.id for delta in deltas if delta.id]
    assert len(set(ids)) == 20
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", i) for i in ids)


def test_long_arguments_are_read_in_linear_time() -> None:
    """A string of newlines, each of which is escaped alone, and arguments that wait for their name."""
    content = "\n" * 30_000
    for text in (
        '<tool_call>{"name": "write_file", "arguments": {"content": "' + content + '"}}</tool_call>',
        hermes("write_file", {"content": content}),
        coder("write_file", {"content": content}),
    ):
        parser = make_tool_call_parser("hermes", new_id=lambda: "id0")
        assert merge_deltas([*parser.feed(text), *parser.finish()]) == [
            Call("write_file", {"content": content})
        ]


@pytest.mark.parametrize("closed", [False, True])
def test_a_call_in_open_reasoning_comes_with_the_end(closed: bool) -> None:
    """Its text is passed on as reasoning, as it comes; the call follows when nothing else can."""
    parser = AnswerParser(
        find_tool_call_family("hermes"),
        find_reasoning_family("think"),
        TOOLS,
        opened=True,
        new_id=lambda: "id0",
    )
    text = "hm\n" + hermes("add", {"a": 1})
    given = [delta for char in text for delta in parser.feed(char)]
    assert {delta.kind for delta in given} == {"reasoning"}
    assert "".join(delta.text for delta in given) == text
    given += parser.feed("\n</think>\n" if closed else "\n")
    assert "".join(delta.text for delta in given) == text
    assert merge_deltas(parser.finish()) == [Call("add", {"a": 1})]


def test_reasoning_is_kept_from_an_opener_to_its_end_only() -> None:
    """Long reasoning without a call costs no memory."""
    parser = AnswerParser(find_tool_call_family("hermes"), find_reasoning_family("think"), TOOLS, opened=True)
    for _ in range(100):
        parser.feed("word < ")
    assert parser._recorded is None
    parser.feed("<tool_call> or so")
    assert parser._recorded is not None
    parser.feed(" </think>Yes.")
    assert parser._recorded is None
    assert merge_deltas(parser.finish()) == []


def test_text_behind_a_call_begins_with_a_line_feed() -> None:
    """With its first delta; without text before the call there is none."""
    for before, after in (("Hi. ", "\nYes"), ("", "Yes")):
        parser = make_tool_call_parser("hermes")
        parser.feed(before + hermes("now", {}))
        assert [delta.text for delta in parser.feed(" \nYes, ")] == [after + ","]


def test_a_string_goes_on_behind_an_end_tag_that_ends_nothing() -> None:
    """As soon as the character that follows shows it."""
    parser = make_tool_call_parser("qwen3_coder")
    head = "<function=write_file><parameter=content>a</parameter>"
    assert "".join(delta.text for delta in parser.feed(head)) == '{"content": "a'
    assert "".join(delta.text for delta in parser.feed(" ")) == ""
    assert "".join(delta.text for delta in parser.feed("b")) == "</parameter> b"


HERMES = '<tool_call>{"name": <function-name>, "arguments": <args-json-object>}</tool_call>'


def test_markers() -> None:
    """The detokenizer lets through what the parsers of this request take out again, and nothing else."""
    chosen = choose_formats(HERMES, ["<think>"])
    every = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    assert chosen.make_parser(TOOLS, "", "a").markers == every
    assert chosen.make_parser(None, "", "a").markers == ("<think>", "</think>")
    assert choose_formats(HERMES, [], reasoning="none").make_parser([], "", "a").markers == ()


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("Say <think>\n twice", False),
    ],
)
def test_a_prompt_may_end_within_reasoning(prompt: str, opened: bool) -> None:
    """The answer to such a prompt begins within reasoning."""
    assert find_reasoning_family("think").is_opened_by(prompt) is opened
    parser = choose_formats(None, ["<think>"]).make_parser(None, prompt, "a")
    found = [*parser.feed("hm</think>Yes"), *parser.finish()]
    assert merge_deltas(found) == ([Reasoning("hm"), "Yes"] if opened else ["hm</think>Yes"])
    assert merge_deltas([*ModelFormats().make_parser(None, prompt, "a").feed("hm")]) == ["hm"]


def test_without_formats_all_text_is_content() -> None:
    parser = ModelFormats().make_parser(TOOLS, "<think>", "a")
    text = f"<think>hm</think>{hermes('now', {})}"
    assert merge_deltas([*parser.feed(text), *parser.finish()]) == [text]


def test_ids_follow_from_the_name() -> None:
    """An answer that is generated again has the same ids, another answer has others."""
    chosen = choose_formats(HERMES, [])

    def list_ids(name: str) -> list[str]:
        parser = chosen.make_parser(TOOLS, "", name)
        deltas = [*parser.feed(hermes("now", {}) + hermes("add", {"a": 1})), *parser.finish()]
        assert [item for item in merge_deltas(deltas) if isinstance(item, Call)][1].name == "add"
        return [delta.id for delta in deltas if delta.id]

    assert list_ids("a") == list_ids("a")
    assert len({*list_ids("a"), *list_ids("b")}) == 4


@pytest.mark.parametrize(
    ("reasoning", "prompt", "tags"),
    [
        ("think", "<|im_start|>assistant\n", ("<think>", "</think>")),
        ("think", "<|im_start|>assistant\n<think>\n", ("", "</think>")),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", None),
        ("none", "<|im_start|>assistant\n<think>\n", None),
        ("harmony", "<|start|>assistant", None),
        ("kimi_k3", "<|open|>think<|sep|>", ("", "<|open|>response<|sep|>")),
        ("kimi_k3", "<|open|>response<|sep|>", None),
    ],
)
def test_reasoning_tags_of_a_prompt(reasoning: str, prompt: str, tags: tuple[str, str] | None) -> None:
    """A grammar begins behind the reasoning; Kimi K3's where its channel of content begins."""
    assert choose_formats(None, [], tools="none", reasoning=reasoning).get_reasoning_tags(prompt) == tags


@pytest.mark.parametrize(
    ("tools", "opener", "separator"),
    [
        ("hermes", "<tool_call>", "\n"),
        ("apertus", "<|tools_prefix|>", None),
        ("jamba", "<tool_calls>", None),
        ("cohere", "<|START_ACTION|>", None),
        ("gigachat31", "<|function_call|>", None),
        ("deepseek_v4", "", None),  # its block begins with more than the opener
        ("harmony", "", None),
        ("glm", "", None),  # no JSON
        ("none", "", None),
    ],
)
def test_what_begins_every_call(tools: str, opener: str, separator: str | None) -> None:
    """Strict tools need a marker that begins calls alone; several forced calls a text between them."""
    chosen = choose_formats(None, [], tools=tools)
    assert (chosen.call_opener, chosen.call_separator) == (opener, separator)


def test_text_around_arguments() -> None:
    assert choose_formats(None, [], tools="apertus").get_call_prefix_suffix("f") == (
        '<|tools_prefix|>[{"f": ',
        "}]<|tools_suffix|>",
    )
    assert choose_formats(None, [], tools="glm").get_call_prefix_suffix("f") is None
    assert ModelFormats().get_call_prefix_suffix("f") is None
