"""What parsers return: the typed deltas of an answer, in the order in which the model wrote them.

`feed` takes text in chunks of any size and returns what is certain; `finish` returns the rest. However the
text was split, the deltas of each kind concatenate to the same text. Text that cannot begin a marker is
returned at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

TextKind = Literal["content", "reasoning"]
DeltaKind = Literal["content", "reasoning", "call"]


@dataclass(frozen=True, slots=True)
class Delta:
    """One increment of an answer.

    `content` and `reasoning`: `text` continues the answer text or the reasoning. `call`: the first delta of a
    tool call has its `id` and `name` (and may have arguments); in all deltas of call `index` (counted from 0
    in each answer) `text` is a fragment of the arguments, which concatenate to one JSON object.
    """

    kind: DeltaKind
    text: str = ""
    index: int = 0
    id: str = ""
    name: str = ""


class Parser(Protocol):
    """The parser of one answer. Not used again after `finish`."""

    @property
    def markers(self) -> Collection[str]:
        """Texts of special tokens that the parser reads: the detokenizer must not drop them."""

    def feed(self, text: str) -> Sequence[Delta]:
        """Return the deltas that `text` makes certain."""

    def finish(self) -> Sequence[Delta]:
        """Return the rest: an incomplete marker is text, a tool call that was cut off is closed."""


class PlainParser:
    """A parser that returns all text as content."""

    markers: tuple[str, ...] = ()

    def feed(self, text: str) -> Sequence[Delta]:
        return [Delta("content", text)] if text else []

    def finish(self) -> Sequence[Delta]:
        return []
