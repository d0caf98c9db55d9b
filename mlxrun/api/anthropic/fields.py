"""The fields of Anthropic's messages and count_tokens, and of the objects inside their bodies.

Each kind of object is declared once. tagged_schema.py checks objects, and /openapi.json documents them.
"""

from __future__ import annotations

from typing import Any

from mlxrun.api.anthropic.tagged_schema import NAME, TEXTS, Tagged, check_value
from mlxrun.api.body_schema import BOOL, LIST, OBJECT, STRING, TOOLS, Accepted, BodySchema, Schema, object_of
from mlxrun.api.sampling_params import MAX_STOPS
from mlxrun.api.text.ignored_fields import CACHE_HINT
from mlxrun.core.field_errors import reject

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
# The error on which Anthropic's SDK goes on without a thread
THREAD_UNSUPPORTED = "thread_unsupported_request"

_TOOL_NAME: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,128}$"}
_EFFORT: Schema = {"enum": ["low", "medium", "high", "xhigh", "max"]}
_DIRECT: Schema = {"type": "object", "properties": {"type": {"const": "direct"}}, "required": ["type"]}
_CITATIONS = object_of({}, {"enabled": {"const": False}})
IMAGE_TYPES = ["image/jpeg", "image/png", "image/gif", "image/webp"]
_URL = object_of({"url": {"type": "string", "pattern": "^[Hh][Tt][Tt][Pp][Ss]?://"}})
_FILE = object_of({"file_id": STRING})  # stored_files.py puts what is in the file in its place
_TRANSFORMATIONS = object_of({}, {"oversized_image": {"const": "downsize"}})
_ALLOWED = {
    "system": ("text",),
    "user": ("text", "image", "video", "document", "search_result", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "tool_result": ("text", "image", "document", "search_result"),
    "document": ("text",),
    "search_result": ("text",),
}
_CONTAINERS = {"tool_result": "tool results", "document": "documents", "search_result": "search results"}
_SERVER_TOOLS = (
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "tool_search_tool_result"),
    *("code_execution_tool_result", "bash_code_execution_tool_result"),
    "text_editor_code_execution_tool_result",
)
REFUSED_BLOCKS = {
    "audio": "send it to /v1/chat/completions or /v1/responses",
    "container_upload": "there are no containers",
    **dict.fromkeys(_SERVER_TOOLS, "there are no server tools"),
    "tool_reference": "there is no tool search",
    "tool_addition": "send all tools in `tools`",
    "tool_removal": "send all tools in `tools`",
    "mcp_tool_use": "there is no MCP connector",
    "mcp_tool_result": "there is no MCP connector",
    "compaction": "conversations are not compacted",
}
_BLOCKS: dict[str, Schema] = {
    "text": object_of({"text": STRING}, {"citations": LIST}),
    "tool_use": object_of({"id": NAME, "name": NAME, "input": OBJECT}, {"caller": _DIRECT}),
    "thinking": object_of({"thinking": STRING, "signature": STRING}),
    "redacted_thinking": object_of({"data": STRING}),
}


def _list_blocks(container: str, schema: Schema) -> Schema:
    """`schema`, of a list or of a string or list, with the blocks that a container may have."""
    allowed = _ALLOWED[container]
    elsewhere = f"not in {_CONTAINERS.get(container, f'messages of the {container}')}"
    others = {name for names in _ALLOWED.values() for name in names}.difference(allowed)
    refused = REFUSED_BLOCKS | dict.fromkeys(others, elsewhere)
    return {**schema, "items": Tagged({name: _BLOCKS[name] for name in allowed}, refused, echoed=True)}


