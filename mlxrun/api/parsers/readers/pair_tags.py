"""Calls in tags that pair keys with values: `<tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value>...`.

Strings are written as they are, all other values as JSON. JSON within the outer tags is read too.
"""

from __future__ import annotations

from mlxrun.api.parsers.readers.json_call import read_block
from mlxrun.api.parsers.readers.tagged_arguments import read_tagged, take_tag
from mlxrun.api.parsers.text_stream import Step, TextStream


class PairTags:
    """The tags of one format, whose names begin with `prefix` and end with `suffix`. `separators`: what may
    stand behind a tool's name."""

    def __init__(self, prefix: str = "", suffix: str = "", separators: tuple[str, ...] = ()) -> None:
        self.opener, self.close = f"<{prefix}tool_call{suffix}>", f"</{prefix}tool_call{suffix}>"
        self.key, self._key_end = f"<{prefix}arg_key{suffix}>", f"</{prefix}arg_key{suffix}>"
        self._value, self._value_end = f"<{prefix}arg_value{suffix}>", f"</{prefix}arg_value{suffix}>"
        self._separators = separators
        self.markers = (self.opener, self.close, self.key, self._value, self._key_end, self._value_end)
        self._ends = {self._value_end: (self.key, self.close, self.opener)}

    def read(self, s: TextStream, opener: str = "") -> Step[None]:
        """Read a call behind `opener`, with its end tag. Raises Malformed if the tool is not offered."""
        yield from s.skip_all(self.opener)
        if (yield from s.skip_space()) in ("{", "["):
            yield from read_block(s, self.close)
            return
        if s.out.at_line_start and (yield from s.take_literal(self.close)):
            s.drop()
            return
        name, tag = yield from s.read_name("\n", *self._separators, self.key, self.close, self.opener)
        call = s.begin_call(name)
        while tag != self.close:
            if tag != self.key and (yield from take_tag(s, self.key, self.close)) == self.close:
                break
            key, _ = yield from s.read_name(self._key_end)
            yield from take_tag(s, self._value)
            yield from read_tagged(s, call, key, self._ends, as_json=True)
            tag = ""
        call.close()
