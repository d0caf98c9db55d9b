"""Describes tools in the system prompt, for models whose chat template does not know tools.

Earlier calls and their results are written as text, unless the template renders those. The model is asked to
call a function in the format that its parser reads, or as JSON if no format is known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxrun.api.text.messages import Message, merge_neighbours

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
    """The conversation with the tools in its system prompt. `call_format`: the text before and after the
    arguments of a call of NAME; None: JSON. `native`: the template renders calls and results itself."""
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
