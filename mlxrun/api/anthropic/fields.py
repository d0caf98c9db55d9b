"""The fields of Anthropic's messages and count_tokens, and of the objects inside their bodies.

`check_tagged` checks an object against the schema of its `type`; its errors are in Anthropic's words.
`echoed` objects are those of a conversation, which clients send back as they got them: their unknown fields
have no effect. `cache_control` is accepted on every object. null counts as not given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator

from mlxrun.api.body_schema import (
    BOOL,
    LIST,
    OBJECT,
    STRING,
    TOOLS,
    Accepted,
    BodySchema,
    Schema,
    convert_integers,
    format_path,
    object_of,
    raise_schema_error,
)
from mlxrun.api.sampling_params import MAX_STOPS
from mlxrun.api.text.ignored_fields import CACHE_HINT, ECHOED, log_ignored
from mlxrun.core.field_errors import UNKNOWN, check_type, reject, reject_choice, reject_unsupported, shorten

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
EXTRA = "Extra inputs are not permitted"
THREAD_UNSUPPORTED = (
    "thread_unsupported_request"  # the error on which Anthropic's SDK goes on without a thread
)

_TEXTS: Schema = {"type": ["string", "array"]}
_MAX_NAME_LENGTH = 256
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": _MAX_NAME_LENGTH}
_TOOL_NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,128}$"}
_EFFORT: Schema = {"enum": ["low", "medium", "high", "xhigh", "max"]}


_DIRECT: Schema = {"type": "object", "properties": {"type": {"const": "direct"}}, "required": ["type"]}
_CITATIONS = object_of({}, {"enabled": {"const": False}})
BLOCKS: dict[str, Schema] = {
    "text": object_of({"text": STRING}, {"citations": LIST}),
    "image": object_of({"source": OBJECT}, {"transformations": OBJECT}),
    "video": object_of({"source": OBJECT}),  # not a block of Anthropic's
    "document": object_of({"source": OBJECT}, {"title": STRING, "context": STRING, "citations": _CITATIONS}),
    "search_result": object_of(
        {"source": STRING, "title": STRING, "content": LIST}, {"citations": _CITATIONS}
    ),
    "tool_use": object_of({"id": _NAME, "name": _NAME, "input": OBJECT}, {"caller": _DIRECT}),
    "tool_result": object_of({"tool_use_id": _NAME}, {"content": _TEXTS, "is_error": BOOL}),
    "thinking": object_of({"thinking": STRING, "signature": STRING}),
    "redacted_thinking": object_of({"data": STRING}),
}
TRANSFORMATIONS = object_of({}, {"oversized_image": {"const": "downsize"}})
ALLOWED = {
    "system": ("text",),
    "user": ("text", "image", "video", "document", "search_result", "tool_result"),
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
IMAGE_TYPES = ["image/jpeg", "image/png", "image/gif", "image/webp"]
SOURCES: dict[str, Schema] = {
    "base64": object_of({"media_type": {"enum": IMAGE_TYPES}, "data": STRING}),
    "url": object_of({"url": {"type": "string", "pattern": "^[Hh][Tt][Tt][Pp][Ss]?://"}}),
}
VIDEOS: dict[str, Schema] = {
    "base64": object_of(
        {"media_type": {"type": "string", "pattern": "^video/[a-z0-9.+-]+$"}, "data": STRING}
    ),
    "url": SOURCES["url"],
}
DOCUMENTS: dict[str, Schema] = {
    "base64": object_of({"media_type": {"const": "application/pdf"}, "data": STRING}),
    "url": SOURCES["url"],
    "text": object_of({"media_type": {"const": "text/plain"}, "data": STRING}),
    "content": object_of({"content": _TEXTS}),
}
REFUSED_DOCUMENTS = {"file": "send a PDF as base64, or the text"}
MESSAGE: dict[str, Schema] = {
    "user": object_of({"content": _TEXTS}),
    "assistant": object_of({"content": _TEXTS}),
    "system": object_of(
        {}, {"content": _TEXTS, "clear_at": {"enum": ["never", "next_user_message"]}, "output_config": OBJECT}
    ),
}
TOOL_OPTIONS: dict[str, Schema] = {
    "input_examples": {"type": "array", "items": OBJECT},
    "strict": BOOL,
    "eager_input_streaming": BOOL,
    "defer_loading": {"const": False},
    "allowed_callers": {"type": "array", "contains": {"const": "direct"}},
}
TOOL: dict[str, Schema] = {
    "custom": object_of({"name": _TOOL_NAME, "input_schema": OBJECT}, {"description": STRING, **TOOL_OPTIONS})
}
_PARALLEL = {"disable_parallel_tool_use": BOOL}
TOOL_CHOICES: dict[str, Schema] = {
    "auto": object_of({}, _PARALLEL),
    "any": object_of({}, _PARALLEL),
    "tool": object_of({"name": _NAME}, _PARALLEL),
    "none": object_of({}),
}
_DISPLAY = {"display": {"enum": ["summarized", "omitted", "updates"]}}  # all but omitted show it whole
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
    "output_format": OBJECT,  # what output_config.format was called in the beta of 2025-11-13
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
CONTEXT = object_of({}, {"edits": LIST})
OUTPUT = object_of({}, {"effort": _EFFORT, "format": OBJECT})
_HARMLESS: Accepted = {
    "cache_control": (OBJECT, "a hint; the prefix cache compares tokens"),
    "speed": ({"const": "standard"}, "there is only one speed"),
    "mcp_servers": ({"const": []}, "there is no MCP connector"),
}
_HARMLESS_GENERATION: Accepted = {
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
    "thread": "conversations are not stored; send all messages",
}
# Accepted besides, unless server.strict_fields is set.
_IGNORED: Accepted = {
    "betas": (LIST, "the body says which features it uses"),
    "billing_policy": (OBJECT, "nothing is billed"),
    "fallback_credit_token": ({"type": ["string", "object"]}, "nothing is billed"),
    "fallbacks": ({"type": ["string", "array"]}, "there is one model, which declines nothing by policy"),
    "speed": (STRING, "there is only one speed"),
    "thinking.block_binding": (OBJECT, "reasoning is not bound to a conversation"),
    "user_profile_id": (STRING, "nothing is billed"),
    "workspace_id": (STRING, "there are no workspaces"),
}
_IGNORED_GENERATION: Accepted = {
    "inference_geo": (STRING, "there is only one region"),
    "service_tier": (STRING, "there is only one service tier"),
}
# Accepted in objects inside a body, also with server.strict_fields.
IGNORED_INNER: Accepted = {
    "cache_control": (OBJECT, CACHE_HINT),
    "messages[].output_config": (OUTPUT, "the effort of earlier turns has no effect"),
    "messages[].content[].caller": (_DIRECT, "the model calls every tool itself"),
    "messages[].content[].citations": (LIST, "chat templates do not render citations"),
    "messages[].content[].transformations": (TRANSFORMATIONS, "the processor of the model resizes images"),
    "tools[].allowed_callers": (TOOL_OPTIONS["allowed_callers"], "the model calls every tool itself"),
    "tools[].defer_loading": (TOOL_OPTIONS["defer_loading"], "all tools are in the prompt"),
    "tools[].eager_input_streaming": (BOOL, "inputs are streamed as they are generated"),
}
BODY = BodySchema(
    _HONOURED | _GENERATION,
    _HARMLESS | _HARMLESS_GENERATION,
    _REFUSED,
    ignored=_IGNORED | _IGNORED_GENERATION,
)
COUNT_BODY = BodySchema(_HONOURED, _HARMLESS, _REFUSED, ignored=_IGNORED)
REQUIRED = ("model", "max_tokens", "messages")


def check_body(body: Any, count: bool, *, strict: bool = False) -> dict[str, Any]:
    """The given fields of a body of /v1/messages, or of count_tokens."""
    schema = COUNT_BODY if count else BODY
    if isinstance(body, dict) and body.get("thread") is not None:
        reject("thread", f"not supported: {_REFUSED['thread']}", code=THREAD_UNSUPPORTED)
    given = schema.check(body, strict=strict)
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
    echoed: bool = False,
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
    others = {key: item for key, item in value.items() if key != tag}
    return kind, check_fields(others, param, kinds[kind], echoed=echoed)


def check_fields(value: Any, param: str, schema: Schema, *, echoed: bool = False) -> dict[str, Any]:
    """The given fields of an object except `cache_control`, checked against a schema of `object_of`."""
    given, properties = {}, schema["properties"]
    for key, item in check_type(value, dict, param).items():
        if item is None:
            continue
        if key == "cache_control":
            check_type(item, dict, f"{param}.cache_control")
            log_ignored("cache_control", CACHE_HINT)
        elif key in properties:
            _check_value(item, f"{param}.{key}", properties[key])
            given[key] = convert_integers(item, properties[key])
        elif echoed:
            log_ignored(f"{param}.{key}", ECHOED)
        else:
            reject(f"{param}.{shorten(key)}", EXTRA, code=UNKNOWN)
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
        return schema is LIST or schema is _TEXTS
    return schema is OBJECT if kind is dict else kind is bool and schema is BOOL
