"""Which line is started next: one that begins like the last one, if there is such a line within a window.

`likeness` sees from a body alone what lines share; `Lookahead` keeps like lines together. Every line comes
once; among lines that are not like the last one the oldest is first; and of a line's followers fewer than
`WINDOW` are started before it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from mlxrun.batch.job_file import JobLine

WINDOW = 256  # lines
_FIRST = 200  # characters of a prompt that stand for a system prompt where there is none
_MORE = 1000  # characters after the system prompt
_SYSTEM = ("system", "developer")


def likeness(line: JobLine) -> int:
    """64 bits: the upper half is equal for lines with the same tools and system prompt, all of it if what
    follows begins alike too."""
    body = line.body
    messages = body.get("messages")
    turns = messages if isinstance(messages, list) else []
    lead = 0
    while lead < len(turns) and isinstance(turns[lead], dict) and turns[lead].get("role") in _SYSTEM:
        lead += 1
    head = "".join(_texts([body.get("tools"), turns[:lead]]))
    rest = _start([body.get("prompt"), turns[lead:]], _MORE)
    if not head:
        head = rest[:_FIRST]
    return _hash(line.url + head) << 32 | _hash(rest)


def _hash(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "big")


def _start(value: Any, size: int) -> str:
    """The first `size` characters, at least, of the texts in `value`."""
    found, length = [], 0
    for text in _texts(value):
        found.append(text[:size])
        length += len(found[-1])
        if length >= size:
            break
    return "".join(found)[:size]


def _texts(value: Any) -> Iterator[str]:
    """All keys, strings and numbers in a JSON value, in order, each with an end mark."""
    left = [value]  # a stack: JSON may be nested as deeply as Python's own
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += reversed(item)
        elif isinstance(item, dict):
            left += [part for pair in reversed(item.items()) for part in reversed(pair)]
        elif isinstance(item, str) and item.startswith("data:"):  # files of one kind begin alike
            yield f"data {_hash(item)}\n"
        elif item is not None:
            yield f"{item}\n"


class Lookahead:
    """Hands out positions, likest first. `like` is asked once for each, `size` positions ahead at most."""

    def __init__(self, positions: Iterator[int], like: Callable[[int], int], size: int = WINDOW) -> None:
        self._positions = enumerate(positions)
        self._like = like
        self._size = size
        self._waiting: list[tuple[int, int, int]] = []  # rank, position, likeness; oldest first
        self._next: tuple[int, int] | None = None  # read, but not within the window yet
        self._last: int | None = None

    def next(self) -> int | None:
        """The next position; None after the last."""
        self._fill()
        if not self._waiting:
            return None
        _, position, self._last = self._waiting.pop(self._pick())
        return position

    def _fill(self) -> None:
        """Take in what is less than a window behind the oldest."""
        while True:
            if self._next is None:
                self._next = next(self._positions, None)
            if self._next is None or (self._waiting and self._next[0] >= self._waiting[0][0] + self._size):
                return
            rank, position = self._next
            self._waiting.append((rank, position, self._like(position)))
            self._next = None

    def _pick(self) -> int:
        if self._last is None:
            return 0
        alike: int | None = None
        for at, (_, _, likeness) in enumerate(self._waiting):
            if likeness == self._last:
                return at
            if alike is None and likeness >> 32 == self._last >> 32:
                alike = at
        return alike or 0
