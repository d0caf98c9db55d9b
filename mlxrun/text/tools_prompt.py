"""Tools for models whose chat template knows none: the system prompt tells of them, and calls and results of
earlier turns are written out, unless the template shows those. A call is answered in the form that the
model's parser reads: JSON, where nothing else is known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mlxrun.text.messages import Message, merge

_JSON = ('{"name": "NAME", "arguments": ', "}")
_HOW = (
    'a JSON object {"name": ..., "arguments": {...}}, or with an array of such objects to call several. '
    "The results come in the next message. The functions, one a line:"
)


def told(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    frame: tuple[str, str] | None = None,
    *,
    native: bool = False,
) -> list[Message]:
    """The conversation with the tools told of. `frame`: what stands before and after the arguments of a call
    of NAME; None: JSON. `native`: the template shows calls and results itself."""
    names: dict[str, str] = {}
    turns = list(messages) if native else merge([_written(message, names) for message in messages])
    return _introduced(turns, tools, frame or _JSON) if tools else turns


def _introduced(
    turns: list[Message], tools: Sequence[Mapping[str, Any]], frame: tuple[str, str]
) -> list[Message]:
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    text = "\n".join([f"You can call functions. To call one, answer with nothing but {_how(frame)}", *lines])
    if turns and turns[0]["role"] == "system":
        return [{**turns[0], "content": f"{turns[0]['content']}\n\n{text}"}, *turns[1:]]
    return [{"role": "system", "content": text}, *turns]


def _how(frame: tuple[str, str]) -> str:
    if frame == _JSON:
        return _HOW
    return (
        "this, with its name for NAME and its arguments as a JSON object for {...}:\n"
        f"{frame[0]}{{...}}{frame[1]}\nThe results come in the next message. The functions, one a line:"
    )


def _written(message: Message, names: dict[str, str]) -> Message:
    """The message in words; `names`: which function each call id was of, as far as is known."""
    if message["role"] == "tool":
        name = message.get("name") or names.get(message.get("tool_call_id", ""), "the function")
        return {"role": "user", "content": f"Result of {name}: {message['content']}"}
    if not message.get("tool_calls"):
        return message
    calls = [call["function"] for call in message["tool_calls"]]
    names |= {call["id"]: call["function"]["name"] for call in message["tool_calls"] if "id" in call}
    made = json.dumps(calls[0] if len(calls) == 1 else calls, ensure_ascii=False)
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**kept, "content": f"{message['content']}\n{made}" if message["content"] else made}
