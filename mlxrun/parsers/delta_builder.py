"""What a parser has found so far: text, thought and calls, in order, neighbours of one kind joined.

White space between a thought, text and calls only separates them and is dropped: what ends a part is held
back until its kind goes on, what begins one is skipped after a change of kind. An answer's own first and
last white space stays.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Literal

from mlxrun.parsers.delta import Delta

SPACE = " \t\r\n"
Kind = Literal["text", "reasoning"]


def new_call_id() -> str:
    """`call_` and 24 hexadecimal digits."""
    return f"call_{uuid.uuid4().hex[:24]}"


class DeltaBuilder:
    """Collects deltas; `take` hands them over."""

    def __init__(self, new_id: Callable[[], str] = new_call_id) -> None:
        self._new_id = new_id
        self._ids: set[str] = set()  # of the calls so far
        self._done: list[Delta] = []
        self._parts: list[str] = []  # of the newest delta, all of one kind and call
        self._head = Delta("text")
        self.kind: Kind = "text"
        self.space: list[str] = []  # white space that ends the running part so far, in pieces
        self.skip = False  # whether white space now would begin a part
        self.fresh = True  # no text since the start, the last thought or the last call
        self.calls = 0

    def text(self, text: str) -> None:
        """More of the answer."""
        self._flow("text", text)

    def reasoning(self, text: str) -> None:
        """More of a thought."""
        self._flow("reasoning", text)

    def flow(self, kind: Kind, text: str) -> None:
        """More of either."""
        self._flow(kind, text)

    def flowing(self, kind: Kind) -> bool:
        """Whether more of this kind would be passed on as it is, but for white space at its end."""
        return kind == self.kind and not self.skip and not (self.fresh and kind == "text")

    def part(self) -> None:
        """A marker ends the running part."""
        self.space, self.skip, self.fresh = [], True, True

    def call(self, name: str, id: str = "") -> int:
        """A call begins; its index. `id`: the model's own, taken if no call before has it."""
        self.part()
        if not id or id in self._ids:
            id = self._new_id()
        self._ids.add(id)
        self._push(Delta("call", "", self.calls, id, name))
        self.calls += 1
        return self.calls - 1

    def arguments(self, index: int, fragment: str) -> None:
        """More of a call's arguments."""
        head = self._head
        if head.kind != "call" or head.index != index or not self._parts:
            self._push(Delta("call", "", index))
        self._parts.append(fragment)

    def end(self) -> None:
        """No more comes: white space at the very end is the answer's own."""
        if self.space and not self.skip:
            self._append(self.kind, "".join(self.space))
        self.space = []

    def take(self) -> list[Delta]:
        """What was collected since the last time."""
        self._close()
        done, self._done = self._done, []
        return done

    def _flow(self, kind: Kind, text: str) -> None:
        if kind != self.kind:
            self.part()
            self.kind = kind
        if self.skip:
            text = text.lstrip(SPACE)
        if not text:
            return
        body = text.rstrip(SPACE)
        if body:
            self.skip = False
            if kind == "text":
                self.fresh = False
            self._append(kind, "".join(self.space) + body)
            self.space = [text[len(body) :]] if len(body) < len(text) else []
        else:
            self.space.append(text)

    def _append(self, kind: Kind, text: str) -> None:
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
