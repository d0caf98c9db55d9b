"""Calls in tags with names as attributes: `<invoke name="f"><parameter name="k">v</parameter></invoke>`.

Strings are written as they are, all other values as JSON. DeepSeek's tags say of each value whether it is a
string. Models also write a tag that closes itself, and all arguments as one JSON object. That object stands
in a parameter that the tool does not have, or in none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlxrun.api.parsers.argument_writer import ArgumentWriter
from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.json_call import read_arguments, write_arguments
from mlxrun.api.parsers.readers.tagged_arguments import TEXT, read_tagged, read_value_text, take_tag
from mlxrun.api.parsers.text_stream import Malformed, Step, TextStream
from mlxrun.api.parsers.tool_schemas import ToolSchemas, encode_bare_value

_IS_STRING, _IS_JSON = '" string="true', '" string="false'
_OBJECT_KEYS = frozenset(("arguments", "input", "parameters", "args"))


class InvokeTags:
    """The tags of one format. `prefix`: of their names. `blocks`: the tags around several calls. `find_name`:
    finds the tool that a name means."""

    def __init__(
        self, prefix: str = "", *blocks: str, find_name: Callable[[str, ToolSchemas], str] | None = None
    ) -> None:
        self._find_name = find_name
        self.opener = f"<{prefix}invoke name="
        self.close = f"</{prefix}invoke>"
        self._parameter = f"<{prefix}parameter name="
        self._parameter_end = f"</{prefix}parameter>"
        self._ends = {self._parameter_end: (self._parameter, self.close, self.opener, *blocks)}

    def read(self, s: TextStream, opener: str = "") -> Step[None]:
        """Read a call behind `opener`, with its end tag. Malformed if the tool is not offered."""
        name, closes_itself = yield from _read_attribute(s)
        call = s.begin_call(self._find_name(name, s.tools) if self._find_name else name)
        if closes_itself:
            call.close()
        elif (yield from s.skip_space()) == "{":
            yield from read_arguments(s, call)
            yield from s.skip(self.close)
        else:
            yield from self._read_parameters(s, call)

    def _read_parameters(self, s: TextStream, call: ArgumentWriter) -> Step[None]:
        tag = yield from take_tag(s, self._parameter, self.close)
        first = True
        while tag == self._parameter:
            key, _ = yield from _read_attribute(s)
            is_string = key.endswith(_IS_STRING)
            key = key.removesuffix(_IS_STRING).removesuffix(_IS_JSON)
            schema = call.schema.get_member(key)
            if is_string and not schema.excludes_text:
                schema = TEXT
            if first and key in _OBJECT_KEYS and key not in call.schema.keys:
                text, _ = yield from read_value_text(s, self._ends)
                tag = yield from take_tag(s, self._parameter, self.close)
                if tag == self.close and _write_object(call, text):
                    return
                call.write_member(key, encode_bare_value(text, schema, guess=True))
            else:
                yield from read_tagged(s, call, key, self._ends, as_json=True, schema=schema)
                tag = yield from take_tag(s, self._parameter, self.close)
            first = False
        call.close()


def make_invoke_family(name: str, block: tuple[str, ...], *prefixes: str, **fields: Any) -> ToolCallFamily:
    """Make the family of a format whose tags begin with one of `prefixes`. `block`: the tags around several
    calls, which are ignored wherever they stand. `fields`: other fields of ToolCallFamily."""
    readers = {tags.opener: tags for tags in (InvokeTags(prefix, *block) for prefix in prefixes)}
    made = {
        "openers": tuple(readers),
        "read": lambda s, opener: readers[opener].read(s),
        "ends": tuple(tags.close for tags in readers.values()),
        "ignored": block,
        "markers": (*filter(None, prefixes[:1]), *block),
    }
    return ToolCallFamily(name=name, **{**made, **fields})


def _write_object(call: ArgumentWriter, text: str) -> bool:
    """Write all arguments, if the text is an object."""
    if not text.strip().startswith(("{", '"{')):
        return False
    try:
        write_arguments(call, text)
    except Malformed:
        return False
    return True


def _read_attribute(s: TextStream) -> Step[tuple[str, bool]]:
    """Read the rest of a tag that names something, in quotes or without. True: the tag closes itself."""
    name, end = yield from s.read_name(">", "\n")
    if end == "\n":
        raise Malformed
    plain = name.removesuffix("/").rstrip()
    closes_itself = plain != name and (name[0] not in "\"'" or plain[-1:] == name[0])
    return (plain if closes_itself else name).strip("\"'"), closes_itself
