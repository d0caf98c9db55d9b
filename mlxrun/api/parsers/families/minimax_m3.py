"""MiniMax M3: `]<]minimax[>[<invoke name="f">]<]minimax[>[<k>v]<]minimax[>[</k>]<]minimax[>[</invoke>`.

A token stands before every tag, and each argument is an element of its own name. Arrays hold `<item>`
elements and objects an element for each member, so that values have the types of the schema; a member that
is repeated is an array. Each invocation is a call by itself; the tags around them are ignored wherever they
stand.
"""

from __future__ import annotations

from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.json_text import MAX_DEPTH
from mlxrun.api.parsers.readers.tagged_arguments import read_tagged, take_tag
from mlxrun.api.parsers.text_stream import Malformed, Step, TextStream
from mlxrun.api.parsers.tool_schemas import encode_bare_value, encode_json
from mlxrun.api.parsers.value_schema import ValueSchema

_TOKEN = "]<]minimax[>["
_TAG, _INVOKE, _CLOSE = f"{_TOKEN}<", f"{_TOKEN}<invoke name=", f"{_TOKEN}</invoke>"
_BLOCK = (f"{_TOKEN}<tool_call>", f"{_TOKEN}</tool_call>")


def _read(s: TextStream, opener: str) -> Step[None]:
    name, _ = yield from s.read_name(">", "\n")
    call = s.begin_call(name.strip("\"'"))
    while (yield from take_tag(s, _TAG, _CLOSE)) == _TAG:
        key = yield from _read_tag_name(s)
        schema = call.schema.get_member(key)
        if schema.is_text_only:
            yield from read_tagged(s, call, key, {f"{_TOKEN}</{key}>": (_TOKEN,)}, as_json=True)
        else:
            call.write_member(key, (yield from _read_value(s, key, schema, MAX_DEPTH)))
            s.commit()
    call.close()


def _read_tag_name(s: TextStream) -> Step[str]:
    name, _ = yield from s.read_name(">", "\n")
    if not name or name.startswith("/"):
        raise Malformed
    return name


def _read_value(s: TextStream, key: str, schema: ValueSchema, depth: int) -> Step[str]:
    """Read an element behind its opening tag, with its end tag. Return its value as JSON."""
    text, _ = yield from s.read_until(_TOKEN)
    end = f"</{key}>"
    if (yield from s.skip(end)):
        return _encode_leaf(text, schema)
    if text.strip() or not depth:
        raise Malformed
    members: list[tuple[str, str]] = []
    while (yield from take_tag(s, "<", end)) == "<":
        name = yield from _read_tag_name(s)
        inner = schema.get_items() if _is_array(schema, [name]) else schema.get_member(name)
        members.append((name, (yield from _read_value(s, name, inner, depth - 1))))
        yield from take_tag(s, _TOKEN)
    if _is_array(schema, [name for name, _ in members]):
        return f"[{', '.join(value for _, value in members)}]"
    found: dict[str, list[str]] = {}
    for name, value in members:
        found.setdefault(name, []).append(value)
    values = {name: each[0] if len(each) == 1 else f"[{', '.join(each)}]" for name, each in found.items()}
    return "{" + ", ".join(f"{encode_json(name)}: {value}" for name, value in values.items()) + "}"


def _is_array(schema: ValueSchema, names: list[str]) -> bool:
    """Whether elements of these names are the items of an array, and not the members of an object."""
    return "array" in schema.types or ("object" not in schema.types and set(names) == {"item"})


def _encode_leaf(text: str, schema: ValueSchema) -> str:
    """Encode a value without elements. An empty array or object has none either."""
    if not text.strip() and "string" not in schema.types and schema.types & {"array", "object"}:
        return "[]" if "array" in schema.types else "{}"
    return encode_bare_value(text, schema, guess=True)


FAMILY = ToolCallFamily(
    name="minimax_m3",
    detect=lambda template, tokens: _TOKEN in template or _TOKEN in tokens,
    openers=(_INVOKE,),
    read=_read,
    ignored=_BLOCK,
    ends=(_CLOSE,),
    ends_reasoning=True,
    markers=(_TOKEN, *_BLOCK),
)
