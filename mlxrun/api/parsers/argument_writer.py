"""Writes the JSON arguments of one call as they come. They can be closed at any moment.

Text is written only when it is certain to stay. So a key is written with the beginning of its value, and the
opening brace with the first member. The arguments of a call that is cut off can be closed. Then they have all
complete members, and the beginning of an open string, array or object.

A call can be held. Then nothing of it is written before it is closed.
"""

from __future__ import annotations

from collections.abc import Callable

from mlxrun.api.parsers.delta import DeltaBuilder
from mlxrun.api.parsers.tool_schemas import ValueSchema, encode_json


class ArgumentWriter:
    """Writes the arguments of a call of tool `name` into `out`. `schema`: of the arguments.

    `on_progress` is called after each write, with True when the call is closed. `id`: the model's own id of
    the call; if it is empty, a new one is made. `held`: whether the call is held until it is closed.
    """

    def __init__(
        self,
        out: DeltaBuilder,
        name: str,
        schema: ValueSchema,
        on_progress: Callable[[bool], None],
        id: str = "",
        held: bool = False,
    ) -> None:
        self.schema = schema
        self.started = False  # whether the call has been added to `out`, as number `index`, or is held
        self.index = 0
        self.held = held
        self._fragments: list[str] = []  # of a call that is held
        self._out = out
        self._name = name
        self._id = id
        self._on_progress = on_progress
        self._closers: list[str] = []  # of the open strings, arrays and objects
        self._empty: list[bool] = []  # of each open object or array: nothing in it yet
        self._pending = ""

    # -- complete members, for formats that tag each argument ---------------------------------------

    def write_member(self, key: str, value: str) -> None:
        """Write an argument whose value is JSON."""
        self._open_root()
        self.write_key(key)
        self.write_value(value)

    def open_text_member(self, key: str) -> None:
        """Begin a string argument. `write_text` continues it, and `close_innermost` ends it."""
        self._open_root()
        self.write_key(key)
        self.open_string()

    def write_text(self, text: str) -> None:
        """Continue the open string with text that is not yet escaped."""
        if text:
            self.write_escaped(encode_json(text)[1:-1])

    def close(self) -> None:
        """Close all that is open. Without members the arguments are `{}`."""
        self._open_root()
        while self._closers:
            self.close_innermost()
        if self.held:
            self.held = False
            self._begin("".join(self._fragments))
        self._on_progress(True)

    def _open_root(self) -> None:
        if not self._closers and not self.started:
            self.open_container("{")

    # -- JSON as it comes ---------------------------------------------------------------------------

    def open_container(self, bracket: str) -> None:
        """Begin an object or an array."""
        if not self._closers:
            self._pending = bracket
        else:
            self.write_value(bracket)
        self._closers.append("}" if bracket == "{" else "]")
        self._empty.append(True)

    def write_key(self, key: str) -> None:
        """Write the key of the next member. It is held back until the member's value."""
        self._pending += f"{'' if self._empty[-1] else ', '}{encode_json(key)}: "
        self._empty[-1] = False

    def open_string(self) -> None:
        """Begin a string value."""
        self.write_value('"')
        self._closers.append('"')

    def write_value(self, json: str) -> None:
        """Write a value, or the beginning of one, as JSON."""
        if self._closers and self._closers[-1] == "]":
            self._pending += "" if self._empty[-1] else ", "
            self._empty[-1] = False
        self.write_escaped(json)

    def close_innermost(self) -> None:
        """End the innermost string, array or object."""
        closer = self._closers.pop()
        if closer != '"':
            self._empty.pop()
            self._pending = "" if self.started else "{"  # without a key whose value never came
        self.write_escaped(closer)

    def write_escaped(self, text: str) -> None:
        """Continue the open string with text that is escaped already."""
        fragment, self._pending = self._pending + text, ""
        if self.held:
            self._fragments.append(fragment)
        elif self.started:
            self._out.add_arguments(self.index, fragment)
        else:
            self._begin(fragment)
        self.started = True
        self._on_progress(False)

    def _begin(self, fragment: str) -> None:
        """Add the call, with what its arguments begin with."""
        self.index = self._out.begin_call(self._name, self._id)
        self._out.add_arguments(self.index, fragment)
