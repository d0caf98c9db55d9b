"""Reads arguments that a format tags one by one, each value as bare text up to an end marker.

A string is passed on as it comes, other values when they are complete. A newline behind the opening tag
belongs to the layout; then so does one before the end marker. A value may contain the end marker too. So the
marker counts only if a tag follows that may stand there, or the answer ends.

There are three layouts. Pairs are `<arg_key>k</arg_key><arg_value>v</arg_value>`: strings are written as they
are, all other values as JSON. The XML of Qwen3-Coder is `<parameter=key>value</parameter>`. Models forget its
end tag, so a value also ends where the next parameter or the end of the call begins a line.

The third has names as attributes: `<invoke name="f"><parameter name="k">v</parameter></invoke>`. Strings are
written as they are, all other values as JSON. DeepSeek's tags say of each value whether it is a string.
Models also write a tag that closes itself, and all arguments as one JSON object. That object stands in a
parameter that the tool does not have, or in none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlxrun.api.parsers.argument_writer import ArgumentWriter
from mlxrun.api.parsers.delta import SPACE
from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.json_call import read_arguments, read_block, write_arguments
from mlxrun.api.parsers.text_buffer import get_scanner
from mlxrun.api.parsers.text_stream import MAX_NAME, Malformed, Step, StreamCut, TextStream
from mlxrun.api.parsers.tool_schemas import ToolSchemas, ValueSchema, encode_bare_value, is_scalar

TEXT = ValueSchema({"type": "string"})
# The markers that may end a value, each with the texts of which one has to follow; without any, all may.
ValueEnds = Mapping[str, tuple[str, ...]]
OPENER = "<function="
_PARAMETER, _CLOSE = "<parameter=", "</function>"
_BLOCK_ENDS = ("</tool_call>", "</seed:tool_call>")
_NEXT = (OPENER, *_BLOCK_ENDS, "<tool_call>", "<seed:tool_call>")
_ENDS = {"</parameter>": (_PARAMETER, _CLOSE, *_NEXT), "\n" + _PARAMETER: (), "\n" + _CLOSE: _NEXT}


def take_tag(s: TextStream, *tags: str) -> Step[str]:
    """Take white space and one of `tags`; return the tag. StreamCut if the text ends within it, else
    Malformed."""
    tag = yield from s.skip(*tags)
    if not tag:
        rest = yield from s.peek(max(map(len, tags)))
        raise StreamCut if any(tag.startswith(rest) for tag in tags) else Malformed
    return tag


def read_tagged(
    s: TextStream,
    call: ArgumentWriter,
    key: str,
    ends: ValueEnds,
    *,
    as_json: bool = False,
    schema: ValueSchema | None = None,
) -> Step[str]:
    """Read one argument and return the marker that ended it. `as_json`: the format writes all values but
    strings as JSON. Then newlines around a value are part of it, and without a schema numbers and words are
    no strings. `schema`: the value's own; None: from the call's schema."""
    schema = call.schema.get_member(key) if schema is None else schema
    if schema.is_text_only and not schema.options:
        return (yield from _stream_tagged(s, call, key, ends, as_json))
    text, end = yield from read_value_text(s, ends)
    if not as_json and text.startswith("\n"):
        text = text[1:].removesuffix("\n")
    value = encode_bare_value(text, schema, guess=as_json)
    is_broken = value[0] == '"' and text.lstrip().startswith(("[", "{"))
    if is_broken and not (yield from is_followed(s, ends[end], certain=True)):
        raise StreamCut  # in an array or object that contains the end marker
    call.write_member(key, value)
    return end


def read_value_text(s: TextStream, ends: ValueEnds) -> Step[tuple[str, str]]:
    """Read the text of a value. Return it and the marker that ended it."""
    parts: list[str] = []
    while True:
        text, end = yield from s.read_until(*ends)
        parts.append(text)
        if (yield from is_followed(s, ends[end])) or (len(parts) == 1 and is_scalar(text)):
            return "".join(parts), end
        parts.append(end)


def _stream_tagged(
    s: TextStream, call: ArgumentWriter, key: str, ends: ValueEnds, as_json: bool
) -> Step[str]:
    call.open_text_member(key)
    writer = _TrimmingWriter(call)
    write, get_call = (call.write_text, lambda: call) if as_json else (writer.write, writer.get_call)
    scanner = get_scanner(*ends)
    while True:
        end = yield from s.stream_string(scanner, write, get_call)
        if (yield from is_followed(s, ends[end])):
            call.close_innermost()
            return end
        write(end)


def is_followed(s: TextStream, texts: tuple[str, ...], certain: bool = False) -> Step[bool]:
    """Tell whether one of `texts` follows behind white space, without taking it. If the answer ends first,
    the result is True unless it must be `certain`."""
    if not texts:
        return True
    at, size = 0, 1
    while True:
        rest = (yield from s.peek(at + size))[at:]
        if rest and rest[0] in SPACE and at < MAX_NAME:
            at += 1
        elif rest.startswith(texts):
            return True
        elif len(rest) < size or not any(text.startswith(rest) for text in texts):
            return not certain and any(text.startswith(rest) for text in texts)
        else:
            size += 1


class _TrimmingWriter:
    """Writes a string without a newline that begins it and, if there was one, another that ends it."""

    def __init__(self, call: ArgumentWriter) -> None:
        self._call = call
        self._started = self._trims = False
        self._newline = ""  # the last character, if it is a newline: it may end the string

    def write(self, text: str) -> None:
        if not self._started and text:
            self._started, self._trims = True, text.startswith("\n")
            text = text.removeprefix("\n")
        text = self._newline + text
        self._newline = "\n" if self._trims and text.endswith("\n") else ""
        self._call.write_text(text.removesuffix(self._newline))

    def get_call(self) -> ArgumentWriter | None:
        """The call, if text without newlines may be added to it without this writer."""
        return self._call if self._started and not self._newline else None


class PairTags:
    """The tags of one format of pairs. Their names begin with `prefix` and end with `suffix`. `separators`:
    the texts that may stand behind a tool's name."""

    def __init__(self, prefix: str = "", suffix: str = "", separators: tuple[str, ...] = ()) -> None:
        self.opener, self.close = f"<{prefix}tool_call{suffix}>", f"</{prefix}tool_call{suffix}>"
        self.key, self._key_end = f"<{prefix}arg_key{suffix}>", f"</{prefix}arg_key{suffix}>"
        self._value, self._value_end = f"<{prefix}arg_value{suffix}>", f"</{prefix}arg_value{suffix}>"
        self._separators = separators
        self.markers = (self.opener, self.close, self.key, self._value, self._key_end, self._value_end)
        self._ends = {self._value_end: (self.key, self.close, self.opener)}

    def read(self, s: TextStream, opener: str = "") -> Step[None]:
        """Read a call behind `opener`, with its end tag. Malformed if the tool is not offered."""
        if (yield from s.drop_empty_block(self.opener, self.close)):
            return
        if (yield from s.skip_space()) in ("{", "["):
            yield from read_block(s, self.close)
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


