"""The fields of Anthropic's messages and count_tokens, and of the objects inside their bodies.

`check_tagged` checks an object against the schema of its `type`; its errors are in Anthropic's words.
`cache_control` is accepted on every object and has no effect, since the prefix cache compares tokens. null
counts as not given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

from mlxrun.api.body_schema import (
    BOOL,
    OBJECT,
    STRING,
    TOOLS,
    BodySchema,
    Schema,
    format_path,
    object_of,
    raise_schema_error,
)
from mlxrun.api.sampling_params import MAX_STOPS
from mlxrun.text.field_errors import UNKNOWN, check_type, reject, reject_choice, reject_unsupported, shorten

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
EXTRA = "Extra inputs are not permitted"

_LIST: Schema = {"type": "array"}
_TEXTS: Schema = {"type": ["string", "array"]}
_MAX_NAME_LENGTH = 256
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": _MAX_NAME_LENGTH}
_TOOL_NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,128}$"}
_EFFORT: Schema = {"enum": ["low", "medium", "high", "xhigh", "max"]}


_DIRECT: Schema = {"type": "object", "properties": {"type": {"const": "direct"}}, "required": ["type"]}
_CITATIONS = object_of({}, {"enabled": {"const": False}})
BLOCKS: dict[str, Schema] = {
    "text": object_of({"text": STRING}, {"citations": _LIST}),
    "image": object_of({"source": OBJECT}, {"transformations": OBJECT}),
    "document": object_of({"source": OBJECT}, {"title": STRING, "context": STRING, "citations": _CITATIONS}),
    "search_result": object_of(
        {"source": STRING, "title": STRING, "content": _LIST}, {"citations": _CITATIONS}
    ),
    "tool_use": object_of({"id": _NAME, "name": _NAME, "input": OBJECT}, {"caller": _DIRECT}),
    "tool_result": object_of({"tool_use_id": _NAME}, {"content": _TEXTS, "is_error": BOOL}),
    "thinking": object_of({"thinking": STRING, "signature": STRING}),
    "redacted_thinking": object_of({"data": STRING}),
}
TRANSFORMATIONS = object_of({}, {"oversized_image": {"const": "downsize"}})
ALLOWED = {
    "system": ("text",),
    "user": ("text", "image", "document", "search_result", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "tool_result": ("text", "image", "document", "search_result"),
    "document": ("text",),
    "search_result": ("text",),
}
_SERVER_TOOLS = (
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "tool_search_tool_result"),
    *("code_execution_tool_result", "bash_code_execution_tool_result"),
    "text_editor_code_execution_tool_result",
)
REFUSED_BLOCKS = {
    "container_upload": "there are no containers",
    **dict.fromkeys(_SERVER_TOOLS, "there are no server tools"),
    "tool_reference": "there is no tool search",
    "tool_addition": "send all tools in `tools`",
    "tool_removal": "send all tools in `tools`",
    "mcp_tool_use": "there is no MCP connector",
    "mcp_tool_result": "there is no MCP connector",
    "compaction": "conversations are not compacted",
}
SOURCES: dict[str, Schema] = {
    "base64": object_of(
        {"media_type": {"enum": ["image/jpeg", "image/png", "image/gif", "image/webp"]}, "data": STRING}
    ),
    "url": object_of({"url": {"type": "string", "pattern": "^[Hh][Tt][Tt][Pp][Ss]?://"}}),
}
DOCUMENTS: dict[str, Schema] = {
    "text": object_of({"media_type": {"const": "text/plain"}, "data": STRING}),
    "content": object_of({"content": _TEXTS}),
}
REFUSED_DOCUMENTS = {
    "base64": "files such as PDFs are not read; send the text, or the pages as images",
    "url": "documents are not fetched; send the text",
    "file": "send the text",
}
MESSAGE: dict[str, Schema] = {
    "user": object_of({"content": _TEXTS}),
    "assistant": object_of({"content": _TEXTS}),
    "system": object_of(
        {}, {"content": _TEXTS, "clear_at": {"enum": ["never", "next_user_message"]}, "output_config": OBJECT}
    ),
}
TOOL: dict[str, Schema] = {
    "custom": object_of(
        {"name": _TOOL_NAME, "input_schema": OBJECT},
        {
            "description": STRING,
            "input_examples": {"type": "array", "items": OBJECT},
            "strict": BOOL,
            "eager_input_streaming": BOOL,
            "defer_loading": {"const": False},
            "allowed_callers": {"type": "array", "contains": {"const": "direct"}},
        },
    )
}
_PARALLEL = {"disable_parallel_tool_use": BOOL}
TOOL_CHOICES: dict[str, Schema] = {
    "auto": object_of({}, _PARALLEL),
    "any": object_of({}, _PARALLEL),
    "tool": object_of({"name": _NAME}, _PARALLEL),
    "none": object_of({}),
}
_DISPLAY = {"display": {"enum": ["summarized", "omitted"]}}
THINKING: dict[str, Schema] = {
    "enabled": object_of({"budget_tokens": {"type": "integer", "minimum": 1024}}, _DISPLAY),
    "adaptive": object_of({}, _DISPLAY),
    "disabled": object_of({}),
}
FORMATS: dict[str, Schema] = {"json_schema": object_of({"schema": OBJECT})}
EDITS: dict[str, Schema] = {"clear_thinking_20251015": object_of({"keep": {"const": "all"}})}

_HONOURED: dict[str, Schema] = {
    "model": {"type": "string", "minLength": 1},
    "messages": {"type": "array", "minItems": 1},
    "system": _TEXTS,
    "tools": TOOLS,
    "tool_choice": OBJECT,
    "thinking": OBJECT,
    "output_config": OBJECT,
    "context_management": OBJECT,
}
_GENERATION: dict[str, Schema] = {
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0, "maximum": 1},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": 0},
    "stop_sequences": {"type": "array", "maxItems": MAX_STOPS, "items": {"type": "string", "minLength": 1}},
    "stream": BOOL,
    "metadata": OBJECT,
}
METADATA = object_of({}, {"user_id": {"type": "string", "maxLength": 4096}})
CONTEXT = object_of({}, {"edits": _LIST})
OUTPUT = object_of({}, {"effort": _EFFORT, "format": OBJECT})
_HARMLESS: dict[str, tuple[Schema, str]] = {
    "cache_control": (OBJECT, "a hint; the prefix cache compares tokens"),
    "speed": ({"const": "standard"}, "there is only one speed"),
    "mcp_servers": ({"const": []}, "there is no MCP connector"),
}
_HARMLESS_GENERATION: dict[str, tuple[Schema, str]] = {
    "service_tier": ({"enum": ["auto", "standard_only"]}, "there is only one service tier"),
    "inference_geo": ({"const": "global"}, "there is only one region"),
    "diagnostics": (OBJECT, "an optional report on cache misses"),
}
_REFUSED = {
    "billing_policy": "nothing is billed",
    "compaction": "conversations are not compacted",
    "container": "there are no containers",
    "fallback_credit_token": "there are no fallback models",
    "fallbacks": "there are no fallback models",
    "output_format": "deprecated; use output_config.format",
    "thread": "conversations are not stored; send all messages",
}
BODY = BodySchema(_HONOURED | _GENERATION, _HARMLESS | _HARMLESS_GENERATION, _REFUSED)
COUNT_BODY = BodySchema(_HONOURED, _HARMLESS, _REFUSED)
REQUIRED = ("model", "max_tokens", "messages")


def check_body(body: Any, count: bool) -> dict[str, Any]:
    """The given fields of a body of /v1/messages, or of count_tokens."""
    schema = COUNT_BODY if count else BODY
    given = schema.check(body)
    for name in REQUIRED:
        if name not in given and name in schema.honoured:
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
    """Which of `kinds` an object is, by its field `tag`, and its other fields."""
    check_type(value, dict, param)
    kind, where = value.get(tag), f"{param}.{tag}"
    if kind is None:
        reject(where, "Field required", code="missing_field")
    check_type(kind, str, where)
    if refused and kind in refused:
        reject_unsupported(where, f"{kind!r}: {refused[kind]}")
    if kind not in kinds:
        reject_choice(where, kind, kinds)
    return kind, check_fields({key: item for key, item in value.items() if key != tag}, param, kinds[kind])


def check_fields(value: Any, param: str, schema: Schema) -> dict[str, Any]:
    """The given fields of an object except `cache_control`, checked against a schema of `object_of`."""
    given = {key: item for key, item in check_type(value, dict, param).items() if item is not None}
    check_type(given.pop("cache_control", {}), dict, f"{param}.cache_control")
    for key, item in given.items():
        if key not in schema["properties"]:
            reject(f"{param}.{shorten(key)}", EXTRA, code=UNKNOWN)
        _check_value(item, f"{param}.{key}", schema["properties"][key])
    for key in schema["required"]:
        if key not in given:
            reject(f"{param}.{key}", "Field required", code="missing_field")
    return given


def _check_value(value: Any, param: str, schema: Schema) -> None:
    """Refuses the first thing in `value` that the schema does not allow."""
    error = None if _is_valid(value, schema) else next(Draft202012Validator(schema).iter_errors(value), None)
    if error is None:
        return
    where = format_path(error.absolute_path, param)
    if error.validator == "const":
        reject_unsupported(where, f"only {json.dumps(error.validator_value)} is supported")
    if error.validator == "additionalProperties":
        extra = next(key for key in error.instance if key not in error.schema["properties"])
        reject(f"{where}.{shorten(extra)}", EXTRA, code=UNKNOWN)
    raise_schema_error(error, param)


def _is_valid(value: Any, schema: Schema) -> bool:
    """Whether a value is certainly valid, without jsonschema: long conversations have thousands of fields."""
    kind = type(value)
    if kind is str:
        is_name = schema is _NAME and 0 < len(value) <= _MAX_NAME_LENGTH
        return schema is STRING or schema is _TEXTS or is_name
    if kind is list:
        return schema is _LIST or schema is _TEXTS
    return schema is OBJECT if kind is dict else kind is bool and schema is BOOL
