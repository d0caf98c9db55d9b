"""Arguments of one call as JSON that is written in pieces and can be closed at any moment.

Nothing is written before it is certain to stay: a key goes out with the beginning of its value, the opening
brace with the first member. So a call that is cut has, closed, the members that were whole and as much of an
open string, array or object as had come.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from mlxrun.parsers.delta_builder import DeltaBuilder
from mlxrun.parsers.tool_schemas import ValueSchema


def quoted(text: str) -> str:
    """A JSON string."""
    return json.dumps(text, ensure_ascii=False)


class ArgumentWriter:
    """A JSON encoder. `begun`: whether the call is out, as number `index`; `schema`: of its arguments."""

    def __init__(
        self,
        out: DeltaBuilder,
        name: str,
        schema: ValueSchema,
        progress: Callable[[bool], None],
        id: str = "",
    ) -> None:
        self.name = name
        self.id = id  # the model's own; "": a new one is made
        self.schema = schema
        self.started = False
        self._out = out
        self._progress = progress  # told when something has gone out, and with True that it is closed
        self.index = 0
        self._closers: list[str] = []
        self._first: list[bool] = []  # of each open object or array: nothing in it yet
        self._pending = ""

    # -- whole members, for formats that tag each argument ------------------------------------------

    def write_member(self, key: str, value: str) -> None:
        """An argument whose value is JSON."""
        self._root()
        self.write_key(quoted(key))
        self.write_value(value)

    def open_text_member(self, key: str) -> None:
        """An argument that is a string, to come in pieces; `text` gives them, `end` ends it."""
        self._root()
        self.write_key(quoted(key))
        self.open_string()

    def write_text(self, piece: str) -> None:
        """More of the open string, not yet escaped."""
        if piece:
            self.write_escaped(quoted(piece)[1:-1])

    def close(self) -> None:
        """Ends whatever is open; without any member the arguments are `{}`."""
        self._root()
        while self._closers:
            self.close_innermost()
        self._progress(True)

    def _root(self) -> None:
        if not self._closers and not self.started:
            self.open_container("{")

    # -- JSON, piece by piece -----------------------------------------------------------------------

    def open_container(self, bracket: str) -> None:
        """An object or an array begins."""
        if not self._closers:
            self._pending = bracket
        else:
            self._value(bracket)
        self._closers.append("}" if bracket == "{" else "]")
        self._first.append(True)

    def write_key(self, key: str) -> None:
        """The next member's key, as JSON."""
        self._pending += ("" if self._first[-1] else ", ") + key + ": "
        self._first[-1] = False

    def write_value(self, value: str) -> None:
        """A value that is written at once, as JSON."""
        self._value(value)

    def open_string(self) -> None:
        """A string value begins."""
        self._value('"')
        self._closers.append('"')

    def write_escaped(self, escaped: str) -> None:
        """More of it, escaped."""
        self._put(escaped)

    def close_innermost(self) -> None:
        """Ends the innermost string, array or object."""
        closer = self._closers.pop()
        if closer != '"':
            self._first.pop()
            self._pending = "" if self.started else "{"  # without a key whose value never came
        self._put(closer)

    def _value(self, text: str) -> None:
        if self._closers and self._closers[-1] == "]":
            self._pending += "" if self._first[-1] else ", "
            self._first[-1] = False
        self._put(text)

    def _put(self, text: str) -> None:
        if not self.started:
            self.started = True
            self.index = self._out.begin_call(self.name, self.id)
        self._out.add_arguments(self.index, self._pending + text)
        self._pending = ""
        self._progress(False)
