"""Pages in the place of their PDF, in the messages of a chat."""

from __future__ import annotations

from typing import Any

from mlxrun.api.text.media.images import repeat_images

IMAGE = {"type": "image"}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def test_as_many_image_parts_as_pages() -> None:
    """In order over all messages; what has no image stays as it is."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [text("a"), IMAGE, text("b"), IMAGE]},
        {"role": "tool", "content": [IMAGE], "tool_call_id": "t"},
    ]
    found = repeat_images(messages, [1, 3, 2])
    assert found[0] is messages[0]
    assert found[1]["content"] == [text("a"), IMAGE, text("b"), IMAGE, IMAGE, IMAGE]
    assert found[2] == {"role": "tool", "content": [IMAGE, IMAGE], "tool_call_id": "t"}
    assert len(messages[1]["content"]) == 4
    assert repeat_images(messages, [1, 1, 1]) == messages
