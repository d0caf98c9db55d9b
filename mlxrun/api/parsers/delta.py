"""What parsers return: the typed deltas of an answer, in the order in which the model wrote them.

`feed` takes text in chunks of any size and returns what is certain; `finish` returns the rest. However the
text was split, the deltas of each kind concatenate to the same text. Text that cannot begin a marker is
returned at once.

White space between reasoning, content and calls only separates them, and is dropped. At the beginning of a
section it is skipped; at the end it is held back until the same kind continues. Sections of one kind are
joined by a line feed. The first and last white space of an answer stays.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

TextKind = Literal["content", "reasoning"]
DeltaKind = Literal["content", "reasoning", "call"]
SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Delta:
    """One increment of an answer.

    `kind` content or reasoning: `text` continues the answer text or the reasoning. `kind` call: `text` is a
    fragment of the arguments of the call number `index`, from 0 in each answer. The fragments of a call
    concatenate to one JSON object. Its first delta has `id` and `name`.
    """

    kind: DeltaKind
    text: str = ""
    index: int = 0
    id: str = ""
    name: str = ""


class Parser(Protocol):
    """The parser of one answer. It is of no use after `finish`."""

    @property
    def markers(self) -> Collection[str]:
        """The texts of special tokens that the parser reads. The detokenizer must not drop them."""

    def feed(self, text: str) -> Sequence[Delta]:
        """Return the deltas that `text` makes certain."""

    def finish(self, stopped: bool = False) -> Sequence[Delta]:
        """Return the rest. An incomplete marker becomes text; a tool call that was cut off is closed.
        `stopped`: a stop string ended the answer. A call that it cut off, and that was held, becomes text."""


class PlainParser:
    """A parser that returns all text as content."""

    markers: tuple[str, ...] = ()

    def feed(self, text: str) -> Sequence[Delta]:
        return [Delta("content", text)] if text else []

    def finish(self, stopped: bool = False) -> Sequence[Delta]:
        return []


def make_call_id() -> str:
    """Make an id: `call_` and 24 hexadecimal digits."""
    return f"call_{uuid.uuid4().hex[:24]}"


class DeltaBuilder:
    """Collects deltas; `take` returns them."""

    def __init__(self, new_id: Callable[[], str] = make_call_id) -> None:
        self._new_id = new_id
        self._ids: set[str] = set()  # of the calls so far
        self._done: list[Delta] = []
        self._parts: list[str] = []  # text of the newest delta
        self._head = Delta("content")  # the newest delta, its text apart
        self.kind: TextKind = "content"
        self.space: list[str] = []  # the white space that ends the current section so far
        self.skip = False  # whether white space now would begin a section
        self.fresh = True  # whether no content came since the start, the last reasoning or the last call
        self.calls = 0
        self._begun: set[TextKind] = set()  # the kinds that have text

    @property
    def at_line_start(self) -> bool:
        """Whether content that is added now begins a line or a section."""
        return self.fresh or any("\n" in space for space in self.space)

    def add(self, kind: TextKind, text: str) -> None:
        """Add content or reasoning."""
        if kind != self.kind:
            self.end_section()
            self.kind = kind
        if self.skip:
            text = text.lstrip(SPACE)
        if not text:
            return
        body = text.rstrip(SPACE)
        if body:
            if self.skip and kind in self._begun:
                self._append(kind, "\n")
            self._begun.add(kind)
            self.skip = False
            if kind == "content":
                self.fresh = False
            self._append(kind, "".join(self.space) + body)
            self.space = [text[len(body) :]] if len(body) < len(text) else []
        else:
            self.space.append(text)

    def continues(self, kind: TextKind) -> bool:
        """Tell whether text of this kind would be added unchanged, except for white space at its end."""
        return kind == self.kind and not self.skip and not (self.fresh and kind == "content")

    def end_section(self) -> None:
        """End the current section: a marker was read."""
        self.space, self.skip, self.fresh = [], True, True

    def begin_call(self, name: str, id: str = "") -> int:
        """Begin a call and return its index. `id`: the model's own; if it is repeated, a new one is made."""
        self.end_section()
        if not id or id in self._ids:
            id = self._new_id()
        self._ids.add(id)
        self._push(Delta("call", "", self.calls, id, name))
        self.calls += 1
        return self.calls - 1

    def add_arguments(self, index: int, fragment: str) -> None:
        """Add to the arguments of a call."""
        if self._head.kind != "call" or self._head.index != index or not self._parts:
            self._push(Delta("call", "", index))
        self._parts.append(fragment)

    def finish(self) -> None:
        """End the answer. White space at its end stays."""
        if self.space and not self.skip:
            self._append(self.kind, "".join(self.space))
        self.space = []

    def take(self) -> list[Delta]:
        """Return the deltas since the last call."""
        self._close()
        done, self._done = self._done, []
        return done

    def _append(self, kind: TextKind, text: str) -> None:
        if self._head.kind != kind or not self._parts:
            self._push(Delta(kind))
        self._parts.append(text)

    def _push(self, head: Delta) -> None:
        self._close()
        self._head, self._parts = head, [""]

    def _close(self) -> None:
        if self._parts:
            head, text = self._head, "".join(self._parts)
            self._done.append(Delta(head.kind, text, head.index, head.id, head.name))
            self._parts = []
