"""What /v1/messages refuses, named as Anthropic does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from mlxrun.api.anthropic import fields, tagged_schema
from mlxrun.api.anthropic.fields import build_schema
from mlxrun.api.anthropic.response import build_error
from mlxrun.api.anthropic.typed_tools import TYPED_SCHEMA
from mlxrun.config.settings import Config, MediaSettings, ServerSettings
from mlxrun.core.errors import MediaError
from tests.helpers.anthropic_api import (
    ADD,
    CALL,
    CALLED,
    EYES,
    IMAGE,
    RED,
    RESULT,
    TOOL_MODEL_INFO,
    USER,
    Json,
    body,
    make,
    refused,
    text,
    user,
)
from tests.helpers.anthropic_bodies import VALUE

REFUSED: list[tuple[Json, str, str]] = [
    # fields of the body
    (body(nonsense=1), "nonsense", "Extra inputs are not permitted"),
    (body(max_token=1), "max_token", "did you mean 'max_tokens'"),
    ({"max_tokens": 1, "messages": [USER]}, "model", "Field required"),
    ({"model": "m", "messages": [USER]}, "max_tokens", "Field required"),
    ({"model": "m", "max_tokens": 1}, "messages", "Field required"),
    (body(max_tokens=0), "max_tokens", "minimum of 1"),
    (body(max_tokens="9"), "max_tokens", "expected integer"),
    (body(temperature=1.5), "temperature", "maximum of 1"),
    (body(temperature=float("nan")), "temperature", "finite"),
    (body(top_p=0), "top_p", "0"),
    (body(top_k=-1), "top_k", "minimum of 0"),
    (body(stop_sequences="a"), "stop_sequences", "expected array"),
    (body(stop_sequences=["a", ""]), "stop_sequences.1", "non-empty"),
    (body(stop_sequences=[""] * 100_000), "stop_sequences", "at most 16"),
    (body(stop_sequences=["a"] * 17), "stop_sequences", "at most 16"),
    (body(stream="yes"), "stream", "expected boolean"),
    (body(metadata={"user_id": 1}), "metadata.user_id", "expected string"),
    (body(container="c"), "container", "not supported"),
    (body(mcp_servers=[{"url": "x"}]), "mcp_servers", "MCP"),
    (body(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}),)
    + ("context_management.edits.0.type", "not supported"),
    (body(context_management={"edits": [{"type": "clear_thinking_20251015"}]}),)
    + ("context_management.edits.0.keep", "Field required"),
    (body(output_config={"effort": "huge"}), "output_config.effort", "huge"),
    (body(output_config={"task_budget": {}}), "output_config.task_budget", "Extra inputs"),
    (body(output_config={"format": {"type": "json"}}), "output_config.format.type", "json_schema"),
    (body(output_format={"type": "json"}), "output_format.type", "json_schema"),
    (body(output_format={"type": "json_schema"}), "output_format.schema", "Field required"),
    (body(output_config={"format": {"type": "json_schema"}}),)
    + ("output_config.format.schema", "Field required"),
    (body(output_config={"format": {"type": "json_schema", "schema": {"type": "strng"}}}),)
    + ("output_config.format.schema.type", "strng"),
    (body(thinking={"type": "enabled"}), "thinking.budget_tokens", "Field required"),
    (body(thinking={"type": "enabled", "budget_tokens": 5}), "thinking.budget_tokens", "minimum of 1024"),
    (
        body(thinking={"type": "enabled", "budget_tokens": 2000}, max_tokens=2000),
        "thinking.budget_tokens",
        "`max_tokens` must be greater than",
    ),
    (
        body(thinking={"type": "enabled", "budget_tokens": 2000}, max_tokens=9),
        "thinking.budget_tokens",
        "9 is not greater than 2000",
    ),
    (body(tools=[{"name": "a.b", "input_schema": {}}]), "tools.0.name", "does not match"),
    (body(tools=[{"name": "a" * 129, "input_schema": {}}]), "tools.0.name", "does not match"),
    (body(thinking={"type": "adaptive", "budget_tokens": 5}), "thinking.budget_tokens", "Extra inputs"),
    (body(thinking={"type": "on"}), "thinking.type", "'on' is not one of"),
    (body(thinking={}), "thinking.type", "Field required"),
    # messages
    (body([]), "messages", "[] "),
    (body({}), "messages", "expected array"),
    (body([1]), "messages.0", "expected object, got integer"),
    (body([{"content": "x"}]), "messages.0.role", "Field required"),
    (body([{"role": "tool", "content": "x"}]), "messages.0.role", "'tool' is not one of user"),
    (body([{"role": "user"}]), "messages.0.content", "Field required"),
    (body([{"role": "user", "content": []}]), "messages.0.content", "empty"),
    (body([{"role": "user", "content": 1}]), "messages.0.content", "expected string or array"),
    (body([USER, {"role": "assistant", "content": "The"}, {"role": "system", "content": "x"}]),)
    + ("messages", "the user must speak last"),
    (body(system=1), "system", "expected"),
    (body(system=[IMAGE]), "system.0.type", "not in messages of the system"),
    (body(system=[text("a"), text("\ud800")]), "system.1.text", "surrogate"),
    (body(system="\ud800"), "system", "surrogate"),
    # blocks
    (body(user("x")), "messages.0.content.0", "expected object"),
    (body(user({"text": "x"})), "messages.0.content.0.type", "Field required"),
    (body(user({"type": "txt"})), "messages.0.content.0.type", "did you mean 'text'"),
    (body(user(text("a"), {"type": "text"})), "messages.0.content.1.text", "Field required"),
    (body(user(text("a", cache_control=1))), "messages.0.content.0.cache_control", "expected object"),
    (body(user(CALL)), "messages.0.content.0.type", "not in messages of the user"),
    (body(user({"type": "thinking"})), "messages.0.content.0.type", "not in messages of the user"),
    (body([USER, {"role": "assistant", "content": [IMAGE]}, USER]), "messages.1.content.0.type", "assistant"),
    (body(user(text("ok"), text("\ud800"))), "messages.0.content.1.text", "surrogate"),
    (body([USER, {"role": "assistant", "content": [{**CALL, "input": "{}"}]}, *user(RESULT)]),)
    + ("messages.1.content.0.input", "expected object"),
    (body([USER, {"role": "assistant", "content": [{**CALL, "input": {"k": "\ud800"}}]}, *user(RESULT)]),)
    + ("messages.1.content.0.input.k", "surrogate"),
    (body([USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}, USER]),)
    + ("messages.1.content.0.signature", "Field required"),
    # calls and results
    (body([*CALLED, USER]), "messages.1.content.0", "without `tool_result`"),
    (body([*CALLED, {"role": "user", "content": [text("a"), RESULT]}]), "messages.2.content.1", "first"),
    (body(user(RESULT)), "messages.0.content.0.tool_use_id", "unexpected"),
    (body([*CALLED, *user(RESULT, RESULT)]), "messages.2.content.1.tool_use_id", "unexpected"),
    (
        body([*CALLED, *user({**RESULT, "content": [CALL]})]),
        "messages.2.content.0.content.0.type",
        "tool results",
    ),
    (body([*CALLED, *user({**RESULT, "content": [text("\ud800")]})]),)
    + ("messages.2.content.0.content.0.text", "surrogate"),
    (body([*CALLED, *user({**RESULT, "content": "\ud800"})]), "messages.2.content.0.content", "surrogate"),
    (body([*CALLED, *user({**RESULT, "is_error": "no"})]), "messages.2.content.0.is_error", "boolean"),
    # tools
    (body(tools=[1]), "tools.0", "expected object"),
    (body(tools=[{"name": "f"}]), "tools.0.input_schema", "Field required"),
    (body(tools=[{**ADD, "parameters": {}}]), "tools.0.parameters", "Extra inputs are not permitted"),
    (
        body(tools=[ADD, {"type": "web_search_20250305", "name": "web_search"}]),
        "tools.1.type",
        "not supported",
    ),
    (body(tools=[ADD, {**ADD, "description": "x"}]), "tools.1.name", "there are two tools called 'add'"),
    (body(tools=[ADD, {**ADD, "name": "a b"}]), "tools.1.name", "does not match"),
    (body(tools=[{**ADD, "defer_loading": True}]), "tools.0.defer_loading", "only false"),
    (body(tools=[{**ADD, "strict": True}]), "tools.0.strict", "cannot be enforced"),
    (body(tools=[{**ADD, "input_schema": {"a": "\ud800"}}]), "tools.0.input_schema.a", "surrogate"),
    (body(tool_choice={"type": "any"}), "tool_choice", "needs `tools`"),
    (body(tools=[ADD], tool_choice={"type": "tool", "name": "ad"}), "tool_choice.name", "did you mean 'add'"),
    (body(tools=[ADD], tool_choice={"type": "any"}), "tool_choice", "cannot be enforced"),
    (body(tools=[ADD], tool_choice="auto"), "tool_choice", "expected object"),
    (body(tools=[ADD], tool_choice={"type": "none", "name": "x"}), "tool_choice.name", "Extra inputs"),
]


# Accepted, and refused with server.strict_fields.
STRICT: list[tuple[Json, str, str]] = [
    (body(metadata={"user": "u"}), "metadata.user", "Extra inputs are not permitted"),
    (body(service_tier="flex"), "service_tier", 'only "auto" or "standard_only"'),
    (body(speed="fast"), "speed", 'only "standard"'),
    (body(inference_geo="us"), "inference_geo", 'only "global"'),
    (body(fallbacks=[]), "fallbacks", "not supported"),
    (body([{**USER, "name": "x"}]), "messages.0.name", "Extra inputs are not permitted"),
    (body(user(text("a", foo=1))), "messages.0.content.0.foo", "Extra inputs are not permitted"),
    (body(workspace_id="w"), "workspace_id", "Extra inputs are not permitted"),
    (body(user({"type": "image", "source": {**IMAGE["source"], "x": 1}})),)
    + ("messages.0.content.0.source.x", "Extra inputs are not permitted"),
]


@pytest.mark.parametrize("case", range(len(STRICT)))
def test_what_changes_nothing_is_refused_if_strict(case: int) -> None:
    given, param, words = STRICT[case]
    assert make(given, EYES)
    error = refused(given, EYES, Config(server=ServerSettings(strict_fields=True)))
    assert error.param == param and words in str(error)


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_what_is_refused_is_named(case: int) -> None:
    """What, and where in the body as it was sent."""
    given, param, words = REFUSED[case]
    error = refused(given, TOOL_MODEL_INFO)
    assert error.param == param
    assert str(error).startswith(f"{param}: ") and words in str(error)
    assert build_error(error, "req_1")["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("given", [None, [], "x", 1])
def test_a_body_is_an_object(given: Any) -> None:
    assert "expected an object" in str(refused(given))


@pytest.mark.parametrize(
    ("source", "param"),
    [
        ({"type": "base64", "media_type": "image/png", "data": "!"}, "source.data"),
        ({"type": "base64", "media_type": "image/png", "data": "AAAA"}, "source.data"),
        ({"type": "base64", "media_type": "image/tiff", "data": RED}, "source.media_type"),
        ({"type": "base64", "media_type": "image/png"}, "source.data"),
        ({"type": "url", "url": "https://example.com/x.png"}, "source.url"),
        ({"type": "url", "url": "/etc/passwd"}, "source.url"),
        ({"type": "url", "url": "file:///etc/passwd"}, "source.url"),
        ({"type": "file", "file_id": "f"}, "source.type"),
        ({}, "source.type"),
    ],
)
def test_bad_images_are_named(source: Json, param: str) -> None:
    """Also within results, where the image has moved to another message."""
    image = {"type": "image", "source": source}
    assert refused(body(user(text("a"), image)), EYES).param == f"messages.0.content.1.{param}"
    turns = [*CALLED, *user({**RESULT, "content": [text("a"), image]})]
    assert refused(body(turns), EYES).param == f"messages.2.content.0.content.1.{param}"


VIDEO = {"type": "base64", "media_type": "video/mp4", "data": "anVuaw=="}
LINKED = {"type": "url", "url": "https://example.com/x.mp4"}


@pytest.mark.parametrize(
    ("source", "param", "said"),
    [
        (VIDEO, "source.data", "does not accept videos"),
        (LINKED, "source.url", "does not accept videos"),
        (VIDEO | {"media_type": "image/png"}, "source.media_type", "'image/png'"),
        (LINKED | {"url": "file:///etc/passwd"}, "source.url", "'file:///etc/passwd'"),
        ({"type": "file", "file_id": "f"}, "source.type", "send it as base64"),
    ],
)
def test_bad_videos_are_named(source: Json, param: str, said: str) -> None:
    """/openapi.json allows what is of the right shape."""
    given = body(user(text("a"), {"type": "video", "source": source}))
    error = refused(given, EYES)
    assert error.param == f"messages.0.content.1.{param}" and said in str(error)
    assert Draft202012Validator(build_schema(fields.BODY, TYPED_SCHEMA)).is_valid(given) is (
        source in (VIDEO, LINKED)
    )


def test_videos_are_in_messages_of_the_user_only() -> None:
    video = {"type": "video", "source": VIDEO}
    for turns, where in (
        ([*CALLED, *user({**RESULT, "content": [video]})], "messages.2.content.0.content.0"),
        ([*user(text("a")), {"role": "assistant", "content": [video]}], "messages.1.content.0"),
    ):
        assert refused(body(turns), EYES).param == f"{where}.type"


def test_images_need_a_model_that_sees() -> None:
    error = refused(body(user(IMAGE)))
    assert error.param == "messages.0.content.0.source.data" and "does not accept images" in str(error)
    few = Config(media=MediaSettings(max_images=1))
    error = refused(body(user(IMAGE, IMAGE)), EYES, few)
    assert isinstance(error, MediaError) and error.param == "messages.0.content.1.source.data"


CONSTANTS = {
    name: getattr(tagged_schema, name) for name in ("STRING", "NAME", "TEXTS", "LIST", "OBJECT", "BOOL")
} | {"_EFFORT": fields._EFFORT}


@pytest.mark.parametrize("name", CONSTANTS)
@given(value=VALUE | st.text(min_size=250, max_size=260))
def test_the_fast_check_agrees_with_the_schema(name: str, value: Any) -> None:
    """What is let through without jsonschema would have passed it."""
    schema = CONSTANTS[name]
    valid = Draft202012Validator(schema).is_valid(value)
    assert valid or not tagged_schema._is_valid(value, schema)


def test_audio_is_sent_elsewhere() -> None:
    error = refused(body(user({"type": "audio", "source": {}})))
    assert "send it to /v1/chat/completions or /v1/responses" in str(error)
