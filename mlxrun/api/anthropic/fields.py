"""The fields of Anthropic's messages and count_tokens: what a body and the objects inside it may hold.

`checked` holds an object to the schema of its `type`; its errors are in Anthropic's words. `cache_control` is
taken on every object: prefixes are found by their tokens, so a marker changes nothing. So is null, for "not
given".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

from mlxrun.api.body_schema import BodySchema, Schema, format_path
from mlxrun.api.sampling_params import MAX_STOPS
from mlxrun.text.field_errors import (
    UNKNOWN,
    check_type,
    get_json_type,
    quote,
    reject,
    reject_unsupported,
    shorten,
    suggest,
)

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
EXTRA = "Extra inputs are not permitted"

_BOOL: Schema = {"type": "boolean"}
_STRING: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_LIST: Schema = {"type": "array"}
_TEXTS: Schema = {"type": ["string", "array"]}
_LONGEST_NAME = 256
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": _LONGEST_NAME}
_TOOL_NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,128}$"}
_EFFORT: Schema = {"enum": ["low", "medium", "high", "xhigh", "max"]}


def _exactly(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object of these fields and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


_DIRECT: Schema = {"type": "object", "properties": {"type": {"const": "direct"}}, "required": ["type"]}
_CITATIONS: Schema = {
    "type": "object",
    "properties": {"enabled": {"const": False}},
    "additionalProperties": False,
}
BLOCKS: dict[str, Schema] = {
    "text": _exactly({"text": _STRING}, {"citations": _LIST}),
    "image": _exactly({"source": _OBJECT}, {"transformations": _OBJECT}),
    "document": _exactly(
        {"source": _OBJECT}, {"title": _STRING, "context": _STRING, "citations": _CITATIONS}
    ),
    "search_result": _exactly(
        {"source": _STRING, "title": _STRING, "content": _LIST}, {"citations": _CITATIONS}
    ),
    "tool_use": _exactly({"id": _NAME, "name": _NAME, "input": _OBJECT}, {"caller": _DIRECT}),
    "tool_result": _exactly({"tool_use_id": _NAME}, {"content": _TEXTS, "is_error": _BOOL}),
    "thinking": _exactly({"thinking": _STRING, "signature": _STRING}),
    "redacted_thinking": _exactly({"data": _STRING}),
}
TRANSFORMATIONS = _exactly({}, {"oversized_image": {"const": "downsize"}})
ALLOWED = {
    "system": ("text",),
    "user": ("text", "image", "document", "search_result", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "tool_result": ("text", "image", "document", "search_result"),
    "document": ("text",),
    "search_result": ("text",),
}
REFUSED_BLOCKS = {
    "container_upload": "there are no containers",
    "server_tool_use": "there are no server tools",
    "web_search_tool_result": "there are no server tools",
    "web_fetch_tool_result": "there are no server tools",
    "code_execution_tool_result": "there are no server tools",
    "bash_code_execution_tool_result": "there are no server tools",
    "text_editor_code_execution_tool_result": "there are no server tools",
    "tool_search_tool_result": "there are no server tools",
    "tool_reference": "there is no tool search",
    "tool_addition": "send all tools in `tools`",
    "tool_removal": "send all tools in `tools`",
    "mcp_tool_use": "there is no MCP connector",
    "mcp_tool_result": "there is no MCP connector",
    "compaction": "conversations are not compacted here",
}
SOURCES: dict[str, Schema] = {
    "base64": _exactly(
        {"media_type": {"enum": ["image/jpeg", "image/png", "image/gif", "image/webp"]}, "data": _STRING}
    ),
    "url": _exactly({"url": {"type": "string", "pattern": "^[Hh][Tt][Tt][Pp][Ss]?://"}}),
}
DOCUMENTS: dict[str, Schema] = {
    "text": _exactly({"media_type": {"const": "text/plain"}, "data": _STRING}),
    "content": _exactly({"content": _TEXTS}),
}
REFUSED_DOCUMENTS = {
    "base64": "files such as PDFs are not read; send the text, or the pages as images",
    "url": "documents are not fetched; send the text",
    "file": "send the text",
}
MESSAGE: dict[str, Schema] = {
    "user": _exactly({"content": _TEXTS}),
    "assistant": _exactly({"content": _TEXTS}),
    "system": _exactly(
        {},
        {"content": _TEXTS, "clear_at": {"enum": ["never", "next_user_message"]}, "output_config": _OBJECT},
    ),
}
TOOLS: dict[str, Schema] = {
    "custom": _exactly(
        {"name": _TOOL_NAME, "input_schema": _OBJECT},
        {
            "description": _STRING,
            "input_examples": {"type": "array", "items": _OBJECT},
            "strict": _BOOL,
            "eager_input_streaming": _BOOL,
            "defer_loading": {"const": False},
            "allowed_callers": {"type": "array", "contains": {"const": "direct"}},
        },
    )
}
_PARALLEL = {"disable_parallel_tool_use": _BOOL}
TOOL_CHOICES: dict[str, Schema] = {
    "auto": _exactly({}, _PARALLEL),
    "any": _exactly({}, _PARALLEL),
    "tool": _exactly({"name": _NAME}, _PARALLEL),
    "none": _exactly({}),
}
_DISPLAY = {"display": {"enum": ["summarized", "omitted"]}}
THINKING: dict[str, Schema] = {
    "enabled": _exactly({"budget_tokens": {"type": "integer", "minimum": 1024}}, _DISPLAY),
    "adaptive": _exactly({}, _DISPLAY),
    "disabled": _exactly({}),
}
FORMATS: dict[str, Schema] = {"json_schema": _exactly({"schema": _OBJECT})}
EDITS: dict[str, Schema] = {"clear_thinking_20251015": _exactly({"keep": {"const": "all"}})}

_HONOURED: dict[str, Schema] = {
    "model": {"type": "string", "minLength": 1},
    "messages": {"type": "array", "minItems": 1},
    "system": _TEXTS,
    "tools": {"type": "array", "maxItems": 1024},
    "tool_choice": _OBJECT,
    "thinking": _OBJECT,
    "output_config": _OBJECT,
    "context_management": _OBJECT,
}
_GENERATION: dict[str, Schema] = {
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0, "maximum": 1},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": 0},
    "stop_sequences": {
        "type": "array",
        "maxItems": MAX_STOPS,
        "items": {"type": "string", "minLength": 1},
    },
    "stream": _BOOL,
    "metadata": _OBJECT,
}
METADATA = _exactly({}, {"user_id": {"type": "string", "maxLength": 4096}})
CONTEXT = _exactly({}, {"edits": _LIST})
OUTPUT = _exactly({}, {"effort": _EFFORT, "format": _OBJECT})
_HARMLESS: dict[str, tuple[Schema, str]] = {
    "cache_control": (_OBJECT, "a hint; prefixes are found by their tokens"),
    "speed": ({"const": "standard"}, "there is one speed"),
    "mcp_servers": ({"const": []}, "there is no MCP connector"),
}
_HARMLESS_GENERATION: dict[str, tuple[Schema, str]] = {
    "service_tier": ({"enum": ["auto", "standard_only"]}, "there is one tier"),
    "inference_geo": ({"const": "global"}, "there is one place"),
    "diagnostics": (_OBJECT, "asks why a prefix was not found, which may be left unanswered"),
}
_REFUSED = {
    "billing_policy": "nothing is billed",
    "compaction": "conversations are not compacted here",
    "container": "there are no containers",
    "fallback_credit_token": "there are no other models to fall back to",
    "fallbacks": "there are no other models to fall back to",
    "output_format": "deprecated; use output_config.format",
    "thread": "conversations are not stored; send all messages",
}
BODY = BodySchema(_HONOURED | _GENERATION, _HARMLESS | _HARMLESS_GENERATION, _REFUSED)
COUNT_BODY = BodySchema(_HONOURED, _HARMLESS, _REFUSED)
REQUIRED = ("model", "max_tokens", "messages")


def check_body(body: Any, count: bool) -> dict[str, Any]:
    """The given fields of a body of /v1/messages, or of count_tokens."""
    of = COUNT_BODY if count else BODY
    given = of.check(body)
    for name in REQUIRED:
        if name not in given and name in of.honoured:
            reject(name, "Field required", code="missing_field")
    return given


def check_tagged(
    value: Any,
    param: str,
    kinds: Mapping[str, Schema],
    refused: Mapping[str, str] | None = None,
    *,
    tag: str = "type",
) -> tuple[str, dict[str, Any]]:
    """Which of `kinds` an object is, as its field `tag` says, and its other fields."""
    check_type(value, dict, param)
    of, where = value.get(tag), f"{param}.{tag}"
    if of is None:
        reject(where, "Field required", code="missing_field")
    check_type(of, str, where)
    if refused and of in refused:
        reject_unsupported(where, f"{of!r}: {refused[of]}")
    if of not in kinds:
        reject(where, f"{quote(of)} is not one of {', '.join(kinds)}{suggest(of, kinds)}")
    return of, check_fields({key: item for key, item in value.items() if key != tag}, param, kinds[of])


def check_fields(value: Any, param: str, schema: Schema) -> dict[str, Any]:
    """The fields of an object that were given, but `cache_control`, held to a schema of `_exactly`."""
    given = {key: item for key, item in check_type(value, dict, param).items() if item is not None}
    check_type(given.pop("cache_control", {}), dict, f"{param}.cache_control")
    for key, item in given.items():
        if key not in schema["properties"]:
            reject(f"{param}.{shorten(key)}", EXTRA, code=UNKNOWN)
        _hold(item, f"{param}.{key}", schema["properties"][key])
    for key in schema["required"]:
        if key not in given:
            reject(f"{param}.{key}", "Field required", code="missing_field")
    return given


def _hold(value: Any, param: str, schema: Schema) -> None:
    """Raises for the first thing in `value` that the schema does not allow."""
    if _fits(value, schema):
        return
    error = next(Draft202012Validator(schema).iter_errors(value), None)
    if error is None:
        return
    where = format_path(error.absolute_path)
    where = f"{param}.{where}" if where and not where.startswith("[") else param + where
    wanted = error.validator_value
    if error.validator == "type":
        words = wanted if isinstance(wanted, str) else " or ".join(wanted)
        reject(where, f"expected {words}, got {get_json_type(error.instance)}", code="invalid_type")
    if error.validator == "const":
        reject_unsupported(where, f"only {json.dumps(wanted)} is taken")
    if error.validator == "additionalProperties":
        extra = next(key for key in error.instance if key not in error.schema["properties"])
        reject(f"{where}.{shorten(extra)}", EXTRA, code=UNKNOWN)
    reject(where, shorten(error.message), code="invalid_value")


def _fits(value: Any, schema: Schema) -> bool:
    """Whether a value surely fits, told without jsonschema: long conversations have thousands of fields."""
    of = type(value)
    if of is str:
        return schema is _STRING or schema is _TEXTS or (schema is _NAME and 0 < len(value) <= _LONGEST_NAME)
    if of is list:
        return schema is _LIST or schema is _TEXTS
    return schema is _OBJECT if of is dict else of is bool and schema is _BOOL
