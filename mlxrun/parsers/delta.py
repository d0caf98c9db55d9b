"""What parsers give: typed pieces of an answer, in the order in which the model wrote them.

`feed` takes text in any pieces and gives what is certain; `finish` gives the rest. The pieces of one kind
concatenate to the same whatever the pieces of the input were. Text that cannot begin a marker flows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer.

    `text` and `reasoning`: more of either. `call`: the first piece of a call has `id` and `name` (and may
    have arguments); all pieces of call `index` (from 0 in each answer) have in `text` a fragment of the
    arguments, which concatenate to one JSON object.
    """

    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    index: int = 0
    id: str = ""
    name: str = ""


class Parser(Protocol):
    """One answer's state. Not used again after `finish`."""

    def feed(self, text: str) -> Sequence[Delta]:
        """What `text` makes certain."""

    def finish(self) -> Sequence[Delta]:
        """The rest: a marker that was not completed is text, a call that was cut is closed where sound."""
