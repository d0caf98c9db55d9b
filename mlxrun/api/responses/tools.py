"""Tools of a Responses body: from its flat form to the chat form, and names of calls back again.

Functions stay what they are. A custom (free text) tool becomes a function with one string, `input`; the tools
of a namespace become functions called `namespace__name`. Tools that only the original can run are left out
with a warning where clients add them by default, else refused.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxrun.api.responses.fields import ABSENT_TOOLS, REFUSED_TOOLS
from mlxrun.text.field_errors import (
    check_keys,
    check_type,
    get_required,
    quote,
    reject,
    reject_unsupported,
    suggest,
)

logger = logging.getLogger(__name__)


@functools.lru_cache(maxsize=256)
def warn_once(text: str) -> None:
    """A warning about what clients do with every request. The text must not depend on the request."""
    logger.warning("%s", text)


Json = dict[str, Any]

_KINDS = ("function", "custom", "namespace")
_LATER = (
    "defer_loading",
    "allowed_callers",
    "output_schema",
    "async",
)  # fine as long as they ask for nothing
_SHOWN: Json = {"description": None, "parameters": None, "strict": False}  # if not given
_KEYS = {
    "function": ("type", "name", "description", "parameters", "strict", *_LATER),
    "custom": ("type", "name", "description", "format", *_LATER),
    "namespace": ("type", "name", "description", "tools"),
}


@dataclass(frozen=True, slots=True)
class ToolName:
    """A tool that the model can call: what the client calls it."""

    kind: str  # function or custom
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """`chat` is the tools of the chat body, `paths` where each came from, `by_name` what a call's name means,
    `echo` the tools as the response shows them, `choice` the chat body's tool_choice."""

    chat: list[Json] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    by_name: dict[str, ToolName] = field(default_factory=dict)
    echo: list[Json] = field(default_factory=list)
    choice: str | Json | None = None


