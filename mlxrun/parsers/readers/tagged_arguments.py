"""Arguments that a format tags one by one, each value as bare text up to an end marker.

A string is passed on as it comes, other values when they are complete. One newline behind the opening tag and
one before the end marker belong to the layout.
"""

from __future__ import annotations

from mlxrun.parsers.argument_writer import ArgumentWriter
from mlxrun.parsers.marker_scanner import MarkerScanner
from mlxrun.parsers.text_stream import Malformed, Step, StreamCut, TextStream
from mlxrun.parsers.tool_schemas import ValueSchema, encode_bare_value

TEXT = ValueSchema({"type": "string"})


def take_tag(s: TextStream, *tags: str) -> Step[str]:
    """Take white space and one of `tags`, which is returned. Raises Malformed, or StreamCut if the text ends
    in it."""
    tag = yield from s.skip(*tags)
    if not tag:
        rest = yield from s.peek(max(map(len, tags)))
        raise StreamCut if any(tag.startswith(rest) for tag in tags) else Malformed
    return tag


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
    """Read one argument and return the marker that ended it. `layout`: newlines around the value are no part
    of it; `guess`: without a schema numbers and words are no strings; `schema`: the value's own."""
    schema = call.schema.get_member(key) if schema is None else schema
    if schema.is_text_only and not schema.options:
        call.open_text_member(key)
        writer = _TrimmingWriter(call)
        write, get_call = (writer.write, writer.get_call) if layout else (call.write_text, lambda: call)
        end = yield from s.stream_string(ends, write, get_call)
        call.close_innermost()
    else:
        text, end = yield from s.read_until(*ends.markers)
        text = text.removeprefix("\n").removesuffix("\n") if layout else text
        call.write_member(key, encode_bare_value(text, schema, guess=guess))
    return end


class _TrimmingWriter:
    """Writes a string without a newline that begins it and one that ends it."""

    def __init__(self, call: ArgumentWriter) -> None:
        self._call = call
        self._started = False
        self._newline = ""  # the last character, if it is a newline: it may end the string

    def write(self, text: str) -> None:
        if not self._started and text:
            self._started = True
            text = text.removeprefix("\n")
        text = self._newline + text
        self._newline = "\n" if text.endswith("\n") else ""
        self._call.write_text(text.removesuffix("\n"))

    def get_call(self) -> ArgumentWriter | None:
        """The call, if text without newlines may be added to it without this writer."""
        return self._call if self._started and not self._newline else None
