"""Bodies of Anthropic's API as one JSON schema each, the objects inside them included: for /openapi.json."""

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
    TOOL_CHOICES,
    TOOLS,
)
from mlxrun.api.body_schema import BodySchema, Schema

_OBJECT: Schema = {"type": "object"}


def build_schema(of: BodySchema) -> Schema:
    """The body as one JSON schema, the objects inside it included."""
    whole = of.schema
    parts = {
        "messages": {"type": "array", "minItems": 1, "items": _either(_messages(), "role")},
        "system": _content("system"),
        "tools": {"type": "array", "maxItems": 1024, "items": _tool()},
        "tool_choice": _either(TOOL_CHOICES),
        "thinking": _either(THINKING),
        "metadata": METADATA,
        "output_config": _with(OUTPUT, "format", _either(FORMATS)),
        "context_management": _with(CONTEXT, "edits", {"type": "array", "items": _either(EDITS)}),
    }
    known = {name: parts.get(name, schema) for name, schema in whole["properties"].items()}
    return {**whole, "properties": known, "required": [n for n in REQUIRED if n in of.honoured]}


def _tool() -> Schema:
    """A tool need not say that it is a custom one."""
    return _with(_with(TOOLS["custom"], "type", {"enum": [*TOOLS, None]}), "cache_control", _OBJECT)


def _messages() -> dict[str, Schema]:
    return {
        role: {**schema, "properties": {**schema["properties"], "content": _content(role)}}
        for role, schema in MESSAGE.items()
    }


def _content(role: str) -> Schema:
    blocks = {name: BLOCKS[name] for name in ALLOWED[role]}
    if "image" in blocks:
        blocks["image"] = _with(blocks["image"], "source", _either(SOURCES))
    if "document" in blocks:
        content = _with(DOCUMENTS["content"], "content", _content("document"))
        sources = _either({**DOCUMENTS, "content": content})
        blocks["document"] = _with(blocks["document"], "source", sources)
        texts = _content("search_result")["anyOf"][1]
        blocks["search_result"] = _with(blocks["search_result"], "content", texts)
    if "tool_result" in blocks:
        blocks["tool_result"] = _with(blocks["tool_result"], "content", _content("tool_result"))
    return {"anyOf": [{"type": "string"}, {"type": "array", "items": _either(blocks)}]}


def _with(schema: Schema, name: str, value: Schema) -> Schema:
    return {**schema, "properties": {**schema["properties"], name: value}}


def _either(kinds: Mapping[str, Schema], tag: str = "type") -> Schema:
    return {
        "oneOf": [
            {
                **_with(_with(schema, tag, {"const": of}), "cache_control", _OBJECT),
                "required": [tag, *schema["required"]],
            }
            for of, schema in kinds.items()
        ]
    }
