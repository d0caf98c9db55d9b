"""Leads errors about a chat body back to the Anthropic body that it was made of.

Paths are written `messages[2].content[1]` until an error leaves; there they become `messages.2.content.1`, as
Anthropic writes them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mlxrun.api.anthropic.fields import EXTRA
from mlxrun.errors import RequestError
from mlxrun.text.field_errors import UNKNOWN

_INDEX = re.compile(r"\[(\d+)\]")
_UNKNOWN = "unknown parameter"


@dataclass(frozen=True, slots=True)
class ErrorPaths:
    """Paths of a chat body, and where each comes from in the Anthropic body."""

    paths: dict[str, str] = field(default_factory=dict)

    def source(self, param: str) -> str:
        """Where a path of the chat body comes from: by the longest of `paths` that it begins with."""
        head = param
        while head:
            if head in self.paths:
                return self.paths[head] + param[len(head) :]
            head = head[: max(head.rfind("."), head.rfind("["), 0)]
        return param

    def lead_back(self, error: RequestError) -> None:
        """Makes an error about the chat body one about the Anthropic body."""
        if error.param is not None:
            rename(error, self.source(error.param))


def rename(error: RequestError, param: str) -> None:
    """Gives an error another path, in its text too, and Anthropic's words for an unknown field."""
    param = _INDEX.sub(r".\1", param)
    text = str(error)
    if error.param is not None and text.startswith(f"{error.param}: "):
        text = text[len(error.param) + 2 :]
        if error.code == UNKNOWN and text.startswith(_UNKNOWN):
            text = EXTRA + text[len(_UNKNOWN) :]
        error.args = (f"{param}: {text}",)
    error.param = param
