"""A call that is one JSON object, `{"name": ..., "arguments": {...}}`, in the variants that models write.

Members come in any order; arguments that come before the name wait for it. `arguments` may be missing, null
or JSON in a string. The object around them may lack its last brace.
"""

from __future__ import annotations

import json
import re

from mlxrun.parsers.argument_writer import ArgumentWriter
from mlxrun.parsers.readers.json_text import expect, raw_value, read_string, read_value
from mlxrun.parsers.text_stream import Malformed, Step, StreamCut, TextStream

ARGUMENTS = ("arguments", "parameters")


def read_calls(s: TextStream, ids: re.Pattern[str] | None = None) -> Step[bool]:
    """One object, or several in an array or one behind the other. What is no call is given back as text, with
    all that follows the last object; False: there was such."""
    array = yield from s.take_literal("[")
    whole = True
    while True:
        if array:
            yield from s.skip_space()
        if not (yield from read_call(s, ids)):
            s.return_as_text()
            whole = False
        char = yield from s.skip_space()
        if array and char == ",":
            s.take(1)
        elif array or char != "{":
            break
    if array and char == "]":
        s.take(1)
    if not whole:
        s.return_as_text()
    return whole


def read_call(s: TextStream, ids: re.Pattern[str] | None = None, id: str = "") -> Step[bool]:
    """One object. False: it is no call of an offered tool; all of it is taken and nothing was found.

    `ids`: what an `id` must look like to be the call's, if the format has one. It counts where it comes
    before the arguments: they do not wait for it. `id`: one that was found around the object.
    """
    yield from expect(s, "{")
    name: str | None = None
    held: str | None = None
    call: ArgumentWriter | None = None
    if (yield from s.skip_space()) == "}":
        s.take(1)
        return False
    while True:
        yield from expect(s, '"')
        key = yield from read_string(s)
        yield from expect(s, ":")
        char = yield from s.skip_space()
        if key == "name" and name is None and char == '"':
            s.take(1)
            name = yield from read_string(s)
        elif key == "function" and name is None and char == "{":
            return (yield from _nested(s, ids, id))
        elif key in ARGUMENTS and call is None and held is None and name is not None and name in s.tools:
            call = s.begin_call(name, id)
            yield from read_arguments(s, call)
        elif key in ARGUMENTS and call is None and held is None:
            held = yield from raw_value(s)
        elif key == "id" and ids is not None and char == '"':
            s.take(1)
            found = yield from read_string(s)
            id = found if ids.fullmatch(found) else id
        else:
            yield from raw_value(s)
        if held is not None and call is None and name is not None and name in s.tools:
            call = s.begin_call(name, id)
            whole_arguments(call, held)
        char = yield from s.skip_space()
        if call is not None and (char == "" or char not in ",}"):
            return True
        if (yield from expect(s, ",}")) == "}":
            break
    if call is None and name is not None and name in s.tools:
        call = s.begin_call(name, id)
        call.close()
    if call is not None:
        s.commit()
    return call is not None


def _nested(s: TextStream, ids: re.Pattern[str] | None, id: str) -> Step[bool]:
    """The call within `{"type": "function", "function": {...}}`, and what follows it there."""
    made = yield from read_call(s, ids, id)
    while (yield from s.skip_space()) not in ("", "}"):
        yield from expect(s, ",")
        yield from expect(s, '"')
        yield from read_string(s)
        yield from expect(s, ":")
        yield from raw_value(s)
    s.take(1)
    if made:
        s.commit()
    return made


def read_arguments(s: TextStream, call: ArgumentWriter) -> Step[None]:
    """The arguments themselves, into `call`, which is closed."""
    char = yield from s.skip_space()
    if char == "{":
        yield from read_value(s, call, call.schema)
        call.close()
    else:
        whole_arguments(call, (yield from raw_value(s)))


def whole_arguments(call: ArgumentWriter, text: str) -> None:
    """Arguments that are there as a whole: an object, null, or either of them in a string. Else Malformed."""
    text = text.strip()
    try:
        if text.startswith('"'):
            whole_arguments(call, json.loads(text))
        elif text.startswith("{"):
            check = TextStream.from_text(text)
            check.run(raw_value(check))
            if not check.is_drained():
                raise Malformed
            again = TextStream.from_text(text)
            again.run(read_value(again, call, call.schema))
            call.close()
        elif text in ("", "null", "[]"):
            call.close()
        else:
            raise Malformed
    except (StreamCut, ValueError):
        raise Malformed from None
