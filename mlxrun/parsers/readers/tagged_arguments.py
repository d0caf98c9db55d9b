"""Arguments that a format tags one by one, with the value as bare text up to an end marker.

A string is passed on as it comes; other values when they are whole. One newline behind the opening tag and
one before the end belong to the layout.
"""

from __future__ import annotations

from mlxrun.parsers.argument_writer import ArgumentWriter
from mlxrun.parsers.marker_scanner import MarkerScanner
from mlxrun.parsers.text_stream import Step, StreamCut, TextStream
from mlxrun.parsers.tool_schemas import ValueSchema, encode_bare_value

TEXT = ValueSchema({"type": "string"})


def read_tagged(
    s: TextStream,
    call: ArgumentWriter,
    key: str,
    ends: MarkerScanner,
    *,
    layout: bool = True,
    guess: bool = False,
    schema: ValueSchema | None = None,
) -> Step[str]:
    """One argument; gives the marker that ended it. Raises Cut. `layout`: newlines around are no part of the
    value; `guess`: without a schema numbers and words are what they look like; `schema`: the value's own."""
    schema = call.schema.get_member(key) if schema is None else schema
    if schema.is_text_only and not schema.options:
        call.open_text_member(key)
        if layout:
            trim = _Trimmed(call)
            end = yield from s.stream_string(ends, trim.add, trim.string)
        else:
            end = yield from s.stream_string(ends, call.write_text, lambda: call)
        if not end:
            raise StreamCut
        call.close_innermost()
    else:
        parts: list[str] = []
        end = yield from s.stream_string(ends, parts.append)
        if not end:
            raise StreamCut
        text = "".join(parts)
        call.write_member(key, encode_bare_value(trimmed(text) if layout else text, schema, guess=guess))
    return end


def trimmed(text: str) -> str:
    """Without the newline that begins it and the one that ends it."""
    return text.removeprefix("\n").removesuffix("\n")


class _Trimmed:
    """A sink that leaves out the first newline, if it is the first character, and one that is the last."""

    def __init__(self, call: ArgumentWriter) -> None:
        self._call = call
        self._begun = False
        self._held = ""

    def add(self, text: str) -> None:
        if not self._begun and text:
            self._begun = True
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._call.write_text(text.removesuffix("\n"))

    def string(self) -> ArgumentWriter | None:
        """The call, where text would go into it as it is: a newline is never such text."""
        return self._call if self._begun and not self._held else None
