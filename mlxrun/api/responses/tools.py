"""Translates the tools of Responses bodies to chat tools, and the names of calls back.

A custom (free text) tool becomes a function with one string, `input`. The tools of a namespace become
functions called `namespace__name`. Tools that only OpenAI can run are refused. Those that clients send by
default are dropped with a warning.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mlxrun.api.responses.fields import ABSENT_TOOLS, REFUSED_REASON, REFUSED_TOOLS
from mlxrun.api.text.tools import check_tool_name
from mlxrun.core.field_errors import (
    check_keys,
    check_type,
    get_required,
    quote,
    reject,
    reject_choice,
    reject_unsupported,
    suggest,
)
from mlxrun.core.limited_json import load_json

logger = logging.getLogger(__name__)

Json = dict[str, Any]

_KINDS = ("function", "custom", "namespace")
_EMPTY_ONLY = ("defer_loading", "allowed_callers", "output_schema", "async")
_DEFAULTS: Json = {"description": None, "parameters": None, "strict": False}  # of functions in a response
_KEYS = {
    "function": ("type", "name", "description", "parameters", "strict", *_EMPTY_ONLY),
    "custom": ("type", "name", "description", "format", *_EMPTY_ONLY),
    "namespace": ("type", "name", "description", "tools"),
}


@functools.lru_cache(maxsize=256)
def warn_once(text: str) -> None:
    """Log a warning, once for each text. The text must not depend on the request."""
    logger.warning("%s", text)


@dataclass(frozen=True, slots=True)
class ToolName:
    """The client's name of a tool that the model can call."""

    kind: str  # function or custom
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class ResponseTools:
    """The tools of a body. `chat`, `choice`: the chat body's tools and tool_choice. `paths`: each tool's
    field. `by_name`: by the names that the model sees. `echo`: the response's `tools`."""

    chat: list[Json] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    by_name: dict[str, ToolName] = field(default_factory=dict)
    echo: list[Json] = field(default_factory=list)
    choice: str | Json | None = None


def make_visible_name(name: str, namespace: str | None) -> str:
    """Return a tool's name as the model sees it."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


def read_tools(given: Mapping[str, Any], *, strict: bool = False) -> ResponseTools:
    """Read a body's tools and tool choice. RequestError if one is wrong. `strict`: server.strict_fields."""
    tools = ResponseTools()
    for i, tool in enumerate(given.get("tools", [])):
        if strict or not _is_absent(tool):
            _read_tool(tool, f"tools[{i}]", None, tools)
    return _apply_choice(tools, given.get("tool_choice", "auto"))


