"""Every field is honoured, harmless or refused; what is refused is in docs/clients.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mlxrun.api.anthropic import fields as anthropic_fields
from mlxrun.api.body_schema import BodySchema
from mlxrun.api.openai import fields as openai_fields
from mlxrun.api.openai.fields import HARMLESS, HONOURED, REFUSED
from mlxrun.api.openai.response import build_error
from mlxrun.api.responses import fields as responses_fields
from mlxrun.errors import RequestError
from tests.helpers.openai_api import CHAT, COMPLETION, HI, TOOL, chat, complete, refused

CLIENTS = Path(__file__).parents[3] / "docs" / "clients.md"


def documented() -> dict[str, dict[str, str]]:
    """The tables of the section: by their title, why each field is refused."""
    section = CLIENTS.read_text(encoding="utf-8").split("## What is refused\n")[1].split("\n## ")[0]
    tables: dict[str, dict[str, str]] = {}
    for left, right in re.findall(r"^\| (.+) \| (.+) \|$", section, re.MULTILINE):
        if right == "why":
            last = tables.setdefault(left, {})
        else:
            last |= dict.fromkeys(re.findall(r"`(\w+)`", left), right)
    return tables


def known() -> dict[str, Mapping[str, str]]:
    chat, completion = openai_fields.REFUSED["chat"], openai_fields.REFUSED["completion"]
    both = dict(chat.items() & completion.items())
    return {
        "/v1/chat/completions and /v1/completions": both,
        "/v1/chat/completions": {name: chat[name] for name in chat if name not in both},
        "/v1/completions": {name: completion[name] for name in completion if name not in both},
        "/v1/responses": responses_fields.REFUSED,
        "/v1/messages and /v1/messages/count_tokens": anthropic_fields.BODY.refused,
        "Blocks of /v1/messages": anthropic_fields.REFUSED_BLOCKS,
    }


def test_the_documents_name_what_is_refused() -> None:
    assert documented() == known()
    assert anthropic_fields.COUNT_BODY.refused == anthropic_fields.BODY.refused


def test_both_spellings_of_the_cache_key() -> None:
    """Some clients send both."""
    assert chat(prompt_cache_key="a", promptCacheKey="a").requests[0].prompt == chat().requests[0].prompt


def test_values_in_errors_are_written_as_json() -> None:
    schema = BodySchema(
        {"size": {"enum": ["small", None]}}, {"store": ({"const": False}, "nothing is stored")}
    )
    with pytest.raises(RequestError, match=r'^size: "huge" is not one of "small"$'):
        schema.check({"size": "huge"})
    with pytest.raises(RequestError, match=r"^store: .*only false is supported \(nothing is stored\)$"):
        schema.check({"store": True})


@pytest.mark.parametrize(
    ("field", "value", "param", "words"),
    [
        ("temperature", 2.5, "temperature", "2.5 is greater than the maximum of 2"),
        ("temperature", "1", "temperature", "expected number, got string"),
        ("temperature", True, "temperature", "expected number, got boolean"),
        ("temperature", float("nan"), "temperature", "finite"),
        ("temperature", float("inf"), "temperature", "finite"),
        ("temperature", [[]], "temperature", "expected number, got array"),
        ("top_p", 0, "top_p", "0"),
        ("top_k", 1.5, "top_k", "expected integer"),
        ("min_p", 1, "min_p", "1"),
        ("repetition_penalty", 0, "repetition_penalty", "minimum of 0.01"),
        ("presence_penalty", 2.1, "presence_penalty", "maximum of 2"),
        ("frequency_penalty", -3, "frequency_penalty", "minimum of -2"),
        ("logit_bias", [], "logit_bias", "expected object"),
        ("logit_bias", {"x": 1}, "logit_bias", "'x' is not a token id"),
        ("logit_bias", {"1": 101}, "logit_bias.1", "maximum of 100"),
        ("logit_bias", {"1": float("nan")}, "logit_bias.1", "finite"),
        ("logit_bias", {"05": 1}, "logit_bias.05", "write '5'"),
        ("logit_bias", {"5\n": 1}, "logit_bias.5\n", "write '5'"),
        ("logit_bias", {str(i): 1 for i in range(1025)}, "logit_bias", "at most 1024"),
        ("logit_bias", {"99999": 1}, "logit_bias.99999", "the vocabulary has"),
        ("stop_token_ids", [1, 99999], "stop_token_ids[1]", "the vocabulary has"),
        ("stop_token_ids", [1, "a"], "stop_token_ids[1]", "expected integer"),
        ("seed", 2**64, "seed", "maximum"),
        ("seed", "1", "seed", "integer"),
        ("max_tokens", 0, "max_tokens", "minimum of 1"),
        ("n", 0, "n", "minimum of 1"),
        ("n", 129, "n", "maximum of 128"),
        ("stop", 1, "stop", "expected a string or an array"),
        ("stop", "", "stop[0]", "empty"),
        ("stop", ["a", ""], "stop[1]", "empty"),
        ("stop", ["a", None], "stop[1]", "expected string"),
        ("stop", ["a"] * 17, "stop", "at most 16"),
        ("stop", ["a", "b" * 1025], "stop[1]", "at most 1024"),
        ("stop_token_ids", [1] * 1025, "stop_token_ids", "at most 1024"),
        ("stream", True, "stream", "not supported"),
        ("stream_options", {"include_usage": True}, "stream_options", "stream"),
        ("priority", 1, "priority", "scheduler.policy: priority"),
        ("model", 1, "model", "string"),
        ("tempature", 1, "tempature", "did you mean 'temperature'"),
        ("nonsense", {}, "nonsense", "unknown parameter"),
        ("min_tokens", 1, "min_tokens", "not supported"),
    ],
)
@pytest.mark.parametrize("url", [CHAT, COMPLETION])
def test_bad_fields_are_named(url: str, field: str, value: Any, param: str, words: str) -> None:
    """What and where, for both endpoints."""
    error = refused(url, {"messages" if url == CHAT else "prompt": HI if url == CHAT else "hi", field: value})
    assert error.param == param
    assert str(error).startswith(f"{param}: ") and words in str(error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"prompt": "x"}, "prompt"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"tool_choice": "atuo"}, "tool_choice"),
        ({"response_format": {"type": "jsn"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strng"}}}},
            "response_format.json_schema.schema.type",
        ),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"], "structured_outputs": {"regex": "a"}}, "guided_choice"),
        ({"structured_outputs": {"rgx": "a"}}, "structured_outputs.rgx"),
        ({"structured_outputs": {"json": {}}, "ignore_eos": True}, "ignore_eos"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"store": True}, "store"),
        ({"promptCacheKey": 3}, "promptCacheKey"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": None}, "messages"),
        *(({name: {}}, name) for name in REFUSED["chat"]),
        ({"echo": True}, "echo"),
    ],
)
def test_bad_chat_fields_are_named(fields: Mapping[str, Any], param: str) -> None:
    """What cannot be honoured is refused, never ignored."""
    error = refused(CHAT, {"messages": HI, **fields})
    assert error.param == param
    assert build_error(error)["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": HI}, "messages"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [[1], [2, "x"]]}, "prompt[1][1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], [99_999]]}, "prompt[1][0]"),
        ({"prompt": [1.0]}, "prompt[0]"),
        ({"prompt": ["a"] * 17, "n": 128}, "n"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"tools": [TOOL]}, "tools"),
    ],
)
def test_bad_completion_fields_are_named(fields: Mapping[str, Any], param: str) -> None:
    assert refused(COMPLETION, {"prompt": "hi", **fields}).param == param


def test_tables_do_not_overlap() -> None:
    """Every known field has one treatment."""
    for kind in ("chat", "completion"):
        names = [*HONOURED[kind], *HARMLESS[kind], *REFUSED[kind]]  # type: ignore[index]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_every_field_of_the_sdk_has_a_treatment(kind: Any) -> None:
    """What the official client can send is honoured, harmless or refused by name; nothing is unknown."""
    if kind == "chat":
        from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Fields
    else:
        from openai.types.completion_create_params import (  # type: ignore[assignment]
            CompletionCreateParamsBase as Fields,
        )
    known = {*HONOURED[kind], *HARMLESS[kind], *REFUSED[kind]}
    assert set(Fields.__annotations__) <= known
    assert not {"response_formt"} <= known


def test_harmless_fields_are_taken() -> None:
    chat(
        user="u",
        metadata={"a": "b"},
        safety_identifier="x",
        prompt_cache_key="x",
        store=False,
        service_tier="auto",
        modalities=["text"],
        response_format={"type": "text"},
        parallel_tool_calls=True,
        tool_choice="auto",
        temperature=None,
        audio=None,
        nothing=None,
        stream=False,
        tools=[],
    )
    assert complete(best_of=1, user="u").requests[0].fairness_key == "u"
