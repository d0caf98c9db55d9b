"""Tools that users write: plain Python functions. What the model sees is made from signature and docstring.

    def search(query: str, limit: int = 5, *, state: dict) -> list[str]:
        \"\"\"Search the shop.

        Args:
            query: Words to look for.
        \"\"\"

A parameter `state` is no argument of the model: it is the state of the conversation, which the function may
change. What the function returns is the result: a text as it is, other values as JSON.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from mlxrun.core.cache_home import expand_home
from mlxrun.core.errors import JobError
from mlxrun.jobs.scoring.custom_scorer import import_function

Json = dict[str, Any]
STATE = "state"
_TYPES: Mapping[Any, str] = {
    **{str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"},
    **{dict: "object", list: "array"},
}
_ARGUMENT = re.compile(r"\s*(\w+)(?:\s*\([^)]*\))?:\s*(.*)")
_ARGS = re.compile(r"^\s*(?:Args|Arguments|Parameters):\s*$", re.M)
_SECTION = re.compile(r"^\w[\w ]*:\s*$", re.M)


@dataclass(frozen=True, slots=True)
class ToolFunction:
    """A function that is a tool. `schema`: the tool as a chat request offers it."""

    function: Callable[..., Any]
    takes_state: bool
    schema: Json

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])


def load_functions(entries: Sequence[Any], folder: Path) -> dict[str, ToolFunction]:
    """Import the functions of `agent.tools`, by tool name. `folder`: of relative files. JobError that names
    the one that cannot be used."""
    found: dict[str, ToolFunction] = {}
    for entry in entries:
        given = {"function": entry} if isinstance(entry, str) else entry
        place = str(given["function"])
        path, colon, name = place.rpartition(":")
        where = f"{folder / expand_home(path)}{colon}{name}" if path.endswith(".py") else place
        tool = _make_tool(place, import_function(where, "tool")[1], given)
        if tool.name in found:
            raise JobError(f"tool {place!r}: there are two tools with the name {tool.name!r}")
        found[tool.name] = tool
    return found


def _make_tool(place: str, function: Callable[..., Any], given: Mapping[str, Any]) -> ToolFunction:
    if inspect.iscoroutinefunction(function):
        raise JobError(f"tool {place!r}: it is async; write a plain function")
    try:
        parameters = inspect.signature(function).parameters
        made = given.get("parameters") or _describe_parameters(function, parameters)
    except (TypeError, ValueError, NameError) as error:
        raise JobError(f"tool {place!r}: {error}") from error
    text = _ARGS.split(inspect.getdoc(function) or "")[0].strip()
    description = given.get("description") or text
    content = {"name": given.get("name") or place.rpartition(":")[2], "parameters": made}
    if description:
        content["description"] = description
    return ToolFunction(function, STATE in parameters, {"type": "function", "function": content})


def _describe_parameters(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> Json:
    """The JSON schema of a function's arguments. TypeError if one cannot be given by name, or its type is not
    of JSON."""
    hints, texts = get_type_hints(function, include_extras=True), _read_argument_texts(function)
    found, required = dict[str, Json](), list[str]()
    for each in parameters.values():
        if each.name == STATE:
            continue
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise TypeError(f"the parameter {each.name!r} has no name by which a model can give it")
        schema = _describe_type(hints.get(each.name, Any), each.name)
        if each.name in texts:
            schema["description"] = texts[each.name]
        if each.default is each.empty:
            required.append(each.name)
        elif type(each.default) in _TYPES and each.default is not None:
            schema["default"] = each.default
        found[each.name] = schema
    return {"type": "object", "properties": found, "required": required, "additionalProperties": False}


def _describe_type(hint: Any, name: str) -> Json:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if origin is Annotated:
        texts = [each for each in arguments[1:] if isinstance(each, str)]
        return _describe_type(arguments[0], name) | ({"description": texts[0]} if texts else {})
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_describe_type(each, name) for each in arguments]}
    if origin is list:
        return {"type": "array", "items": _describe_type(arguments[0], name)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _describe_type(arguments[1], name)}
    if typing.is_typeddict(hint):
        fields = {key: _describe_type(each, name) for key, each in get_type_hints(hint).items()}
        return {"type": "object", "properties": fields, "required": sorted(hint.__required_keys__)}
    raise TypeError(f"the type of the parameter {name!r} is not one of JSON; give the tool `parameters`")


def _read_argument_texts(function: Callable[..., Any]) -> dict[str, str]:
    """The descriptions below `Args:` in a docstring, by parameter. Further lines of one are indented more."""
    parts = _ARGS.split(inspect.getdoc(function) or "", maxsplit=1)
    if len(parts) < 2:
        return {}
    found, name, depth = dict[str, str](), "", None
    for line in _SECTION.split(parts[1])[0].splitlines():
        indent = len(line) - len(line.lstrip())
        depth = indent if depth is None and line.strip() else depth
        match = _ARGUMENT.match(line) if indent == depth else None
        if match:
            name, found[match[1]] = match[1], match[2].strip()
        elif name and line.strip():
            found[name] = f"{found[name]} {line.strip()}".strip()
    return found
