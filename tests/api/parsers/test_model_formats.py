"""What is asked of a model's formats: a parser, its markers, and the texts that grammars are built from."""

from __future__ import annotations

import pytest

from mlxrun.api.parsers.model_formats import ModelFormats
from mlxrun.api.parsers.registry import choose_formats, find_reasoning_family
from tests.helpers.parser_corpus.core import hermes
from tests.helpers.parser_driver import TOOLS, Call, Reasoning, merge_deltas

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
