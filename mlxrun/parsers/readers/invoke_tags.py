"""Calls in tags with names as attributes: `<invoke name="f"><parameter name="k">v</parameter></invoke>`.

Strings are written as they are, all other values as JSON. DeepSeek's tags say of each value whether it is a
string.
"""

from __future__ import annotations

from mlxrun.parsers.marker_scanner import get_scanner
from mlxrun.parsers.readers.tagged_arguments import TEXT, read_tagged, take_tag
from mlxrun.parsers.text_stream import Malformed, Step, TextStream

_IS_STRING, _IS_JSON = '" string="true', '" string="false'


class InvokeTags:
    """The tags of one format, whose names begin with `prefix`."""

    def __init__(self, prefix: str = "") -> None:
        self.opener = f"<{prefix}invoke name="
        self._parameter = f"<{prefix}parameter name="
        self._close = f"</{prefix}invoke>"
        self._ends = get_scanner(f"</{prefix}parameter>")

    def read(self, s: TextStream, opener: str = "") -> Step[None]:
        """Read a call behind `opener`, with its end tag. Raises Malformed if the tool is not offered."""
        call = s.begin_call((yield from _read_attribute(s)))
        while (yield from take_tag(s, self._parameter, self._close)) == self._parameter:
            key = yield from _read_attribute(s)
            is_string = key.endswith(_IS_STRING)
            key = key.removesuffix(_IS_STRING).removesuffix(_IS_JSON)
            schema = call.schema.get_member(key)
            if is_string and not schema.excludes_text:
                schema = TEXT
            yield from read_tagged(s, call, key, self._ends, layout=False, guess=True, schema=schema)
        call.close()


def _read_attribute(s: TextStream) -> Step[str]:
    """Read the rest of a tag that names something, in quotes or without."""
    name, end = yield from s.read_name(">", "\n")
    if end == "\n":
        raise Malformed
    return name.strip("\"'")