def make_visible_name(name: str, namespace: str | None) -> str:
    """A tool's name as the model sees it."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def read_tools(given: Mapping[str, Any]) -> ResponseTools:
    """The tools and the tool choice of a body; RequestError names what is wrong."""
    tools = ResponseTools()
    for i, tool in enumerate(given.get("tools", [])):
        _read(tool, f"tools[{i}]", None, tools)
    return _chosen(tools, given.get("tool_choice", "auto"))


def _read(tool: Any, param: str, namespace: str | None, tools: ResponseTools) -> None:
    check_type(tool, dict, param)
    kind = get_required(tool, "type", str, param)
    if kind in ABSENT_TOOLS and namespace is None:
        warn_once(f"/v1/responses: there is no {kind} tool here; the model is not told of it")
        return
    if kind in REFUSED_TOOLS:
        reject_unsupported(f"{param}.type", f"{kind!r} is not run here; function and custom tools are taken")
    if kind not in _KINDS or (namespace is not None and kind == "namespace"):
        reject(f"{param}.type", f"{quote(kind)} is not one of {', '.join(_KINDS)}{suggest(kind, _KINDS)}")
    tool = {key: value for key, value in tool.items() if value is not None}
    check_keys(tool, _KEYS[kind], param)
    for key in _LATER:
        if tool.get(key) and tool[key] != ["direct"]:
            reject_unsupported(f"{param}.{key}", "leave it out")
    name = get_required(tool, "name", str, param)
    if not name:
        reject(f"{param}.name", "is empty")
    check_type(tool.get("description", ""), str, f"{param}.description")
    if kind == "namespace":
        inner = check_type(tool.get("tools"), list, f"{param}.tools")
        for j, each in enumerate(inner):
            _read(each, f"{param}.tools[{j}]", name, tools)
    else:
        _add(tool, param, ToolName(kind, name, namespace), tools)
    if namespace is None:
        tools.echo.append(_SHOWN | tool if kind == "function" else tool)


def _add(tool: Json, param: str, named: ToolName, tools: ResponseTools) -> None:
    name = make_visible_name(named.name, named.namespace)
    if name in tools.by_name:
        reject(f"{param}.name", f"there are two tools called {quote(name)}")
    function: Json = {"name": name}
    if named.kind == "custom":
        function |= _free_text(tool, param)
    else:
        function |= {key: tool[key] for key in ("description", "parameters", "strict") if key in tool}
    tools.chat.append({"type": "function", "function": function})
    tools.paths.append(param)
    tools.by_name[name] = named


def _free_text(tool: Json, param: str) -> Json:
    """A function that takes one text. A grammar is told to the model, which is not held to it."""
    form = check_type(tool.get("format", {"type": "text"}), dict, f"{param}.format")
    text = "The whole input, as plain text."
    if form.get("type") == "grammar":
        check_keys(form, ("type", "syntax", "definition"), f"{param}.format")
        syntax = check_type(form.get("syntax"), str, f"{param}.format.syntax")
        definition = check_type(form.get("definition"), str, f"{param}.format.definition")
        text = f"The whole input, as plain text of this {syntax} grammar:\n{definition}"
        warn_once("/v1/responses: the model is told the grammar of custom tools, but not held to it")
    elif form != {"type": "text"}:
        reject_unsupported(f"{param}.format", "text and grammar are taken")
    schema = {"type": "object", "properties": {"input": {"type": "string", "description": text}}}
    described = {"description": tool["description"]} if tool.get("description") else {}
    return described | {"parameters": schema | {"required": ["input"]}}


def _chosen(tools: ResponseTools, choice: Any) -> ResponseTools:
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            reject("tool_choice", f"{quote(choice)} is not one of auto, none, required")
        return _with(tools, choice, None)
    kind = check_type(check_type(choice, dict, "tool_choice").get("type"), str, "tool_choice.type")
    if kind in ("function", "custom"):
        check_keys(choice, ("type", "name", "namespace"), "tool_choice")
        name = _named(choice, "tool_choice", tools)
        return _with(tools, {"type": "function", "function": {"name": name}}, None)
    if kind == "allowed_tools":
        check_keys(choice, ("type", "mode", "tools"), "tool_choice")
        mode = choice.get("mode")
        if mode not in ("auto", "required"):
            reject("tool_choice.mode", "is not one of auto, required")
        allowed = check_type(choice.get("tools"), list, "tool_choice.tools")
        names = {_named(tool, f"tool_choice.tools[{i}]", tools) for i, tool in enumerate(allowed)}
        return _with(tools, mode, names)
    reject_unsupported("tool_choice.type", f"{quote(kind)}; function, custom and allowed_tools are taken")


def _named(value: Any, param: str, tools: ResponseTools) -> str:
    """The visible name of the tool that a choice means."""
    check_type(value, dict, param)
    namespace = value.get("namespace")
    if namespace is not None:
        check_type(namespace, str, f"{param}.namespace")
    name = make_visible_name(check_type(value.get("name"), str, f"{param}.name"), namespace)
    if name not in tools.by_name or value.get("type") != tools.by_name[name].kind:
        reject(f"{param}.name", f"there is no such tool: {quote(name)}{suggest(name, tools.by_name)}")
    return name


def _with(tools: ResponseTools, choice: str | Json, only: set[str] | None) -> ResponseTools:
    kept = [
        (tool, path)
        for tool, path in zip(tools.chat, tools.paths, strict=True)
        if only is None or tool["function"]["name"] in only
    ]
    return ResponseTools([t for t, _ in kept], [p for _, p in kept], tools.by_name, tools.echo, choice)


def build_call_item(name: str, call_id: str, arguments: str, tools: ResponseTools) -> Json:
    """An output item for a call of the model, without id and status."""
    named = tools.by_name.get(name, ToolName("function", name))
    if named.kind == "custom":
        item: Json = {"type": "custom_tool_call", "call_id": call_id, "name": named.name}
        item["input"] = extract_free_text(arguments)
    else:
        item = {"type": "function_call", "call_id": call_id, "name": named.name, "arguments": arguments}
    return item | ({"namespace": named.namespace} if named.namespace else {})


def extract_free_text(arguments: str) -> str:
    """The text that a custom tool was called with; as the model wrote it if it is not of our form."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
