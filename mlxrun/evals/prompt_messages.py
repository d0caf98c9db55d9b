"""The prompt of a job line as messages for people, whatever the line's API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxrun.api.text.media.media_kinds import BASE64_PDF

_TEXTS = ("text", "input_text", "output_text", "refusal")  # types of parts that have a text

_SHOWN_DATA = 40  # characters of a file


@dataclass(frozen=True, slots=True)
class PromptMessage:
    """One message: its role, its text, and the URLs or paths of its images and sounds."""

    role: str
    text: str
    images: list[str] = field(default_factory=list)
    sounds: list[str] = field(default_factory=list)


def list_messages(body: Mapping[str, Any]) -> list[PromptMessage]:
    """List the messages of a body in order. Tools, and texts that the API keeps apart, are messages of their
    own. Unknown content is shown as JSON, so that nothing of a prompt is missing."""
    found = []
    for name in ("system", "instructions"):
        if body.get(name):
            found.append(_read_message("system", body[name]))
    if body.get("tools"):
        found.append(PromptMessage("tools", json.dumps(body["tools"], ensure_ascii=False)))
    if "prompt" in body:
        found += _read_prompts(body["prompt"])
        if body.get("suffix"):
            found.append(PromptMessage("suffix", dump_text(body["suffix"])))
    items = body.get("messages", body.get("input", []))
    if isinstance(items, str):
        return [*found, PromptMessage("user", items)]
    for item in items if isinstance(items, list) else [items]:
        found.append(_read_item(item))
    return found


def _read_prompts(prompt: Any) -> list[PromptMessage]:
    """A completion's prompt: a text, token ids, or a list of either."""
    if isinstance(prompt, list) and prompt and not all(isinstance(each, int) for each in prompt):
        return [PromptMessage(f"prompt {at}", dump_text(each)) for at, each in enumerate(prompt, 1)]
    return [PromptMessage("prompt", dump_text(prompt))]


def _read_item(item: Any) -> PromptMessage:
    """A message, or an item of a Responses input such as a tool call."""
    if not isinstance(item, Mapping) or not ("content" in item or "tool_calls" in item):
        role = item.get("type", "message") if isinstance(item, Mapping) else "message"
        return PromptMessage(str(role), dump_text(item))
    message = _read_message(str(item.get("role", item.get("type", "message"))), item.get("content"))
    extra = {
        key: value
        for key, value in item.items()
        if key not in ("role", "type", "content", "id", "status") and value
    }
    texts = [message.text, *(f"{key}: {dump_text(value)}" for key, value in extra.items())]
    return PromptMessage(message.role, "\n".join(filter(None, texts)), message.images, message.sounds)


def _read_message(role: str, content: Any) -> PromptMessage:
    if not isinstance(content, list):
        return PromptMessage(role, "" if content is None else dump_text(content))
    texts, images, sounds = [], [], []
    for part in content:
        if (sound := _find_sound(part)) is not None:
            sounds.append(sound)
            continue
        sources = list(_find_images(part))
        images += sources
        if isinstance(part, Mapping) and part.get("type") in _TEXTS:
            texts.append(dump_text(part.get("text", part.get("refusal", ""))))
        elif not sources or part.get("type") == "tool_result":
            texts.append(dump_text(_shorten_data(_without_images(part))))
    return PromptMessage(role, "\n".join(texts), images, sounds)


def _find_sound(part: Any) -> str | None:
    """The sound of a part: a path, or a data URL also where the API has the data alone."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in ("input_audio", "audio_url"):
        return None
    found = part.get(kind)
    found = {"url": found} if isinstance(found, str) else found if isinstance(found, Mapping) else {}
    if isinstance(data := found.get("data"), str):
        return data if data.startswith("data:") else f"data:audio/{found.get('format')};base64,{data}"
    return str(found.get("url", ""))


def _find_images(part: Any) -> Iterator[str]:
    """The images of a part, in the form of any API; those inside a tool result too."""
    if not isinstance(part, Mapping):
        return
    if part.get("type") in ("image_url", "input_image"):
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        yield url if isinstance(url, str) else ""
    elif part.get("type") == "image":
        source = part.get("source")
        source = source if isinstance(source, Mapping) else {}
        if source.get("type") == "base64":
            yield f"data:{source.get('media_type')};base64,{source.get('data')}"
        else:
            yield str(source.get("url", ""))
    elif part.get("type") == "tool_result" and isinstance(part.get("content"), list):
        for each in part["content"]:
            yield from _find_images(each)


def _without_images(part: Any) -> Any:
    if isinstance(part, Mapping) and isinstance(part.get("content"), list):
        kept = [each for each in part["content"] if not any(True for _ in _find_images(each))]
        return {**part, "content": kept}
    return part


def _shorten_data(value: Any) -> Any:
    """A part with the beginnings of its files only."""
    if not isinstance(value, Mapping):
        return value
    found = {}
    for key, each in value.items():
        is_data = isinstance(each, str) and (
            each.startswith(("data:", BASE64_PDF))
            or (key == "data" and value.get("media_type") == "application/pdf")
        )
        found[key] = (
            f"{each[:_SHOWN_DATA]}..." if is_data and len(each) > _SHOWN_DATA else _shorten_data(each)
        )
    return found


def dump_text(value: Any) -> str:
    """Dump a value as text: a string as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
