"""The function tools of chat bodies. Chat templates take them as they are, without other services' hints.

If the chat template does not know tools, the system prompt describes them. Earlier calls and their results
become text, unless the template renders those. The system prompt asks for calls in the format that the
model's parser reads, or in JSON if no format is known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxrun.api.text.ignored_fields import CACHE_HINT, log_ignored
from mlxrun.api.text.messages import Message, merge_neighbours
from mlxrun.core.field_errors import check_type, get_required, quote, reject, reject_unsupported

_JSON_FORMAT = ('{"name": "NAME", "arguments": ', "}")
_JSON_CALL = (
    'a JSON object {"name": ..., "arguments": {...}}, or with an array of such objects to call several. '
)
_FAMILY_CALL = "this, with its name for NAME and its arguments as a JSON object for {{...}}:\n{}{{...}}{}\n"
_REST = "The results come in the next message. The functions, one a line:"


def describe_tools_in_prompt(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    call_format: tuple[str, str] | None = None,
    *,
    native: bool = False,
) -> list[Message]:
    """Return the conversation with the tools in its system prompt. `call_format`: the texts before and after
    the arguments of a call of NAME; None: JSON. `native`: the template renders calls and results itself."""
    written = list(messages) if native else _write_all_as_text(messages)
    if not tools:
        return written
    call_format = call_format or _JSON_FORMAT
    how = _JSON_CALL if call_format == _JSON_FORMAT else _FAMILY_CALL.format(*call_format)
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = "\n".join([f"You can call functions. To call one, answer with nothing but {how}{_REST}", *lines])
    if written and written[0]["role"] == "system":
        return [{**written[0], "content": f"{written[0]['content']}\n\n{text}"}, *written[1:]]
    return [{"role": "system", "content": text}, *written]


def _write_all_as_text(messages: Sequence[Message]) -> list[Message]:
    """Messages without calls and results. Results join the user's message with their images, if one follows:
    some templates insist on taking turns."""
    names: dict[str, str] = {}
    written = merge_neighbours([_write_as_text(message, names) for message in messages])
    if not any(message["role"] == "tool" for message in messages):
        return written
    joined: list[Message] = []
    for message in written:
        if (
            joined
            and message["role"] == joined[-1]["role"] == "user"
            and isinstance(message["content"], list)
        ):
            before = joined.pop()["content"]
            parts = [{"type": "text", "text": before}] if isinstance(before, str) else before
            message = {**message, "content": [*parts, *message["content"]]}
        joined.append(message)
    return joined


def _write_as_text(message: Message, names: dict[str, str]) -> Message:
    """The message with its calls or result as text. `names` collects the function of each call id."""
    if message["role"] == "tool":
        name = message.get("name") or names.get(message.get("tool_call_id", ""), "the function")
        return {"role": "user", "content": f"Result of {name}: {message['content']}"}
    if not message.get("tool_calls"):
        return message
    calls = [call["function"] for call in message["tool_calls"]]
    names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"] if "id" in call}
    text = json.dumps(calls[0] if len(calls) == 1 else calls, ensure_ascii=False)
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": f"{message['content']}\n{text}" if message["content"] else text}


_MAX_NAME_LENGTH = 128
TOOL_HINTS = {
    "cache_control": CACHE_HINT,
    "eager_input_streaming": "arguments are streamed as they are generated",
}


def read_offered_tools(given: Mapping[str, Any]) -> list[Message]:
    """Return the tools that the model may call: none if `tool_choice` is "none"."""
    tools = check_tools(given.get("tools", []))
    return tools if given.get("tool_choice") != "none" else []


def check_tools(tools: Any) -> list[dict[str, Any]]:
    """Return the tools of a body without hints. RequestError if one is wrong, or two have one name."""
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
    """Return the name. RequestError if it has white space or control characters, is empty or too long.

    Other characters than OpenAI's are allowed, since clients use them with MCP servers."""
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