_IMAGES: dict[str, Schema] = {
    "base64": object_of({"media_type": {"enum": IMAGE_TYPES}, "data": STRING}),
    "url": _URL,
    "file": _FILE,
}
_VIDEOS: dict[str, Schema] = {  # not a block of Anthropic's
    "base64": object_of(
        {"media_type": {"type": "string", "pattern": "^video/[a-z0-9.+-]+$"}, "data": STRING}
    ),
    "url": _URL,
}
_DOCUMENTS: dict[str, Schema] = {
    "base64": object_of({"media_type": {"const": "application/pdf"}, "data": STRING}),
    "url": _URL,
    "text": object_of({"media_type": {"const": "text/plain"}, "data": STRING}),
    "content": object_of({"content": _list_blocks("document", TEXTS)}),
    "file": _FILE,
}
_NO_FILE = {"file": "send it as base64"}
_BLOCKS |= {
    "image": object_of(
        {"source": Tagged(_IMAGES, _NO_FILE, echoed=True)}, {"transformations": _TRANSFORMATIONS}
    ),
    "video": object_of({"source": Tagged(_VIDEOS, _NO_FILE, echoed=True)}),
    "document": object_of(
        {"source": Tagged(_DOCUMENTS, {"file": "send a PDF as base64, or the text"}, echoed=True)},
        {"title": STRING, "context": STRING, "citations": _CITATIONS},
    ),
    "search_result": object_of(
        {"source": STRING, "title": STRING, "content": _list_blocks("search_result", LIST)},
        {"citations": _CITATIONS},
    ),
}
_BLOCKS["tool_result"] = object_of(
    {"tool_use_id": NAME}, {"content": _list_blocks("tool_result", TEXTS), "is_error": BOOL}
)
_OUTPUT = {"effort": _EFFORT, "format": OBJECT}
_MESSAGES = Tagged(
    {
        "user": object_of({"content": _list_blocks("user", TEXTS)}),
        "assistant": object_of({"content": _list_blocks("assistant", TEXTS)}),
        "system": object_of(
            {},
            {
                "content": _list_blocks("system", TEXTS),
                "clear_at": {"enum": ["never", "next_user_message"]},
                "output_config": object_of({}, _OUTPUT),
            },
        ),
    },
    tag="role",
    echoed=True,
)
TOOL_OPTIONS: dict[str, Schema] = {
    "input_examples": {"type": "array", "items": OBJECT},
    "strict": BOOL,
    "eager_input_streaming": BOOL,
    "defer_loading": {"const": False},
    "allowed_callers": {"type": "array", "contains": {"const": "direct"}},
}
CUSTOM_TOOL = Tagged(
    {
        "custom": object_of(
            {"name": _TOOL_NAME, "input_schema": OBJECT}, {"description": STRING, **TOOL_OPTIONS}
        )
    }
)
_PARALLEL = {"disable_parallel_tool_use": BOOL}
_DISPLAY = {"display": {"enum": ["summarized", "omitted", "updates"]}}  # all but omitted show it whole
_FORMAT = Tagged({"json_schema": object_of({"schema": OBJECT})})
EDIT = Tagged({"clear_thinking_20251015": object_of({"keep": {"const": "all"}})})
# Fields whose objects are checked in Anthropic's words, after the types of all fields.
_OBJECTS: dict[str, Schema] = {
    "messages": {"type": "array", "minItems": 1, "items": _MESSAGES},
    "system": _list_blocks("system", TEXTS),
    "tool_choice": Tagged(
        {
            "auto": object_of({}, _PARALLEL),
            "any": object_of({}, _PARALLEL),
            "tool": object_of({"name": NAME}, _PARALLEL),
            "none": object_of({}),
        }
    ),
    "thinking": Tagged(
        {
            "enabled": object_of({"budget_tokens": {"type": "integer", "minimum": 1024}}, _DISPLAY),
            "adaptive": object_of({}, _DISPLAY),
            "disabled": object_of({}),
        }
    ),
    "output_config": object_of({}, {**_OUTPUT, "format": _FORMAT}),
    "output_format": _FORMAT,
    "metadata": object_of({}, {"user_id": {"type": "string", "maxLength": 4096}})
    | {"additionalProperties": True},
}

_HONOURED: dict[str, Schema] = {
    "model": {"type": "string", "minLength": 1},
    "messages": {"type": "array", "minItems": 1},
    "system": TEXTS,
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
    "messages[].output_config": (object_of({}, _OUTPUT), "the effort of earlier turns has no effect"),
    "messages[].content[].caller": (_DIRECT, "the model calls every tool itself"),
    "messages[].content[].citations": (LIST, "chat templates do not render citations"),
    "messages[].content[].transformations": (_TRANSFORMATIONS, "the processor of the model resizes images"),
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
_REQUIRED = ("model", "max_tokens", "messages")


def check_body(body: Any, count: bool, *, strict: bool = False) -> dict[str, Any]:
    """Return the given fields of a body of /v1/messages, or of count_tokens if `count`. RequestError if one
    is wrong. Tools and context edits are checked where they are read."""
    schema = COUNT_BODY if count else BODY
    if isinstance(body, dict) and body.get("thread") is not None:
        reject("thread", f"not supported: {_REFUSED['thread']}", code=THREAD_UNSUPPORTED)
    given = schema.check(body, strict=strict)
    for name in _REQUIRED:
        if name not in given and name in schema.honoured:
            reject(name, "Field required", code="missing_field")
    objects = {name: schema for name, schema in _OBJECTS.items() if name in given}
    return given | {name: check_value(given[name], name, objects[name], not strict) for name in objects}


def build_schema(body: BodySchema, typed_tools: Tagged) -> Schema:
    """Return the body as one JSON schema, for /openapi.json."""
    schema, tool = body.schema, CUSTOM_TOOL["oneOf"][0]
    optional = {**tool["properties"], "type": {"enum": ["custom", None]}}
    custom = {**tool, "properties": optional, "required": tool["required"][1:]}
    parts = _OBJECTS | {
        "tools": {**TOOLS, "items": {"anyOf": [custom, typed_tools]}},
        "context_management": object_of({}, {"edits": {"type": "array", "items": EDIT}}),
    }
    properties = {name: parts.get(name, value) for name, value in schema["properties"].items()}
    return {**schema, "properties": properties, "required": [n for n in _REQUIRED if n in body.honoured]}
