"""Anthropic's messages as those of /v1/chat/completions, so that one conversation has one prompt.

Results of tools become `tool` messages; images among them begin the user message that follows, as only
users' messages take images. Thoughts become `reasoning_content`; redacted ones cannot be read and are left
out. What is wrong is a RequestError with the path in the Anthropic body, written `messages[0].content`.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrun.api.anthropic.error_paths import ErrorPaths
from mlxrun.api.anthropic.fields import (
    ALLOWED,
    BLOCKS,
    DOCUMENTS,
    MESSAGE,
    OUTPUT,
    REFUSED_BLOCKS,
    REFUSED_DOCUMENTS,
    SOURCES,
    TRANSFORMATIONS,
    check_tagged,
    check_fields,
)
from mlxrun.api.opaque_reasoning import decode_reasoning
from mlxrun.text.field_errors import get_json_type, reject, reject_unsupported, shorten

logger = logging.getLogger(__name__)

Json = dict[str, Any]

# As Claude Code begins its system prompt; `cch` in it is another one in each request.
_BILLING = re.compile(r"\s*x-anthropic-billing-header:[^\n]*(?:\n\s*|\Z)", re.IGNORECASE)
_PLACES = {"tool_result": "tool results", "document": "documents", "search_result": "search results"}


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of a chat message; `path` is the block that it was, `value` its text or its image's data."""

    body: Json
    path: str
    value: str


class ChatMessagesBuilder:
    """Collects the messages of a chat. `trail` learns where each comes from.

    `whole`: they are to be answered, so calls need their results. The user speaks last, or the assistant with
    the beginning of the answer: see `begun`.
    """

    def __init__(self, trail: ErrorPaths, *, strip_billing: bool, whole: bool) -> None:
        self.messages: list[Json] = []
        self._paths = trail.paths
        self._strip = strip_billing
        self._whole = whole
        self._open: dict[str, str] = {}  # calls that have no result yet, and where they are
        self._last = "user"  # who spoke last, the system aside
        self.begun = False  # whether the answer goes on from the last message

    def add(self, messages: Sequence[Any]) -> None:
        """All messages of a body."""
        read = [check_tagged(m, f"messages[{i}]", MESSAGE, tag="role") for i, m in enumerate(messages)]
        last_user = max((i for i, (role, _) in enumerate(read) if role == "user"), default=-1)
        for i, (role, given) in enumerate(read):
            where = f"messages[{i}]"
            if role == "system":
                check_fields(given.get("output_config", {}), f"{where}.output_config", OUTPUT)
                if given.get("clear_at") == "next_user_message" and i < last_user:
                    continue
                self.system(given.get("content", ""), f"{where}.content")
                continue
            if role == "user":
                self._user(given["content"], where)
            else:
                self._assistant(given["content"], where)
            self._last = role
        if read and read[-1][0] == "assistant":
            self._begin(f"messages[{len(read) - 1}].content", read[-1][1]["content"])
        elif self._whole and self._last == "assistant":
            reject_unsupported("messages", "a system message behind the assistant's; the user speaks last")
        self._check_results()

    def system(self, content: Any, where: str) -> None:
        """A system message. A billing line at the beginning of the first one is left out."""
        parts = _parts(content, where, "system")
        if self._strip and parts and not self.messages:
            parts = _without_billing(parts)
        if parts:
            self._add({"role": "system"}, where, parts)

    def _user(self, content: Any, where: str) -> None:
        if isinstance(content, str):
            self._add({"role": "user", "content": content}, where)
            return
        images: list[PromptPart] = []
        said: list[PromptPart] = []
        for of, block, path in _blocks(content, f"{where}.content", "user"):
            if of != "tool_result":
                said.append(_part(of, block, path))
            elif said:
                reject(path, "`tool_result` blocks come first in a message, all others after them")
            else:
                images += self._result(block, path)
        if images or said:
            self._add({"role": "user"}, where, [*images, *said])

    def _result(self, block: Json, path: str) -> list[PromptPart]:
        """Adds the result of a call; gives its images."""
        called = block["tool_use_id"]
        if self._open.pop(called, None) is None and self._whole:
            text = "unexpected: each `tool_result` needs a `tool_use` block of this id in the message before"
            reject(f"{path}.tool_use_id", text)
        parts = _parts(block.get("content", ""), f"{path}.content", "tool_result")
        texts = [part for part in parts if "text" in part.body]
        if block.get("is_error"):
            texts = _failed(texts, path)
        self._add({"role": "tool", "tool_call_id": called, "content": ""}, path, texts)
        return [part for part in parts if "text" not in part.body]

    def _assistant(self, content: Any, where: str) -> None:
        if self._last != "assistant":
            self._check_results()
        if isinstance(content, str):
            self._add({"role": "assistant", "content": content}, where)
            return
        at = f"messages[{len(self.messages)}]"
        text = thought = ""  # the answer was one text and one thought; calls cut it into blocks
        calls: list[Json] = []
        for of, block, path in _blocks(content, f"{where}.content", "assistant"):
            if of == "text":
                text += block["text"]
            elif of == "thinking":
                thought += block["thinking"] or decode_reasoning(block["signature"]) or ""
            elif of == "tool_use":
                call = f"{at}.tool_calls[{len(calls)}]"
                self._paths |= {call: path, f"{call}.function": path}
                self._paths[f"{call}.function.arguments"] = f"{path}.input"
                self._open[block["id"]] = path
                calls.append(_call(block))
        self._paths[f"{at}.reasoning_content"] = f"{where}.content"
        message: Json = {"role": "assistant", "content": text}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        self._add(message, where)

    def _add(self, message: Json, where: str, parts: Sequence[PromptPart] = ()) -> None:
        at = f"messages[{len(self.messages)}]"
        self._paths[at] = where
        for i, part in enumerate(parts):
            self._paths[f"{at}.content[{i}]"] = part.path
            value = "text" if "text" in part.body else "image_url.url"
            self._paths[f"{at}.content[{i}].{value}"] = part.value
        if parts:
            message["content"] = [part.body for part in parts]
        self.messages.append(message)

    def _begin(self, where: str, content: Any) -> None:
        """The last message is the assistant's: what it says is how the answer begins. Where tokens are only
        counted it may as well be a turn that is over."""
        blocks = [] if isinstance(content, str) else content
        other = next((block["type"] for block in blocks if block["type"] != "text"), None)
        if other is not None:
            if self._whole:
                self._check_results()
                reject_unsupported(where, f"an answer can be begun with text, and here is a {other!r} block")
            return
        if not self.messages[-1]["content"]:
            self.messages.pop()  # which begins nothing; what the assistant said before it may
        last = self.messages[-1] if self.messages else {}
        if last.get("role") == "assistant" and last.keys() == {"role", "content"}:
            self.begun = last["content"] == last["content"].rstrip()
            if self._whole and not self.begun:
                where = f"{self._paths[f'messages[{len(self.messages) - 1}]']}.content"
                reject(where, "the final assistant content cannot end with trailing whitespace")

    def _check_results(self) -> None:
        if self._whole and self._open:
            path = next(iter(self._open.values()))
            ids = shorten(", ".join(self._open))
            reject(path, f"`tool_use` ids without `tool_result` blocks in the next message: {ids}")


