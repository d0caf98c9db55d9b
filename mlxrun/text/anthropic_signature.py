"""Signatures of thoughts: they say that a thought is ours, and hold it where the client asked not to see it.

A client sends thoughts back as they came. Signatures of other servers are taken too: conversations move.
"""

from __future__ import annotations

import base64

_OURS = "mlxrun."


def signature(thought: str, hidden: bool) -> str:
    """The signature of a thought; with `hidden` the thought is in it, so that the next turn has it."""
    held = base64.urlsafe_b64encode(thought.encode()).decode() if hidden else ""
    return _OURS + held


def thought_of(signed: str) -> str:
    """The thought that a signature holds; empty if it holds none, or is of another server."""
    if not signed.startswith(_OURS):
        return ""
    try:
        return base64.urlsafe_b64decode(signed.removeprefix(_OURS).encode()).decode()
    except ValueError:
        return ""