def _is_absent(tool: Any) -> bool:
    """Whether a tool is left out, which is logged."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in ABSENT_TOOLS:
        return False
    warn_once(f"/v1/responses: mlxrun has no {kind} tool; it is left out of the prompt")
    return True


def _read_tool(tool: Any, param: str, namespace: str | None, tools: ResponseTools) -> None:
    check_type(tool, dict, param)
    kind = get_required(tool, "type", str, param)
    if kind in (*ABSENT_TOOLS, *REFUSED_TOOLS):
        reject_unsupported(f"{param}.type", f"{kind!r}: {REFUSED_REASON}")
    if kind not in _KINDS or (namespace is not None and kind == "namespace"):
        reject_choice(f"{param}.type", kind, _KINDS)
    tool = {key: value for key, value in tool.items() if value is not None}
    check_keys(tool, _KEYS[kind], param)
    for key in _EMPTY_ONLY:
        if tool.get(key) and tool[key] != ["direct"]:
            reject_unsupported(f"{param}.{key}", "leave it out")
    name = check_tool_name(get_required(tool, "name", str, param), f"{param}.name")
    check_type(tool.get("description", ""), str, f"{param}.description")
    if kind == "namespace":
        for i, each in enumerate(check_type(tool.get("tools"), list, f"{param}.tools")):
            _read_tool(each, f"{param}.tools[{i}]", name, tools)
    else:
        _add_function(tool, param, ToolName(kind, name, namespace), tools)
    if namespace is None:
        tools.echo.append(_DEFAULTS | tool if kind == "function" else tool)


def _add_function(tool: Json, param: str, tool_name: ToolName, tools: ResponseTools) -> None:
    name = make_visible_name(tool_name.name, tool_name.namespace)
    if name in tools.by_name:
        reject(f"{param}.name", f"there are two tools called {quote(name)}")
    if tool_name.kind == "custom":
        function = _translate_custom(tool, param)
    else:
        function = {key: tool[key] for key in ("description", "parameters", "strict") if key in tool}
    tools.chat.append({"type": "function", "function": {"name": name} | function})
    tools.paths.append(param)
    tools.by_name[name] = tool_name


def _translate_custom(tool: Json, param: str) -> Json:
    """A function that takes one text. A grammar is described to the model, but not enforced."""
    wanted = check_type(tool.get("format", {"type": "text"}), dict, f"{param}.format")
    text = "The whole input, as plain text."
    if wanted.get("type") == "grammar":
        check_keys(wanted, ("type", "syntax", "definition"), f"{param}.format")
        syntax = check_type(wanted.get("syntax"), str, f"{param}.format.syntax")
        definition = check_type(wanted.get("definition"), str, f"{param}.format.definition")
        text = f"The whole input, as plain text of this {syntax} grammar:\n{definition}"
        warn_once("/v1/responses: grammars of custom tools are described to the model, but not enforced")
    elif wanted != {"type": "text"}:
        reject_unsupported(f"{param}.format", "use text or grammar")
    schema = {"type": "object", "properties": {"input": {"type": "string", "description": text}}}
    described = {"description": tool["description"]} if tool.get("description") else {}
    return described | {"parameters": schema | {"required": ["input"]}}


def _apply_choice(tools: ResponseTools, choice: Any) -> ResponseTools:
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            reject_choice("tool_choice", choice, ("auto", "none", "required"))
        return replace(tools, choice=choice)
    kind = check_type(check_type(choice, dict, "tool_choice").get("type"), str, "tool_choice.type")
    if kind in ("function", "custom"):
        check_keys(choice, ("type", "name", "namespace"), "tool_choice")
        name = _read_name(choice, "tool_choice", tools)
        return replace(tools, choice={"type": "function", "function": {"name": name}})
    if kind != "allowed_tools":
        reject_unsupported("tool_choice.type", f"{quote(kind)}; use function, custom or allowed_tools")
    check_keys(choice, ("type", "mode", "tools"), "tool_choice")
    mode = choice.get("mode")
    if mode not in ("auto", "required"):
        reject_choice("tool_choice.mode", mode, ("auto", "required"))
    allowed = check_type(choice.get("tools"), list, "tool_choice.tools")
    names = {_read_name(tool, f"tool_choice.tools[{i}]", tools) for i, tool in enumerate(allowed)}
    indices = [i for i, tool in enumerate(tools.chat) if tool["function"]["name"] in names]
    chat, paths = [tools.chat[i] for i in indices], [tools.paths[i] for i in indices]
    return replace(tools, chat=chat, paths=paths, choice=mode)


def _read_name(value: Any, param: str, tools: ResponseTools) -> str:
    """The visible name of the tool that a choice names."""
    check_type(value, dict, param)
    namespace = value.get("namespace")
    if namespace is not None:
        check_type(namespace, str, f"{param}.namespace")
    name = make_visible_name(check_type(value.get("name"), str, f"{param}.name"), namespace)
    if name not in tools.by_name or value.get("type") != tools.by_name[name].kind:
        reject(f"{param}.name", f"there is no such tool: {quote(name)}{suggest(name, tools.by_name)}")
    return name


def build_call_item(name: str, call_id: str, arguments: str, tools: ResponseTools) -> Json:
    """Build the output item of a model's call, without id and status."""
    tool = tools.by_name.get(name, ToolName("function", name))
    if tool.kind == "custom":
        item: Json = {"type": "custom_tool_call", "call_id": call_id, "name": tool.name}
        item["input"] = extract_free_text(arguments)
    else:
        item = {"type": "function_call", "call_id": call_id, "name": tool.name, "arguments": arguments}
    return item | ({"namespace": tool.namespace} if tool.namespace else {})


def extract_free_text(arguments: str) -> str:
    """Return the `input` of a custom tool's call, or all arguments if they have another shape."""
    try:
        value = load_json(arguments)
    except ValueError:
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
