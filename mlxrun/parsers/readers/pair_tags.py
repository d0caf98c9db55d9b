"""Calls in tags that pair keys with values: `<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value>...`.

Strings are written as they are, all other values as JSON. JSON within the outer tags is read too.
"""

from __future__ import annotations

from mlxrun.parsers.marker_scanner import get_scanner
from mlxrun.parsers.readers.json_call import read_calls
from mlxrun.parsers.readers.tagged_arguments import read_tagged, take_tag
from mlxrun.parsers.text_stream import Step, TextStream


class PairTags:
    """The tags of one format, whose names begin with `prefix`."""

    def __init__(self, prefix: str = "") -> None:
        self.opener, self._close = f"<{prefix}tool_call>", f"</{prefix}tool_call>"
        self.key, self._key_end = f"<{prefix}arg_key>", f"</{prefix}arg_key>"
        self._value, self._value_end = f"<{prefix}arg_value>", f"</{prefix}arg_value>"
        self.markers = (self.opener, self._close, self.key, self._value, self._key_end, self._value_end)

    def read(self, s: TextStream, opener: str = "") -> Step[None]:
        """Read a call behind `opener`, with its end tag. Raises Malformed if the tool is not offered."""
        if (yield from s.skip_space()) in ("{", "["):
            if (yield from read_calls(s)):
                yield from s.skip(self._close)
            return
        name, tag = yield from s.read_name("\n", self.key, self._close)
        call = s.begin_call(name)
        ends = get_scanner(self._value_end)
        while tag != self._close:
            if tag != self.key and (yield from take_tag(s, self.key, self._close)) == self._close:
                break
            key, _ = yield from s.read_name(self._key_end)
            yield from take_tag(s, self._value)
            yield from read_tagged(s, call, key, ends, layout=False, guess=True)
            tag = ""
        call.close()
