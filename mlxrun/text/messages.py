"""Chat messages of the OpenAI shape, checked and brought into the form that chat templates expect.

developer becomes system, all system messages become one at position 0, neighbours of one role merge if both
are plain strings, text-only parts become one string, images stay as parts in the sender's order, and the
arguments of tool calls become objects. Any JSON is either normalised or refused with the path of what is
wrong.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NoReturn

from mlxrun.text.field_errors import bad, kind, known_keys, need, quote, shorten, suggest, unsupported

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_ROLES = ("system", "user", "assistant")  # roles whose neighbouring strings may be joined
_REASONING = ("reasoning_content", "reasoning", "thinking")
_FIELDS = {
    "system": ("role", "content"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "tool_calls", *_REASONING),
    "tool": ("role", "content", "name", "tool_call_id"),
}
# What responses of the API carry and clients send back: fine as long as it is empty.
_EMPTY_ONLY = ("refusal", "audio", "function_call", "annotations")
_PARTS = ("text", "image_url")
_PARTS_LATER = ("input_audio", "file", "refusal", "video_url", "audio_url", "image_file")


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image that a message asks for: where it is, and which field says so."""

    url: str
    param: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages as a template takes them, and the images of their `{"type": "image"}` parts in order."""

    messages: list[Message]
    images: tuple[ImageRef, ...] = ()


def normalise(messages: Any, param: str = "messages") -> Chat:
    """The messages of a request body as a Chat; RequestError says what is wrong and where."""
    if not isinstance(messages, list) or not messages:
        found = "an empty array" if isinstance(messages, list) else kind(messages)
        raise bad(param, f"expected an array with at least one message, got {found}", code="invalid_type")
    images: list[ImageRef] = []
    turns = [_message(message, f"{param}[{i}]", images) for i, message in enumerate(messages)]
    return Chat(merge(_hoist(turns)), tuple(images))


def _hoist(turns: list[Message]) -> list[Message]:
    system = "\n\n".join(turn["content"] for turn in turns if turn["role"] == "system")
    rest = [turn for turn in turns if turn["role"] != "system"]
    return [{"role": "system", "content": system}, *rest] if len(rest) < len(turns) else rest


def merge(turns: list[Message]) -> list[Message]:
    """Neighbours of one role as one, where they are plain text."""
    merged: list[Message] = []
    for _, group in groupby(turns, key=lambda turn: turn["role"] if _plain(turn) else id(turn)):
        same = list(group)
        text = "\n\n".join(turn["content"] for turn in same) if len(same) > 1 else same[0]["content"]
        merged.append({**same[-1], "content": text})
    return merged


def _plain(turn: Message) -> bool:
    return (
        turn["role"] in _TEXT_ROLES
        and turn.keys() == {"role", "content"}
        and isinstance(turn["content"], str)
    )


def _message(value: Any, param: str, images: list[ImageRef]) -> Message:
    need(value, dict, param)
    role = _role(value.get("role"), f"{param}.role")
    message = {key: item for key, item in value.items() if item is not None}
    for key in _EMPTY_ONLY:
        if message.pop(key, None):
            raise unsupported(f"{param}.{key}", "only null is taken in a message")
    if role == "system" and "name" in message:
        raise unsupported(f"{param}.name", "system messages become one, so a name would be lost")
    known_keys(message, _FIELDS[role], param)
    message["role"] = role
    for key in ("name", "tool_call_id", *_REASONING):
        if key in message:
            need(message[key], str, f"{param}.{key}")
    if role == "assistant":
        _assistant(message, param)
    if role == "tool" and "tool_call_id" not in message:
        raise bad(f"{param}.tool_call_id", "missing: which call is this the result of?", code="missing_field")
    if "content" not in message:
        raise bad(f"{param}.content", "missing", code="missing_field")
    message["content"] = _content(message["content"], f"{param}.content", images if role == "user" else None)
    return message


def _role(role: Any, param: str) -> str:
    if role is None:
        raise bad(param, "missing", code="missing_field")
    need(role, str, param)
    if role == "function":
        raise unsupported(param, "the role 'function' is deprecated; use 'tool'")
    if role not in ROLES:
        raise bad(param, f"{quote(role)} is not one of {', '.join(ROLES)}{suggest(role, ROLES)}")
    return "system" if role == "developer" else role


def _assistant(message: Message, param: str) -> None:
    """Makes tool calls what templates take; an answer with calls, or reasoning alone, may have no content."""
    calls = message.pop("tool_calls", None)
    if calls is not None:
        need(calls, list, f"{param}.tool_calls")
    if calls:
        message["tool_calls"] = [_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(calls)]
    if calls or any(key in message for key in _REASONING):
        message.setdefault(
            "content", ""
        )  # templates add it to strings; a missing one would be an error there


def _call(call: Any, param: str) -> Message:
    need(call, dict, param)
    known_keys(call, ("id", "type", "function"), param)
    if call.get("type") not in (None, "function"):
        raise unsupported(f"{param}.type", "only 'function' tool calls are taken")
    function = need(call.get("function"), dict, f"{param}.function")
    known_keys(function, ("name", "arguments"), f"{param}.function")
    name = need(function.get("name"), str, f"{param}.function.name")
    arguments = _arguments(function.get("arguments"), f"{param}.function.arguments")
    result: Message = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        result["id"] = need(call["id"], str, f"{param}.id")
    return result


def _arguments(value: Any, param: str) -> dict[str, Any]:
    """Templates iterate over arguments, the API carries them as JSON text; an empty text is no arguments."""
    if value in (None, ""):
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_constant=_no_constant)
        except (ValueError, RecursionError) as exc:
            raise bad(param, f"not a JSON object: {shorten(str(exc), 80)}") from exc
    arguments: dict[str, Any] = need(value, dict, param)
    return arguments


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _content(value: Any, param: str, images: list[ImageRef] | None) -> str | list[Message]:
    """A string, or parts if there are images among them; `images` collects them, None refuses them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        found = "an empty array" if isinstance(value, list) else kind(value)
        raise bad(param, f"expected a string or an array of parts, got {found}", code="invalid_type")
    parts = [_part(part, f"{param}[{i}]", images) for i, part in enumerate(value)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)  # many text templates take strings only
    return parts


def _part(part: Any, param: str, images: list[ImageRef] | None) -> Message:
    need(part, dict, param)
    kind_of = part.get("type")
    if kind_of is None:
        raise bad(f"{param}.type", "missing", code="missing_field")
    need(kind_of, str, f"{param}.type")
    if kind_of in _PARTS_LATER:
        raise unsupported(f"{param}.type", f"{kind_of!r} parts; text and image_url are taken")
    if kind_of not in _PARTS:
        raise bad(
            f"{param}.type", f"{quote(kind_of)} is not one of {', '.join(_PARTS)}{suggest(kind_of, _PARTS)}"
        )
    known_keys(part, ("type", kind_of), param)
    if kind_of == "text":
        return {"type": "text", "text": need(part.get("text"), str, f"{param}.text")}
    if images is None:
        raise bad(f"{param}.type", "images are taken in user messages only")
    images.append(_image(part.get("image_url"), f"{param}.image_url"))
    return {"type": "image"}


def _image(value: Any, param: str) -> ImageRef:
    need(value, dict, param)
    known_keys(value, ("url", "detail"), param)
    if value.get("detail") not in (None, "auto", "high"):
        # The model's processor decides the resolution, so only a request for less cannot be met.
        raise unsupported(f"{param}.detail", "images are always seen in full; use 'auto' or 'high'")
    return ImageRef(need(value.get("url"), str, f"{param}.url"), f"{param}.url")
