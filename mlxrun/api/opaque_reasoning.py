"""Encodes reasoning as text that clients send back unread, so that the next turn of a conversation has it.

Anthropic's `signature` and the Responses API's `encrypted_content` are such texts. They are encoded, not
encrypted. Another server's text cannot be decoded. That is no error, since conversations change servers.
"""

from __future__ import annotations

import base64

_PREFIX = "mlxrun."


def encode_reasoning(reasoning: str) -> str:
    return _PREFIX + base64.urlsafe_b64encode(reasoning.encode()).decode()


def decode_reasoning(text: str) -> str | None:
    """Return the reasoning in a text of `encode_reasoning`; None if it is another server's, or damaged."""
    if not text.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(text.removeprefix(_PREFIX), altchars=b"-_", validate=True).decode()
    except ValueError:
        return None
