"""Checks OpenAI chat messages and converts them to what chat templates expect.

`developer` becomes `system`, all system messages become one at position 0, neighbours of one role merge if
both are plain strings, text-only parts become one string, images stay as parts in the sender's order, and
arguments of tool calls become objects. Any JSON is either normalized or refused with the path of the error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NoReturn

from mlxrun.text.field_errors import (
    check_keys,
    check_type,
    get_json_type,
    get_required,
    reject,
    reject_choice,
    reject_unsupported,
    shorten,
)

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_ROLES = ("system", "user", "assistant")  # neighbouring strings of these roles are joined
_REASONING = ("reasoning_content", "reasoning", "thinking")
_FIELDS = {
    "system": ("role", "content"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "tool_calls", *_REASONING),
    "tool": ("role", "content", "name", "tool_call_id"),
}
# Fields of responses that clients send back: accepted while they are empty.
_EMPTY_ONLY = ("refusal", "audio", "function_call", "annotations")
_PARTS = ("text", "image_url")
_UNSUPPORTED_PARTS = ("input_audio", "file", "refusal", "video_url", "audio_url", "image_file")


@dataclass(frozen=True, slots=True)
class ImageRef:
    """An image of a message: its URL, and the path of the field that holds it."""

    url: str
    param: str


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages in the shape of chat templates, and the images of their `{"type": "image"}` parts in order."""

    messages: list[Message]
    images: tuple[ImageRef, ...] = ()


def normalize_messages(messages: Any, param: str = "messages") -> Chat:
    """The messages of a request body as a Chat. Raises RequestError with the path of what is wrong."""
    if not isinstance(messages, list) or not messages:
        found = "an empty array" if isinstance(messages, list) else get_json_type(messages)
        reject(param, f"expected an array with at least one message, got {found}", code="invalid_type")
    images: list[ImageRef] = []
    read = [_read_message(message, f"{param}[{i}]", images) for i, message in enumerate(messages)]
    return Chat(merge_neighbours(_merge_system_messages(read)), tuple(images))


def _merge_system_messages(messages: list[Message]) -> list[Message]:
    system = "\n\n".join(each["content"] for each in messages if each["role"] == "system")
    rest = [each for each in messages if each["role"] != "system"]
    return [{"role": "system", "content": system}, *rest] if len(rest) < len(messages) else rest


def merge_neighbours(messages: list[Message]) -> list[Message]:
    """Merges neighbouring messages of one role that are plain text."""
    merged: list[Message] = []
    for _, group in groupby(messages, key=lambda each: each["role"] if _is_plain(each) else id(each)):
        same = list(group)
        text = "\n\n".join(each["content"] for each in same) if len(same) > 1 else same[0]["content"]
        merged.append({**same[-1], "content": text})
    return merged


def _is_plain(message: Message) -> bool:
    only_text = message.keys() == {"role", "content"} and isinstance(message["content"], str)
    return message["role"] in _TEXT_ROLES and only_text


def _read_message(value: Any, param: str, images: list[ImageRef]) -> Message:
    check_type(value, dict, param)
    role = _read_role(value, param)
    message = {key: item for key, item in value.items() if item is not None}
    for key in _EMPTY_ONLY:
        if message.pop(key, None):
            reject_unsupported(f"{param}.{key}", "only null is supported in a message")
    if role == "system" and "name" in message:
        reject_unsupported(f"{param}.name", "system messages are merged, so the name would be lost")
    check_keys(message, _FIELDS[role], param)
    message["role"] = role
    for key in ("name", "tool_call_id", *_REASONING):
        if key in message:
            check_type(message[key], str, f"{param}.{key}")
    if role == "assistant":
        _read_assistant_fields(message, param)
    if role == "tool" and "tool_call_id" not in message:
        reject(f"{param}.tool_call_id", "missing: the id of the tool call", code="missing_field")
    if "content" not in message:
        reject(f"{param}.content", "missing", code="missing_field")
    message["content"] = _read_content(
        message["content"], f"{param}.content", images if role == "user" else None
    )
    return message


def _read_role(message: Message, param: str) -> str:
    role: str = get_required(message, "role", str, param)
    param = f"{param}.role"
    if role == "function":
        reject_unsupported(param, "the role 'function' is deprecated; use 'tool'")
    if role not in ROLES:
        reject_choice(param, role, ROLES)
    return "system" if role == "developer" else role


def _read_assistant_fields(message: Message, param: str) -> None:
    """Converts tool calls for templates; a message with calls or reasoning may have no content."""
    calls = message.pop("tool_calls", None)
    if calls is not None:
        check_type(calls, list, f"{param}.tool_calls")
    if calls:
        message["tool_calls"] = [
            _read_tool_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    if calls or any(key in message for key in _REASONING):
        message.setdefault("content", "")  # templates add it to strings and fail if it is missing


def _read_tool_call(call: Any, param: str) -> Message:
    check_type(call, dict, param)
    check_keys(call, ("id", "type", "function"), param)
    if call.get("type") not in (None, "function"):
        reject_unsupported(f"{param}.type", "only 'function' tool calls are supported")
    function = check_type(call.get("function"), dict, f"{param}.function")
    check_keys(function, ("name", "arguments"), f"{param}.function")
    name = check_type(function.get("name"), str, f"{param}.function.name")
    arguments = _read_arguments(function.get("arguments"), f"{param}.function.arguments")
    result: Message = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if call.get("id") is not None:
        result["id"] = check_type(call["id"], str, f"{param}.id")
    return result


def _read_arguments(value: Any, param: str) -> dict[str, Any]:
    """The arguments of a call as the object that templates iterate over; the API has them as JSON text."""
    if value in (None, ""):
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_constant=_reject_constant)
        except (ValueError, RecursionError) as exc:
            reject(param, f"not a JSON object: {shorten(str(exc), 80)}")
    arguments: dict[str, Any] = check_type(value, dict, param)
    return arguments


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _read_content(value: Any, param: str, images: list[ImageRef] | None) -> str | list[Message]:
    """A string, or parts if some are images. `images` collects the images; None: images are refused."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        found = "an empty array" if isinstance(value, list) else get_json_type(value)
        reject(param, f"expected a string or an array of parts, got {found}", code="invalid_type")
    parts = [_read_part(part, f"{param}[{i}]", images) for i, part in enumerate(value)]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)  # many text templates accept only strings
    return parts


def _read_part(part: Any, param: str, images: list[ImageRef] | None) -> Message:
    check_type(part, dict, param)
    part_type = get_required(part, "type", str, param)
    if part_type in _UNSUPPORTED_PARTS:
        reject_unsupported(f"{param}.type", f"{part_type!r} parts; use text and image_url")
    if part_type not in _PARTS:
        reject_choice(f"{param}.type", part_type, _PARTS)
    check_keys(part, ("type", part_type), param)
    if part_type == "text":
        return {"type": "text", "text": check_type(part.get("text"), str, f"{param}.text")}
    if images is None:
        reject(f"{param}.type", "images are supported in user messages only")
    images.append(_read_image(part.get("image_url"), f"{param}.image_url"))
    return {"type": "image"}


def _read_image(value: Any, param: str) -> ImageRef:
    check_type(value, dict, param)
    check_keys(value, ("url", "detail"), param)
    if value.get("detail") not in (None, "auto", "high"):
        # The model's processor decides the resolution, so a request for less cannot be honoured.
        reject_unsupported(f"{param}.detail", "images always have full detail; use 'auto' or 'high'")
    return ImageRef(check_type(value.get("url"), str, f"{param}.url"), f"{param}.url")
