"""The limits of a server's settings on bodies and prompts, which lines of its batches have too."""

from __future__ import annotations

from typing import Any

from mlxrun.api.prepared import PreparedRequest
from mlxrun.core.errors import PromptTooLong, RequestError

_MESSAGE_FIELDS = ("messages", "input", "items")


def check_message_counts(body: Any, most: int) -> None:
    """Limit the number of messages before any of them is processed."""
    for name in _MESSAGE_FIELDS:
        items = body.get(name) if isinstance(body, dict) else None
        # Integers are the token ids of one text.
        if isinstance(items, list) and len(items) > most and type(items[0]) is not int:
            text = f"{name}: {len(items)} items are more than {most} (server.max_messages)"
            raise RequestError(text, param=name)


def check_prompt_lengths(prepared: PreparedRequest, most: int | None) -> None:
    """Limit the length of each prompt; None: no limit."""
    longest = max(len(request.prompt) for request in prepared.requests)
    if most is not None and longest > most:
        raise PromptTooLong(f"the prompt has {longest} tokens; server.max_prompt_tokens is {most}")
