"""Calls are read as the parsers of mlx-lm and mlx-vlm read them, where they ship one."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.parser_corpus.call_formats import FORMATS
from tests.helpers.parser_corpus.core import VALUES
from tests.helpers.parser_corpus.newer_formats import LOST_VALUES
from tests.helpers.parser_driver import TOOLS, Call, Case, make_parser, normalise, run_parser

PEERS = {
    "function gemma": "function_gemma",
    "gemma4": "gemma4",
    "glm45": "glm47",
    "glm47": "glm47",
    "kimi": "kimi_k2",
    "longcat": "longcat",
    "longcat flash": "longcat",
    "minimax": "minimax_m2",
    "mistral": "mistral",
    "mistral old": "mistral",
    "lfm2": "pythonic",
    "kimi k3": "kimi_k3",
    "kimi k3 json": "kimi_k3",
    "minicpm5": "minicpm5",
    "muse": "muse_spark",
    "minimax m3": "mlx_vlm.tools.parsers.minimax_m3",
    "cohere": "mlx_vlm.tools.parsers.cohere2_moe",
}
# What mlx-lm makes otherwise of, and why ours is right by the template and the schema.
_STRIPPED = {"spaces", "tabs", "long"}  # it strips strings; templates write them as they are
_WORDS = {"words in text"}  # it takes the string "null" for null
_NESTED = {"array", "object", "reference", "floats in array"}  # its pattern ends at the first brace
OTHERWISE: dict[str, set[str]] = {
    "function gemma": {*_NESTED, "quotes", "json in text"},
    "gemma4": set(),
    "glm45": {*_STRIPPED},
    "glm47": {*_STRIPPED},
    "longcat": {*_STRIPPED, "empty"},  # its pattern asks for an argument
    "minimax": {*_STRIPPED, *_WORDS, "reference"},  # it does not follow $ref, and encodes twice
    "minicpm5": {*_WORDS, "spaces", "long", "reference"},
    "muse": {*_STRIPPED, *_WORDS, "digits", "json in text"},  # it does not look at the schema
    "minimax m3": {*_STRIPPED, *_WORDS, "reference", "enum of all"},  # it knows no enum but of strings
}


def _peer(form: str) -> Callable[[str], list[Call]]:
    name = PEERS[form]
    module = importlib.import_module(name if "." in name else f"mlx_lm.tool_parsers.{name}")

    def parse(text: str) -> list[Call]:
        inner = text.removeprefix(module.tool_call_start)
        if module.tool_call_end:
            inner = inner.removesuffix(module.tool_call_end)
        found = module.parse_tool_call(inner, TOOLS)
        calls = found if isinstance(found, list) else [found]
        return [Call(one["name"], _load(one["arguments"])) for one in calls]

    return parse


def _load(arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Return arguments as an object: mlx-vlm gives them as text."""
    return json.loads(arguments) if isinstance(arguments, str) else arguments  # type: ignore[no-any-return]


def _plain(arguments: dict[str, Any]) -> str:
    """JSON in which 3 and 3.0 are equal: mlx-lm does not keep them apart."""
    return json.dumps(json.loads(json.dumps(arguments), parse_int=float))


def _cases() -> list[tuple[str, str, str, dict[str, Any]]]:
    return [
        (form, kind, name, arguments)
        for form in PEERS
        for kind, name, arguments in VALUES
        if kind not in OTHERWISE.get(form, ()) and kind not in LOST_VALUES.get(form, ())
    ]


@pytest.mark.parametrize(
    ("form", "kind", "name", "arguments"), _cases(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_as_mlx_lm(form: str, kind: str, name: str, arguments: dict[str, Any]) -> None:
    """Both parsers return the same calls."""
    family, _, write = FORMATS[form]
    text = write(name, arguments)
    ours = run_parser(lambda: make_parser(Case(kind, family, text, [])), [text])
    theirs = _peer(form)(text)
    assert [(call.name, _plain(call.arguments)) for call in theirs] == [
        (call.name, _plain(call.arguments)) for call in ours if isinstance(call, Call)
    ]
    assert len(ours) == 1


@pytest.mark.parametrize("form", PEERS)
def test_the_list_of_differences_is_true(form: str) -> None:
    """The counterpart: each difference that is left out above exists."""
    family, _, write = FORMATS[form]
    for kind, name, arguments in VALUES:
        if kind in OTHERWISE.get(form, ()):
            text = write(name, arguments)
            try:
                theirs = [(call.name, _plain(call.arguments)) for call in _peer(form)(text)]
            except (ValueError, IndexError, AttributeError):
                theirs = []
            assert theirs != [(name, _plain(arguments))], kind
            case = Case(kind, family, text, [])
            assert run_parser(lambda case=case: make_parser(case), [text]) == [Call(name, arguments)]  # type: ignore[misc]


@pytest.mark.parametrize(("kind", "name", "arguments"), VALUES, ids=[value[0] for value in VALUES])
def test_the_template_of_deepseek_v32(kind: str, name: str, arguments: dict[str, Any]) -> None:
    """mlx-lm has no parser for it, but its template: what that writes for a call is read as the call."""
    template = importlib.import_module("mlx_lm.chat_templates.deepseek_v32")
    function = {"name": name, "arguments": json.dumps(arguments)}
    question = {"role": "user", "content": "hi"}
    said = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    before, after = (
        template.apply_chat_template(messages, add_generation_prompt=False)
        for messages in ([question], [question, said])
    )
    text = after.removeprefix(before).partition("</think>")[2].removesuffix("<｜end▁of▁sentence｜>")
    assert "｜DSML｜" in text
    found = run_parser(lambda: make_parser(Case(kind, "deepseek_v32", text, [])), [text])
    assert normalise(found) == normalise([Call(name, arguments)])
