"""Translates input items of the Responses API to chat messages, and chooses which items a prompt has.

The items of one assistant turn (reasoning, text, calls) become one message. The texts of a message are joined
without separators.

With `truncation: auto`, a prompt that does not fit loses items from the beginning, as OpenAI documents it. It
loses as few turns as necessary, so the rest begins with a user's message. If the last turn alone does not
fit, it loses its oldest steps, and the user's message stays. A step is an assistant's items and the outputs
of its calls. Instructions, system and developer messages always stay. Stored items do not change.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from mlxrun.api.responses.input_items import InputItem, Item
from mlxrun.api.responses.tools import make_visible_name
from mlxrun.core.field_errors import reject_unsupported

_MEDIA = ("input_image", "input_file", "input_audio")


class ChatMessagesTranslator:
    """Collects chat messages. `sources`: the path in the client's body of each path in them."""

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[dict[str, Any]] = []
        self.sources: dict[str, str] = {}
        self._in_turn = False  # the last message is the assistant's, and its turn may go on
        if instructions:
            self.sources["messages[0].content"] = "instructions"
            self._add({"role": "system", "content": instructions}, "instructions")

    def add_items(self, items: Sequence[InputItem]) -> None:
        for each in items:
            item, param = each.item, each.param
            kind = item["type"]
            if kind == "reasoning":
                self._add_reasoning(item, param)
            elif kind in ("function_call", "custom_tool_call"):
                self._add_call(item, param)
            elif kind == "message" and item["role"] == "assistant":
                text = _join_texts(item["content"], f"{param}.content")
                self._get_message_for("content", param, ("tool_calls",))["content"] = text
            elif kind == "message":
                content = self._read_content(item["content"], f"{param}.content")
                self._add({"role": item["role"], "content": content}, param)
            else:
                self.sources[f"messages[{len(self.messages)}].content"] = f"{param}.output"
                output = item["output"]
                if not isinstance(output, str):
                    output = self._read_content(output, f"{param}.output")
                self._add({"role": "tool", "tool_call_id": item["call_id"], "content": output}, param)

    def _add(self, message: dict[str, Any], param: str) -> None:
        self.sources[f"messages[{len(self.messages)}]"] = param
        self.messages.append(message)
        self._in_turn = message["role"] == "assistant"

    def _get_message_for(self, key: str, param: str, later: tuple[str, ...]) -> dict[str, Any]:
        """The turn's message if it has neither the field `key` nor a `later` one, else a new message."""
        if not self._in_turn or any(each in self.messages[-1] for each in (key, *later)):
            self._add({"role": "assistant"}, param)
        self.sources[f"messages[{len(self.messages) - 1}].{key}"] = f"{param}.content"
        return self.messages[-1]

    def _add_reasoning(self, item: Item, param: str) -> None:
        """Adds the reasoning, or its summary if there is no more."""
        text = "".join(part["text"] for part in item.get("content") or item.get("summary") or ())
        if text:
            message = self._get_message_for("reasoning_content", param, ("content", "tool_calls"))
            message["reasoning_content"] = text

    def _add_call(self, item: Item, param: str) -> None:
        if not self._in_turn:
            self._add({"role": "assistant"}, param)
        calls = self.messages[-1].setdefault("tool_calls", [])
        self.sources[f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"] = param
        arguments = item.get("arguments")
        if item["type"] == "custom_tool_call":
            arguments = json.dumps({"input": item["input"]}, ensure_ascii=False)
        function = {"name": make_visible_name(item["name"], item.get("namespace")), "arguments": arguments}
        calls.append({"id": item["call_id"], "type": "function", "function": function})

    def _read_content(self, parts: Sequence[Item], param: str) -> str | list[dict[str, Any]]:
        """One string, unless there are media. `param`: the path of `parts`."""
        if all(part["type"] not in _MEDIA for part in parts):
            return _join_texts(parts, param)
        content: list[dict[str, Any]] = []
        for i, part in enumerate(parts):
            if part["type"] == "input_image":
                image = {"url": part["image_url"], "detail": part["detail"]}
                field = f"messages[{len(self.messages)}].content[{i}].image_url.detail"
                self.sources[field] = f"{param}[{i}].detail"
                content.append({"type": "image_url", "image_url": image})
            elif part["type"] == "input_file":
                key = "file_url" if "file_url" in part else "file_data"
                field = f"messages[{len(self.messages)}].content[{i}].file.file_data"
                self.sources[field] = f"{param}[{i}].{key}"
                content.append({"type": "file", "file": {"file_data": part[key]}})
            elif part["type"] == "input_audio":
                content.append(part)
            else:
                content.append({"type": "text", "text": _get_text(part)})
        return content


def _join_texts(parts: Sequence[Item], param: str) -> str:
    for i, part in enumerate(parts):
        if part["type"] in _MEDIA:
            reject_unsupported(
                f"{param}[{i}].type", "images, files and audio are supported in messages and outputs of tools"
            )
    return "".join(_get_text(part) for part in parts)


def _get_text(part: Item) -> str:
    return str(part["refusal"] if part["type"] == "refusal" else part["text"])


def list_cuts(items: Sequence[Item]) -> list[int]:
    """List the positions before which items may be dropped, ascending. Each drops more than the one
    before."""
    first_user, last_user = _find_last_question(items)
    cuts, dropped, at_last_cut = [], 0, 0
    for i, item in enumerate(items):
        begins_turn = i <= first_user and _is_user(item) and not (i and _is_user(items[i - 1]))
        begins_step = (
            i > last_user
            and not _is_output(item)
            and i > 0
            and (_is_user(items[i - 1]) or _is_output(items[i - 1]))
        )
        if (begins_turn or begins_step) and dropped > at_last_cut:
            cuts.append(i)
            at_last_cut = dropped
        # Outputs do not count, as one may have gone with its call.
        dropped += not (_is_permanent(item) or _is_output(item) or first_user <= i <= last_user)
    return cuts


def list_kept(items: Sequence[Item], cut: int) -> list[int]:
    """List the indices of the items that stay. The outputs of dropped calls are dropped too."""
    first_user, last_user = _find_last_question(items)
    stays = [i >= cut or first_user <= i <= last_user or _is_permanent(item) for i, item in enumerate(items)]
    dropped_calls = {
        item["call_id"] for i, item in enumerate(items) if item["type"].endswith("_call") and not stays[i]
    }
    return [
        i
        for i, item in enumerate(items)
        if stays[i] and not (_is_output(item) and item["call_id"] in dropped_calls)
    ]


def _find_last_question(items: Sequence[Item]) -> tuple[int, int]:
    """The first and the last of the user's messages that end the conversation's questions; -1 without any."""
    last = max((i for i, item in enumerate(items) if _is_user(item)), default=-1)
    first = last
    while first > 0 and _is_user(items[first - 1]):
        first -= 1
    return first, last


def _is_user(item: Item) -> bool:
    return bool(item["type"] == "message" and item["role"] == "user")


def _is_permanent(item: Item) -> bool:
    return item.get("role") in ("system", "developer")


def _is_output(item: Item) -> bool:
    return bool(item["type"].endswith("_output"))
