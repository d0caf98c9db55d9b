"""Checks OpenAI chat messages and converts them to what the model's chat template expects.

`developer` becomes `system`. Neighbours of one role merge if both are plain strings. Text-only parts become
one string. Media stay as parts in their order. Arguments of tool calls become objects.
Parts that a template does not render (MessageSupport) are moved to where it does, and ids of calls that it
refuses are replaced. Wrong JSON is a RequestError with its path. Unknown fields of messages, parts and tool
calls have no effect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from mlxrun.api.text.call_ids import fit_call_ids
from mlxrun.api.text.ignored_fields import log_ignored, select_known
from mlxrun.api.text.media.media_kinds import AUDIO, IMAGE, MEDIA, PDF, MediaRef, Medium
from mlxrun.core.field_errors import (
    check_type,
    get_json_type,
    get_required,
    reject,
    reject_choice,
    reject_unsupported,
)
from mlxrun.core.limited_json import load_json, refuse_constant

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_ROLES = ("system", "user", "assistant")  # neighbouring strings of these roles are joined
_IMAGE_ROLES = ("user", "tool")
_REASONING = ("reasoning_content", "reasoning", "thinking")
_FIELDS = {
    "system": ("role", "content"),
    "user": ("role", "content", "name"),
    "assistant": ("role", "content", "name", "tool_calls", *_REASONING),
    "tool": ("role", "content", "name", "tool_call_id"),
}
_UNREAD_CONTENT = ("audio", "function_call")  # accepted while it is empty
_INPUT_AUDIO = "input_audio"  # a part with the bytes of an `audio_url`
_NO_BASE64 = re.compile(r"[^A-Za-z0-9+/=\s]")  # such as the dot of a path or the colon of a URL
_PARTS = ("text", *(medium.part for medium in MEDIA), _INPUT_AUDIO)
_UNSUPPORTED_PARTS = ("image_file", "refusal")


@dataclass(frozen=True, slots=True)
class MessageSupport:
    """What a chat template renders without changes; see template_support.py."""

    late_system: bool = False  # system messages after other messages, in their place
    object_arguments: bool = True  # arguments of tool calls as an object
    text_arguments: bool = False  # and as text
    tool_images: bool = False  # images in tool messages
    any_call_ids: bool = True  # ids of tool calls in any form


@dataclass(frozen=True, slots=True)
class Chat:
    """Messages as chat templates take them. `images`: the media of their parts, in order."""

    messages: list[Message]
    images: tuple[MediaRef, ...] = ()


def normalize_messages(
    messages: Any,
    support: MessageSupport = MessageSupport(),
    *,
    strict: bool = False,
) -> Chat:
    """Convert the messages of a request body. RequestError with a path if one is wrong. `strict`: refuse
    unknown fields too."""
    if not isinstance(messages, list) or not messages:
        found = "an empty array" if isinstance(messages, list) else get_json_type(messages)
        reject("messages", f"expected an array with at least one message, got {found}", code="invalid_type")
    reader = _MessageReader(support, strict)
    read = [reader.read(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not support.any_call_ids:
        fit_call_ids(read)
    if not support.tool_images:
        read = _move_tool_images(read)
    if not support.late_system:
        read = _hoist_system_messages(read)
    return Chat(merge_neighbours(read), tuple(reader.images))


def _hoist_system_messages(messages: list[Message]) -> list[Message]:
    """One system message in front, for templates that know no other."""
    system = "\n\n".join(each["content"] for each in messages if each["role"] == "system")
    rest = [each for each in messages if each["role"] != "system"]
    return [{"role": "system", "content": system}, *rest] if len(rest) < len(messages) else rest


def _move_tool_images(messages: list[Message]) -> list[Message]:
    """Puts images of tool results at the beginning of the user's message that follows the results, which is
    made if there is none."""
    moved: list[Message] = []
    waiting: list[Message] = []
    for message in [*messages, None]:
        if waiting and (message is None or message["role"] != "tool"):
            if message is not None and message["role"] == "user":
                content = message["content"]
                parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
                message = {**message, "content": [*waiting, *parts]}
            else:
                moved.append({"role": "user", "content": waiting})
            waiting = []
        if message is not None and message["role"] == "tool" and not isinstance(message["content"], str):
            waiting += [part for part in message["content"] if part["type"] != "text"]
            texts = [part for part in message["content"] if part["type"] == "text"]
            message = {**message, "content": _join_texts(texts)}
        if message is not None:
            moved.append(message)
    return moved


def merge_neighbours(messages: list[Message]) -> list[Message]:
    """Merge neighbouring messages of one role that are plain text."""
    merged: list[Message] = []
    for _, group in groupby(messages, key=lambda each: each["role"] if _is_plain(each) else id(each)):
        same = list(group)
        text = "\n\n".join(each["content"] for each in same) if len(same) > 1 else same[0]["content"]
        merged.append({**same[-1], "content": text})
    return merged


def _is_plain(message: Message) -> bool:
    only_text = message.keys() == {"role", "content"} and isinstance(message["content"], str)
    return message["role"] in _TEXT_ROLES and only_text


def _join_texts(parts: list[Message]) -> str:
    return "\n".join(part["text"] for part in parts)  # many text templates accept only strings


@dataclass(frozen=True, slots=True)
class _MessageReader:
    """Reads messages one by one, and collects their media."""

    support: MessageSupport
    strict: bool
    images: list[MediaRef] = field(default_factory=list)

    def read(self, value: Any, param: str) -> Message:
        check_type(value, dict, param)
        role = _read_role(value, param)
        message = {key: item for key, item in value.items() if item is not None}
        self._read_refusal(message, role, param)
        for key in (*_UNREAD_CONTENT, *(("annotations",) if self.strict else ())):
            if message.pop(key, None):
                reject_unsupported(f"{param}.{key}", "only null is supported in a message")
        if role == "system" and "name" in message and self.strict:
            reject_unsupported(f"{param}.name", "system messages are merged, so the name would be lost")
        message = self._select(message, _FIELDS[role], param)
        message["role"] = role
        for key in ("name", "tool_call_id", *_REASONING):
            if key in message:
                check_type(message[key], str, f"{param}.{key}")
        if role == "assistant":
            self._read_assistant_fields(message, param)
        if role == "tool" and "tool_call_id" not in message:
            reject(f"{param}.tool_call_id", "missing: the id of the tool call", code="missing_field")
        if "content" not in message:
            reject(f"{param}.content", "missing", code="missing_field")
        message["content"] = self._read_content(message["content"], f"{param}.content", role)
        return message

    def _select(self, value: Mapping[str, Any], known: tuple[str, ...], param: str) -> Message:
        return select_known(value, known, param, strict=self.strict)

    def _read_refusal(self, message: Message, role: str, param: str) -> None:
        """A refusal is the text of an answer, if it has no other."""
        refusal = message.pop("refusal", None)
        if not refusal:
            return
        if self.strict or role != "assistant" or message.get("content"):
            reject_unsupported(f"{param}.refusal", "only null is supported beside a content")
        message["content"] = check_type(refusal, str, f"{param}.refusal")

    def _read_assistant_fields(self, message: Message, param: str) -> None:
        """Converts tool calls for templates; a message with calls or reasoning may have no content."""
        calls = message.pop("tool_calls", None)
        if calls is not None:
            check_type(calls, list, f"{param}.tool_calls")
        if calls:
            message["tool_calls"] = [
                self._read_tool_call(call, f"{param}.tool_calls[{i}]") for i, call in enumerate(calls)
            ]
        if calls or any(key in message for key in _REASONING):
            message.setdefault("content", "")  # templates add it to strings and fail if it is missing

    def _read_tool_call(self, call: Any, param: str) -> Message:
        check_type(call, dict, param)
        known = self._select(call, ("id", "type", "function"), param)
        if known.get("type") not in (None, "function"):
            reject_unsupported(f"{param}.type", "only 'function' tool calls are supported")
        where = f"{param}.function"
        function = check_type(known.get("function"), dict, where)
        function = self._select(function, ("name", "arguments"), where)
        name = check_type(function.get("name"), str, f"{where}.name")
        arguments = self._read_arguments(function.get("arguments"), f"{where}.arguments")
        result: Message = {"type": "function", "function": {"name": name, "arguments": arguments}}
        if known.get("id") is not None:
            result["id"] = check_type(known["id"], str, f"{param}.id")
        return result

    def _read_arguments(self, value: Any, param: str) -> dict[str, Any] | str:
        """The arguments of a call as the object that most templates iterate over; the API has them as JSON
        text. Models write broken JSON too, which stays text: the model sees what it wrote, and can go on."""
        as_text = self.support.text_arguments and not self.support.object_arguments
        if value in (None, ""):
            value = {}
        if not isinstance(value, str):
            arguments: dict[str, Any] = check_type(value, dict, param)
            return json.dumps(arguments, ensure_ascii=False) if as_text else arguments
        try:
            parsed = load_json(value, parse_constant=refuse_constant)
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            return value if as_text else parsed
        log_ignored(param, "arguments that are no JSON object reach the chat template as text")
        return value if self.support.text_arguments else {"arguments": value}

    def _read_content(self, value: Any, param: str, role: str) -> str | list[Message]:
        """A string, or parts if some are images or videos."""
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not value:
            found = "an empty array" if isinstance(value, list) else get_json_type(value)
            reject(param, f"expected a string or an array of parts, got {found}", code="invalid_type")
        parts = [self._read_part(part, f"{param}[{i}]", role) for i, part in enumerate(value)]
        return parts if any(part["type"] != "text" for part in parts) else _join_texts(parts)

    def _read_part(self, part: Any, param: str, role: str) -> Message:
        check_type(part, dict, param)
        part_type = get_required(part, "type", str, param)
        if part_type == "refusal" and role == "assistant" and not self.strict:
            return {"type": "text", "text": check_type(part.get("refusal"), str, f"{param}.refusal")}
        if part_type in _UNSUPPORTED_PARTS:
            reject_unsupported(f"{param}.type", f"{part_type!r} parts; use {', '.join(_PARTS)}")
        if part_type not in _PARTS:
            reject_choice(f"{param}.type", part_type, _PARTS)
        self._select(part, ("type", part_type), param)
        if part_type == "text":
            return {"type": "text", "text": check_type(part.get("text"), str, f"{param}.text")}
        if role not in _IMAGE_ROLES:
            reject(f"{param}.type", "media and files go into messages of the user and of tools only")
        if part_type == _INPUT_AUDIO:
            self.images.append(self._read_input_audio(part.get(part_type), f"{param}.{part_type}"))
            return {"type": AUDIO.template_part}
        medium = next(each for each in MEDIA if each.part == part_type)
        self.images.append(self._read_medium(part.get(part_type), f"{param}.{part_type}", medium))
        return {"type": medium.template_part}

    def _read_input_audio(self, value: Any, param: str) -> MediaRef:
        """The audio of a part in OpenAI's form, as a data URL. Its `format` is not needed to read it."""
        known = self._select(check_type(value, dict, param), ("data", "format"), param)
        data = get_required(known, "data", str, param)
        check_type(known.get("format", "wav"), str, f"{param}.format")
        if not data.startswith("data:") and _NO_BASE64.search(data[:1000]):
            text = "expected the content of the file in base64; the part audio_url is for URLs and paths"
            reject(f"{param}.data", text, code=AUDIO.code)
        url = data if data.startswith("data:") else f"data:audio/wav;base64,{data}"
        return MediaRef(url, f"{param}.data", AUDIO)

    def _read_medium(self, value: Any, param: str, medium: Medium) -> MediaRef:
        check_type(value, dict, param)
        name, *others = medium.fields
        if medium is IMAGE and value.get("detail") not in (None, "auto", "high"):
            if self.strict:
                # The model's processor decides the resolution, so a request for less cannot be honoured.
                reject_unsupported(f"{param}.detail", "images always have full detail; use 'auto' or 'high'")
            others.remove("detail")
        known = self._select(value, (name, *others), param)
        if known.get("file_id") is not None:
            reject_unsupported(f"{param}.file_id", "stored files are not read here; send file_data")
        if medium is PDF:
            return MediaRef(get_required(known, name, str, param), f"{param}.{name}", medium)
        return MediaRef(check_type(value.get(name), str, f"{param}.{name}"), f"{param}.{name}", medium)


def _read_role(message: Message, param: str) -> str:
    role: str = get_required(message, "role", str, param)
    param = f"{param}.role"
    if role == "function":
        reject_unsupported(param, "the role 'function' is deprecated; use 'tool'")
    if role not in ROLES:
        reject_choice(param, role, ROLES)
    return "system" if role == "developer" else role