def _blocks(content: Any, where: str, within: str) -> list[tuple[str, Json, str]]:
    """Type, fields and path of each block, checked."""
    if not isinstance(content, list):
        reject(where, f"expected string or array, got {get_json_type(content)}", code="invalid_type")
    if not content and within == "user":
        reject(where, "is empty; give at least one block")
    taken = {name: BLOCKS[name] for name in ALLOWED[within]}
    elsewhere = f"not in {_PLACES.get(within, f'messages of the {within}')}"
    refused = REFUSED_BLOCKS | dict.fromkeys(BLOCKS.keys() - taken.keys(), elsewhere)
    paths = [f"{where}[{i}]" for i in range(len(content))]
    return [(*check_tagged(block, path, taken, refused), path) for block, path in zip(content, paths, strict=True)]


def _parts(content: Any, where: str, within: str) -> list[PromptPart]:
    """A string, or blocks of text and images."""
    if isinstance(content, str):
        return [_text(content, where, where)] if content else []
    return [_part(of, block, path) for of, block, path in _blocks(content, where, within)]


def _part(of: str, block: Json, path: str) -> PromptPart:
    if of == "text":
        return _text(block["text"], path, f"{path}.text")
    if of in ("document", "search_result"):
        return _text(_document(block, path) if of == "document" else _found(block, path), path, path)
    source, given = check_tagged(block["source"], f"{path}.source", SOURCES, {"file": "send it as base64"})
    check_fields(block.get("transformations", {}), f"{path}.transformations", TRANSFORMATIONS)
    if source == "url":
        return PromptPart({"type": "image_url", "image_url": given}, path, f"{path}.source.url")
    url = f"data:{given['media_type']};base64,{given['data']}"
    return PromptPart({"type": "image_url", "image_url": {"url": url}}, path, f"{path}.source.data")


def _document(block: Json, path: str) -> str:
    """A document as the model reads it."""
    of, source = check_tagged(block["source"], f"{path}.source", DOCUMENTS, REFUSED_DOCUMENTS)
    text = source["data"] if of == "text" else _texts(source["content"], f"{path}.source.content", "document")
    return _tagged("document", {name: block.get(name) for name in ("title", "context")}, text)


def _found(block: Json, path: str) -> str:
    """A search result as the model reads it."""
    text = _texts(block["content"], f"{path}.content", "search_result")
    return _tagged("search_result", {name: block[name] for name in ("title", "source")}, text)


def _texts(content: Any, where: str, within: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block["text"] for _, block, _ in _blocks(content, where, within))


def _tagged(name: str, facts: Mapping[str, str | None], text: str) -> str:
    """A text between tags, what is known of it before it; nothing is escaped."""
    lines = [f"<{key}>{value}</{key}>" for key, value in facts.items() if value]
    return "\n".join([f"<{name}>", *lines, "<content>", text, "</content>", f"</{name}>"])


def _text(text: str, path: str, value: str) -> PromptPart:
    return PromptPart({"type": "text", "text": text}, path, value)


def _call(block: Json) -> Json:
    function = {"name": block["name"], "arguments": block["input"]}
    return {"id": block["id"], "type": "function", "function": function}


def _failed(texts: list[PromptPart], path: str) -> list[PromptPart]:
    """The result of a call that failed: templates have no mark for that, so the text has to say it."""
    if not texts:
        return [_text("Error", path, path)]
    first = texts[0]
    if "error" in first.body["text"][:40].lower():
        return texts
    return [
        PromptPart({"type": "text", "text": f"Error: {first.body['text']}"}, first.path, first.value),
        *texts[1:],
    ]


def _without_billing(parts: list[PromptPart]) -> list[PromptPart]:
    first = parts[0]
    found = _BILLING.match(first.body["text"])
    if found is None:
        return parts
    _say_stripped()
    rest = first.body["text"][found.end() :]
    return [*([_text(rest, first.path, first.value)] if rest else []), *parts[1:]]


@functools.cache
def _say_stripped() -> None:
    """Cached, so that it is said once."""
    logger.info(
        "left x-anthropic-billing-header out of a system prompt: it differs in each request, and no prefix "
        "would be found again (server.strip_billing_header)"
    )
