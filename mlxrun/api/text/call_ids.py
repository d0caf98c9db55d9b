"""Fits the ids of tool calls to chat templates that accept only nine letters and digits, as Mistral's do.

Clients bring ids of other servers with them, of any form. A call and its result keep one id, and two calls
never share one. An id depends only on those before it, so a longer conversation has the same beginning.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

ID_LENGTH = 9
_FITTING = re.compile(rf"[A-Za-z0-9]{{{ID_LENGTH}}}")


def fit_call_ids(messages: Sequence[dict[str, Any]]) -> None:
    """Replace the ids of calls and results in these messages by ids of nine letters and digits. Ids that have
    this form stay, unless a longer one before them became the same."""
    fitted: dict[str, str] = {}
    taken: set[str] = set()

    def fit(call_id: str) -> str:
        if call_id not in fitted:
            fitted[call_id] = next(each for each in _propose_ids(call_id) if each not in taken)
            taken.add(fitted[call_id])
        return fitted[call_id]

    for message in messages:
        for call in message.get("tool_calls", ()):
            if "id" in call:
                call["id"] = fit(call["id"])
        if "tool_call_id" in message:
            message["tool_call_id"] = fit(message["tool_call_id"])


def _propose_ids(call_id: str) -> Iterator[str]:
    """Ids for a call, the best first. Some of these templates shorten a long id to its end themselves."""
    if _FITTING.fullmatch(call_id[-ID_LENGTH:]):
        yield call_id[-ID_LENGTH:]
    for number in itertools.count():
        text = f"{number} {call_id}".encode("utf-8", "surrogatepass")
        yield hashlib.sha256(text).hexdigest()[:ID_LENGTH]
