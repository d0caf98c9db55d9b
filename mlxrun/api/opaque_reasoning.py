"""Thoughts that a client carries: it sends them back unread, so that the next turn has them.

Anthropic's `signature` and the Responses API's `encrypted_content` are such texts. It is an encoding, and no
secret. What another server made cannot be read, and conversations move: that is no error.
"""

from __future__ import annotations

import base64

_OURS = "mlxrun."


def carry(thought: str) -> str:
    """A thought as a client carries it."""
    return _OURS + base64.urlsafe_b64encode(thought.encode()).decode()


def carried(text: str) -> str | None:
    """The thought in a text of `carry`; None if it is of another server, or broken."""
    if not text.startswith(_OURS):
        return None
    try:
        return base64.b64decode(text.removeprefix(_OURS), altchars=b"-_", validate=True).decode()
    except ValueError:
        return None
