"""The transcript of a line that was answered in several turns, such as by a model with tools.

A record has it as `transcript`, a list of messages as in OpenAI's chat API. Nothing in it is trusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxrun.evals.prompt_messages import PromptMessage, dump_text, list_messages

_REASONING = ("reasoning_content", "reasoning")
_OWN = ("tool_calls", "tool_call_id", "name", *_REASONING)  # what a turn has apart from its content


@dataclass(frozen=True, slots=True)
class TranscriptTurn:
    """One message of a transcript. `calls`: name and arguments of each tool call, as the model wrote them;
    `tool`: the tool whose result the message is, empty for others."""

    message: PromptMessage
    reasoning: str
    calls: list[tuple[str, str]]
    tool: str


def list_turns(transcript: Any) -> list[TranscriptTurn]:
    """List the turns of a transcript; none if it is no list."""
    names: dict[str, str] = {}
    return [_read_turn(item, names) for item in (transcript if isinstance(transcript, list) else [])]


def _read_turn(item: Any, names: dict[str, str]) -> TranscriptTurn:
    """Read a message. `names`: the tools that were called so far, by the id of the call."""
    fields = item if isinstance(item, Mapping) else {"role": "message", "content": item}
    given = fields.get("tool_calls")
    raw = given if isinstance(given, list) else []
    calls = [_read_call(call) for call in raw]
    for call, (name, _) in zip(raw, calls, strict=True):
        if isinstance(call, Mapping):
            names[str(call.get("id"))] = name
    rest = {key: value for key, value in fields.items() if key not in _OWN}
    (message,) = list_messages({"messages": [{"content": None, **rest}]})
    reasoning = next((text for key in _REASONING if isinstance(text := fields.get(key), str) and text), "")
    tool = fields.get("name") or names.get(str(fields.get("tool_call_id")), "")
    return TranscriptTurn(message, reasoning, calls, str(tool) if message.role == "tool" else "")


def _read_call(call: Any) -> tuple[str, str]:
    """Name and arguments of a tool call; a call of another form is all arguments."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        return "", dump_text(call)
    return dump_text(function["name"]), dump_text(function.get("arguments", ""))
