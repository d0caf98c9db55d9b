"""The function tools of chat bodies, which templates take as they are, but for hints of other services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxrun.api.text.ignored_fields import CACHE_HINT, log_ignored
from mlxrun.api.text.messages import Message
from mlxrun.core.field_errors import check_type, get_required, quote, reject, reject_unsupported

_MAX_NAME_LENGTH = 128
TOOL_HINTS = {
    "cache_control": CACHE_HINT,
    "eager_input_streaming": "arguments are streamed as they are generated",
}


def read_offered_tools(given: Mapping[str, Any]) -> list[Message]:
    """The tools that the model may call: none if `tool_choice` is none."""
    tools = check_tools(given.get("tools", []))
    return tools if given.get("tool_choice") != "none" else []


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """The tools of a body, checked. No two have one name, as an answer could not tell them apart."""
    checked: list[dict[str, Any]] = []
    names = set()
    for i, tool in enumerate(tools):
        where, path = f"tools[{i}]", f"tools[{i}].function.name"
        check_type(tool, dict, where)
        if get_required(tool, "type", str, where) != "function":
            reject_unsupported(f"{where}.type", "only 'function' tools are supported")
        function = get_required(tool, "function", dict, where)
        name = check_tool_name(get_required(function, "name", str, f"{where}.function"), path)
        if name in names:
            reject(path, f"there are two tools called {quote(name)}")
        names.add(name)
        for key, expected in (("description", str), ("parameters", dict), ("strict", bool)):
            if function.get(key) is not None:
                check_type(function[key], expected, f"{where}.function.{key}")
        checked.append({**_drop_hints(tool), "function": _drop_hints(function)})
    return checked


def check_tool_name(name: str, param: str) -> str:
    """Returns the name if it is one: OpenAI's characters, and others that clients use with MCP servers (dots,
    slashes, colons, letters of any language), but no white space and no control characters."""
    if not name:
        reject(param, "is empty")
    if len(name) > _MAX_NAME_LENGTH:
        reject(param, f"has {len(name)} characters; at most {_MAX_NAME_LENGTH} are allowed")
    if not name.isprintable() or " " in name:
        reject(param, f"{quote(name)} is no name of a tool: it has white space or control characters")
    return name


def _drop_hints(value: Mapping[str, Any]) -> dict[str, Any]:
    for key in value.keys() & TOOL_HINTS.keys():
        log_ignored(f"tools[].{key}", TOOL_HINTS[key])
    return {key: item for key, item in value.items() if key not in TOOL_HINTS}
