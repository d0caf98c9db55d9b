"""For models of no known format: an answer that is nothing but JSON calls of offered tools.

One object or an array of them, in a code fence or not. An answer that begins so is held back to its end;
other JSON is passed on from its first key.
"""

from __future__ import annotations

from typing import Any

from mlxrun.api.parsers.family import ToolCallFamily
from mlxrun.api.parsers.readers.json_call import make_prefix_suffix, write_arguments
from mlxrun.api.parsers.readers.json_text import expect, read_string
from mlxrun.api.parsers.text_stream import Malformed, Step, TextStream
from mlxrun.api.parsers.tool_schemas import ToolSchemas, encode_json
from mlxrun.core.limited_json import load_json

_KEYS = frozenset(("name", "arguments", "parameters", "type", "function", "id"))
_FENCE = "```"


def _read(s: TextStream, opener: str) -> Step[None]:
    head = ""
    if (yield from s.skip_space()) == "`":
        head = yield from s.take_literal("```json\n", "```\n")
        if not head:
            return
        yield from s.skip_space()
    head += yield from s.take_literal("[")
    yield from expect(s, "{")
    yield from expect(s, '"')
    key = yield from read_string(s)
    if key not in _KEYS:
        return
    rest, _ = yield from s.read_until(required=False)
    text = f"{head}{{{encode_json(key)}{rest}".strip()
    if text.startswith(_FENCE):
        if not text.endswith(_FENCE):
            raise Malformed
        text = text.removeprefix(_FENCE).removeprefix("json").removesuffix(_FENCE)
    for name, arguments in _parse_calls(text, s.tools):
        write_arguments(s.begin_call(name), arguments)


def _parse_calls(text: str, tools: ToolSchemas) -> list[tuple[str, str]]:
    """Return name and arguments of each call. Raises Malformed if there is anything else."""
    try:
        value = load_json(text, strict=False)
    except ValueError:
        raise Malformed from None
    found = [_parse_call(item) for item in (value if isinstance(value, list) else [value])]
    if any(name not in tools for name, _ in found):
        raise Malformed
    return [(name, encode_json(arguments)) for name, arguments in found]


def _parse_call(item: Any) -> tuple[str, Any]:
    """Return name and arguments of one call; the name is "" if it is none."""
    if isinstance(item, dict) and isinstance(item.get("function"), dict):
        item = item["function"]
    if not isinstance(item, dict) or not isinstance(item.get("name"), str):
        return "", None
    arguments = item.get("arguments", item.get("parameters"))
    valid = arguments is None or isinstance(arguments, (dict, str))
    return (item["name"], arguments) if valid else ("", None)


FAMILY = ToolCallFamily(
    name="json",
    detect=lambda template, tokens: False,
    read_start=_read,
    aliases=("plain",),
    prefix_suffix=make_prefix_suffix(),
)
