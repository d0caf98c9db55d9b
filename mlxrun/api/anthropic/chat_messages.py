"""Translates Anthropic's messages to chat messages, so that a conversation has one prompt on all surfaces.

Tool results become `tool` messages with their images. Thinking becomes `reasoning_content`. Redacted thinking
cannot be read, and is dropped. A RequestError names a path of Anthropic's body, such as
`messages[0].content`.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrun.api.anthropic.tool_use_ids import decode_tool_use_id
from mlxrun.api.opaque_reasoning import decode_reasoning
from mlxrun.core.field_errors import reject, reject_unsupported, shorten

Json = dict[str, Any]

_DATA_FIELDS = {  # of parts
    "text": "text",
    "image_url": "image_url.url",
    "video_url": "video_url.url",
    "file": "file.file_data",
}
logger = logging.getLogger(__name__)

_BILLING = re.compile(r"\s*x-anthropic-billing-header:[^\n]*(?:\n\s*|\Z)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of a chat message. `path`: of Anthropic's block; `value_path`: of the field with its content."""

    body: Json
    path: str
    value_path: str

    @classmethod
    def from_text(cls, text: str, path: str, value_path: str = "") -> PromptPart:
        return cls({"type": "text", "text": text}, path, value_path or path)

    def with_text(self, text: str) -> PromptPart:
        return PromptPart.from_text(text, self.path, self.value_path)

    @property
    def text(self) -> str | None:
        """The text; None for an image, a video or a PDF."""
        return self.body.get("text")


class ChatMessagesBuilder:
    """Collects chat messages. `sources`: filled with the path in Anthropic's body of each path in them.

    `complete`: the messages will be answered, so each call needs a result. `continued` is set if the last
    message is the assistant's, and the answer continues its text.
    """

    def __init__(self, sources: dict[str, str], *, complete: bool, strip_billing: bool = True) -> None:
        self.messages: list[Json] = []
        self.continued = False
        self._sources = sources
        self._strip_billing = strip_billing
        self._complete = complete
        self._open_calls: dict[str, str] = {}  # paths of calls without a result, by id
        self._last_role = "user"  # of the last message that is not the system's

    def add_messages(self, messages: Sequence[Any]) -> None:
        """Add all messages of a checked body. RequestError if they cannot follow each other."""
        last_user = max((i for i, given in enumerate(messages) if given["role"] == "user"), default=-1)
        for i, given in enumerate(messages):
            where, role = f"messages[{i}]", given["role"]
            if role == "system":
                if given.get("clear_at") != "next_user_message" or i >= last_user:
                    self.add_system(given.get("content", ""), f"{where}.content")
                continue
            add = self._add_user if role == "user" else self._add_assistant
            add(given["content"], where)
            self._last_role = role
        if messages[-1]["role"] == "assistant":
            self._continue_last(f"messages[{len(messages) - 1}].content", messages[-1]["content"])
        elif self._complete and self._last_role == "assistant":
            reject_unsupported("messages", "a system message after the assistant's; the user must speak last")
        self._check_results()

    def add_system(self, content: Any, where: str) -> None:
        """Add a system message. Claude Code's billing line at the beginning of the first one is left out."""
        parts = _read_parts(content, where)
        if self._strip_billing and parts and not self.messages:
            parts = _strip_billing_line(parts)
        if parts:
            self._add({"role": "system"}, where, parts)

    def _add_user(self, content: Any, where: str) -> None:
        if isinstance(content, str):
            self._add({"role": "user", "content": content}, where)
            return
        if not content:
            reject(f"{where}.content", "is empty; give at least one block")
        parts: list[PromptPart] = []
        for i, block in enumerate(content):
            path = f"{where}.content[{i}]"
            if block["type"] != "tool_result":
                parts += _read_part(block, path)
            elif parts:
                reject(path, "`tool_result` blocks must come first in a message")
            else:
                self._add_result(block, path)
        if parts:
            self._add({"role": "user"}, where, parts)

    def _add_result(self, block: Json, path: str) -> None:
        call_id = block["tool_use_id"]
        if self._open_calls.pop(call_id, None) is None and self._complete:
            text = "unexpected: each `tool_result` needs a `tool_use` block of this id in the message before"
            reject(f"{path}.tool_use_id", text)
        parts = _read_parts(block.get("content", ""), f"{path}.content")
        if block.get("is_error"):
            parts = _mark_failed(parts, path)
        message = {"role": "tool", "tool_call_id": decode_tool_use_id(call_id), "content": ""}
        self._add(message, path, parts)

    def _add_assistant(self, content: Any, where: str) -> None:
        if self._last_role != "assistant":
            self._check_results()
        if isinstance(content, str):
            self._add({"role": "assistant", "content": content}, where)
            return
        target = f"messages[{len(self.messages)}]"
        text = reasoning = ""  # blocks of one answer: tool calls split its text
        calls: list[Json] = []
        for i, block in enumerate(content):
            path, kind = f"{where}.content[{i}]", block["type"]
            if kind == "text":
                text += block["text"]
            elif kind == "thinking":
                reasoning += block["thinking"] or decode_reasoning(block["signature"]) or ""
            elif kind == "tool_use":
                call = f"{target}.tool_calls[{len(calls)}]"
                self._sources |= {call: path, f"{call}.function": path}
                self._sources[f"{call}.function.arguments"] = f"{path}.input"
                self._open_calls[block["id"]] = path
                function = {"name": block["name"], "arguments": block["input"]}
                call_id = decode_tool_use_id(block["id"])
                calls.append({"id": call_id, "type": "function", "function": function})
        self._sources[f"{target}.reasoning_content"] = f"{where}.content"
        message: Json = {"role": "assistant", "content": text}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        self._add(message, where)

    def _add(self, message: Json, where: str, parts: Sequence[PromptPart] = ()) -> None:
        target = f"messages[{len(self.messages)}]"
        self._sources[target] = where
        for i, part in enumerate(parts):
            self._sources[f"{target}.content[{i}]"] = part.path
            field = _DATA_FIELDS[part.body["type"]]
            self._sources[f"{target}.content[{i}].{field}"] = part.value_path
        if parts:
            message["content"] = [part.body for part in parts]
        self.messages.append(message)

    def _continue_last(self, where: str, content: Any) -> None:
        """Checks whether the answer can continue the last message, which is the assistant's. If tokens are
        only counted, the message may also be complete."""
        blocks = [] if isinstance(content, str) else content
        other = next((block["type"] for block in blocks if block["type"] != "text"), None)
        if other is not None:
            if self._complete:
                self._check_results()
                reject_unsupported(where, f"an answer can continue text, not a {other!r} block")
            return
        if not self.messages[-1]["content"]:
            self.messages.pop()  # an empty message; the answer may continue the assistant's message before
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and last.keys() == {"role", "content"}:
            self.continued = last["content"] == last["content"].rstrip()
            if self._complete and not self.continued:
                where = f"{self._sources[f'messages[{len(self.messages) - 1}]']}.content"
                reject(where, "the final assistant content cannot end with trailing whitespace")

    def _check_results(self) -> None:
        if self._complete and self._open_calls:
            path = next(iter(self._open_calls.values()))
            ids = shorten(", ".join(self._open_calls))
            reject(path, f"`tool_use` ids without `tool_result` blocks in the next message: {ids}")


