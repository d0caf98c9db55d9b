"""Builds the JSON schemas of Anthropic's bodies for /openapi.json, with the objects inside them."""

from __future__ import annotations

from collections.abc import Mapping

from mlxrun.api.anthropic.fields import (
    ALLOWED,
    BLOCKS,
    CONTEXT,
    DOCUMENTS,
    EDITS,
    FORMATS,
    MESSAGE,
    METADATA,
    OUTPUT,
    REQUIRED,
    SOURCES,
    THINKING,
    TOOL,
    TOOL_CHOICES,
    VIDEOS,
)
from mlxrun.api.anthropic.typed_tools import TYPED_KINDS
from mlxrun.api.body_schema import OBJECT, STRING, TOOLS, BodySchema, Schema, object_of

_FILES = {"file": object_of({"file_id": STRING})}  # replaced by what is in the file before a body is checked


def build_schema(body: BodySchema) -> Schema:
    """The body as one JSON schema."""
    schema = body.schema
    tool = _replace(TOOL["custom"], "type", {"enum": [*TOOL, None]})  # the type of a custom tool is optional
    parts = {
        "messages": {"type": "array", "minItems": 1, "items": _build_echoed(_build_messages(), "role")},
        "system": _build_content("system"),
        "tools": {
            **TOOLS,
            "items": {"anyOf": [_replace(tool, "cache_control", OBJECT), _build_one_of(TYPED_KINDS)]},
        },
        "tool_choice": _build_one_of(TOOL_CHOICES),
        "thinking": _build_one_of(THINKING),
        "metadata": METADATA,
        "output_config": _replace(OUTPUT, "format", _build_one_of(FORMATS)),
        "output_format": _build_one_of(FORMATS),
        "context_management": _replace(CONTEXT, "edits", {"type": "array", "items": _build_one_of(EDITS)}),
    }
    properties = {name: parts.get(name, value) for name, value in schema["properties"].items()}
    required = [name for name in REQUIRED if name in body.honoured]
    return {**schema, "properties": properties, "required": required}


def _build_messages() -> dict[str, Schema]:
    return {role: _replace(schema, "content", _build_content(role)) for role, schema in MESSAGE.items()}


def _build_content(role: str) -> Schema:
    blocks = {name: BLOCKS[name] for name in ALLOWED[role]}
    if "image" in blocks:
        blocks["image"] = _replace(blocks["image"], "source", _build_echoed({**SOURCES, **_FILES}))
    if "video" in blocks:
        blocks["video"] = _replace(blocks["video"], "source", _build_echoed(VIDEOS))
    if "document" in blocks:
        content = _replace(DOCUMENTS["content"], "content", _build_content("document"))
        sources = _build_echoed({**DOCUMENTS, **_FILES, "content": content})
        blocks["document"] = _replace(blocks["document"], "source", sources)
        texts = _build_content("search_result")["anyOf"][1]
        blocks["search_result"] = _replace(blocks["search_result"], "content", texts)
    if "tool_result" in blocks:
        blocks["tool_result"] = _replace(blocks["tool_result"], "content", _build_content("tool_result"))
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": _build_echoed(blocks)}]}


def _replace(schema: Schema, name: str, value: Schema) -> Schema:
    return {**schema, "properties": {**schema["properties"], name: value}}


def _build_echoed(kinds: Mapping[str, Schema], tag: str = "type") -> Schema:
    """Objects of a conversation, whose unknown fields have no effect."""
    schemas = _build_one_of(kinds, tag)["oneOf"]
    return {"oneOf": [{**schema, "additionalProperties": True} for schema in schemas]}


def _build_one_of(kinds: Mapping[str, Schema], tag: str = "type") -> Schema:
    schemas = []
    for kind, schema in kinds.items():
        tagged = _replace(_replace(schema, tag, {"const": kind}), "cache_control", OBJECT)
        schemas.append({**tagged, "required": [tag, *schema["required"]]})
    return {"oneOf": schemas}
