"""Translates Ollama's messages to those of a chat body: images to parts, and tool results to their calls.

Ollama's calls and results need no ids. A result belongs to the first call without one that has its name, or
else to the first call without one.
"""

from __future__ import annotations

from typing import Any

from mlxrun.api.text.messages import Message
from mlxrun.core.field_errors import check_type


class OllamaMessages:
    """The messages of a chat body. `sources`: the path in Ollama's body of each path in the chat body."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.sources: dict[str, str] = {}
        self._waiting: list[tuple[str, Any]] = []  # id and name of the calls that have no result yet
        self._count = 0  # of calls

    def add(self, value: Any, source: str) -> None:
        """Add a message of /api/chat at the path `source`. RequestError if its fields have wrong types."""
        message = dict(check_type(value, dict, source))
        role, images = message.get("role"), message.pop("images", None)
        if isinstance(role, str):
            role = message["role"] = role.lower()
        content = message.get("content")
        text = "" if content is None else check_type(content, str, f"{source}.content")
        name = message.pop("tool_name", None)
        if name is not None:
            message["name"] = check_type(name, str, f"{source}.tool_name")
            self.sources[f"messages[{len(self.messages)}].name"] = f"{source}.tool_name"
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message["tool_calls"] = [self._add_call(call) for call in calls]
        if role == "tool":
            message["tool_call_id"] = self._find_call(message.get("tool_call_id"), message.get("name"))
        self.add_text(message, text, images, source, f"{source}.images")

    def add_text(self, message: Message, text: str, images: Any, source: str, images_source: str) -> None:
        """Add a message with this text, behind its images. The paths of text and images are named."""
        at = f"messages[{len(self.messages)}]"
        self.sources[at] = source
        content: Any = text
        if images:
            content = []
            for i, data in enumerate(check_type(images, list, images_source)):
                where = f"{images_source}[{i}]"
                url = f"data:image/png;base64,{_strip_lines(check_type(data, str, where))}"
                content.append({"type": "image_url", "image_url": {"url": url}})
                for path in ("", ".type", ".image_url", ".image_url.url"):
                    self.sources[f"{at}.content[{i}]{path}"] = where
            if text:
                self.sources[f"{at}.content[{len(content)}].text"] = f"{source}.content"
                content.append({"type": "text", "text": text})
        self.messages.append({**message, "content": content})

    def _add_call(self, call: Any) -> Any:
        """The call with an id. One that is no object is refused where all chat messages are read."""
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return call
        self._count += 1
        # Some chat templates insist on ids of nine letters and digits.
        call_id = call.get("id") or f"call{self._count:05}"
        self._waiting.append((call_id, function.get("name")))
        own = {key: value for key, value in function.items() if key != "index"}
        return {**call, "id": call_id, "function": own}

    def _find_call(self, call_id: Any, name: Any) -> Any:
        """The id of the call that a result is of."""
        if call_id is None:
            named = [each for each in self._waiting if each[1] == name]
            call_id = next((each[0] for each in named or self._waiting), "call00000")
        self._waiting = [each for each in self._waiting if each[0] != call_id]
        return call_id


def _strip_lines(data: str) -> str:
    """Base64 without line breaks, which Ollama accepts."""
    return data.replace("\r", "").replace("\n", "")