def _read_parts(content: str | list[Json], where: str) -> list[PromptPart]:
    """A string, or blocks of text, images, documents and videos."""
    if isinstance(content, str):
        return [PromptPart.from_text(content, where)] if content else []
    return [part for i, block in enumerate(content) for part in _read_part(block, f"{where}[{i}]")]


def _read_part(block: Json, path: str) -> list[PromptPart]:
    kind = block["type"]
    if kind == "text":
        return [PromptPart.from_text(block["text"], path, f"{path}.text")]
    if kind == "document":
        return _read_document(block, path)
    if kind == "search_result":
        text = _join_texts(block["content"])
        return [PromptPart.from_text(_write_tags(kind, block, ("title", "source"), text), path)]
    url, field = _read_url(block["source"])
    name = f"{kind}_url"
    return [PromptPart({"type": name, name: {"url": url}}, path, f"{path}.source.{field}")]


def _read_url(source: Json) -> tuple[str, str]:
    """The URL of a source, and the field it comes from."""
    if source["type"] == "url":
        return source["url"], "url"
    return f"data:{source['media_type']};base64,{source['data']}", "data"


def _read_document(block: Json, path: str) -> list[PromptPart]:
    source = block["source"]
    if source["type"] in ("base64", "url"):
        url, field = _read_url(source)
        file = PromptPart({"type": "file", "file": {"file_data": url}}, path, f"{path}.source.{field}")
        if not block.get("title") and not block.get("context"):
            return [file]
        tail = "\n</content>\n</document>"
        head = _write_tags("document", block, ("title", "context"), "").removesuffix(tail)
        return [PromptPart.from_text(head, path), file, PromptPart.from_text(tail, path)]
    text = source["data"] if source["type"] == "text" else _join_texts(source["content"])
    return [PromptPart.from_text(_write_tags("document", block, ("title", "context"), text), path)]


def _join_texts(content: str | list[Json]) -> str:
    return content if isinstance(content, str) else "\n".join(block["text"] for block in content)


def _write_tags(name: str, block: Mapping[str, Any], keys: Sequence[str], text: str) -> str:
    """A text as the model reads it: between tags, after the fields that are set; nothing is escaped."""
    lines = [f"<{key}>{block[key]}</{key}>" for key in keys if block.get(key)]
    return "\n".join([f"<{name}>", *lines, "<content>", text, "</content>", f"</{name}>"])


def _mark_failed(parts: list[PromptPart], path: str) -> list[PromptPart]:
    """Writes into the result of a failed call that it failed, as templates have no mark for that."""
    first = next((i for i, part in enumerate(parts) if part.text is not None), None)
    if first is None:
        return [PromptPart.from_text("Error", path), *parts]
    text = parts[first].body["text"]
    failed = "error" in text[:40].lower()
    marked = parts[first] if failed else parts[first].with_text(f"Error: {text}")
    return [*parts[:first], marked, *parts[first + 1 :]]


def _strip_billing_line(parts: list[PromptPart]) -> list[PromptPart]:
    text = parts[0].body["text"]
    rest = strip_billing_header(text)
    if rest == text:
        return parts
    return [parts[0].with_text(rest), *parts[1:]] if rest else parts[1:]


def strip_billing_header(text: str) -> str:
    """Return the text without an `x-anthropic-billing-header` line at its beginning."""
    found = _BILLING.match(text)
    if found is None:
        return text
    _log_stripped()
    return text[found.end() :]


@functools.cache
def _log_stripped() -> None:
    """Cached, so that it is logged once."""
    logger.info(
        "removed x-anthropic-billing-header from a system prompt: it differs in each request, so the prefix "
        "cache would never match (server.strip_billing_header)"
    )