def make_pair_family(name: str, tags: PairTags, **fields: Any) -> ToolCallFamily:
    """Make the family of a format of pairs. `fields`: other fields of ToolCallFamily."""
    made = {"openers": (tags.opener,), "read": tags.read, "ends": (tags.close,), "markers": tags.markers}
    return ToolCallFamily(name=name, ends_reasoning=True, **{**made, **fields})


def read_function(s: TextStream) -> Step[None]:
    """Read a call behind `<function=`, with its end tag. Malformed if the tool is not offered."""
    call = s.begin_call((yield from _read_name(s)))
    if (yield from s.skip_space()) == "{":
        yield from read_arguments(s, call)
        yield from s.skip(_CLOSE)
        return
    tag = yield from take_tag(s, _PARAMETER, _CLOSE)
    while tag == _PARAMETER:
        key = yield from _read_name(s)
        end = (yield from read_tagged(s, call, key, _ENDS)).strip()
        tag = (
            end if end in (_PARAMETER, _CLOSE) else (yield from take_tag(s, _PARAMETER, _CLOSE, *_BLOCK_ENDS))
        )
    call.close()


def _read_name(s: TextStream) -> Step[str]:
    """Read the rest of a tag: a name and `>`, which some models forget at a line's end."""
    name, end = yield from s.read_name(">", "\n", "<")
    if end == "<" or not name:
        raise Malformed
    return name.strip("\"'")


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
