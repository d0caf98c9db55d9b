"""Families whose calls are JSON objects, and that need a reader of their own.

Apertus: `<|tools_prefix|>[{"f": {...}}, ...]<|tools_suffix|>`, objects whose key is the tool's name.

Phi-4-mini: `<|tool_call|>[{"name": ..., "arguments": {...}}]<|/tool_call|>` by the model's own template, or
`functools[...]` by its published prompt for tools.

xLAM: the whole answer is an array of calls. Some models write it in a code fence, or behind the opener of
another format. Other JSON becomes text at the first name that is not offered.

Plain JSON, for models of no known format: the whole answer is one call of an offered tool or an array of
calls. It may stand in a code fence. An answer that begins so is held back to its end. Other JSON becomes text
at its first key.
"""

from __future__ import annotations

from typing import Any

from mlxrun.api.parsers.family import ToolCallFamily, any_of, in_template, is_shown
from mlxrun.api.parsers.readers.json_call import (
    BARE,
    FENCE,
    make_json_family,
    read_arguments,
    read_bare,
    read_bare_calls,
    read_block,
    write_arguments,
)
from mlxrun.api.parsers.readers.json_text import expect, read_key, read_raw_value, read_string
from mlxrun.api.parsers.text_stream import Malformed, Step, TextStream
from mlxrun.api.parsers.tool_schemas import ToolSchemas, encode_json
from mlxrun.core.limited_json import load_json

_PHI, _PHI_END, _WORD = "<|tool_call|>", "<|/tool_call|>", "functools"
_PHI_WRONG = "</|tool_call|>"  # which the model also writes
_KEYS = frozenset(("name", "arguments", "parameters", "type", "function", "id"))


def _read_apertus(s: TextStream) -> Step[bool]:
    """Read an object behind its brace, of one call or several. False: a tool in it is not offered."""
    if (yield from s.skip_space()) == "}":
        s.take(1)
        return False
    while True:
        name = yield from read_key(s)
        if name not in s.tools:
            yield from read_raw_value(s)
            yield from expect(s, "}")
            return False
        yield from read_arguments(s, s.begin_call(name))
        char = yield from s.skip_space()
        if not char or char not in ",}":
            return True
        s.take(1)
        if char == "}":
            s.commit()
            return True


def _read_phi(s: TextStream, opener: str) -> Step[None]:
    if opener == _WORD and (yield from s.peek()) != "[":
        raise Malformed
    yield from read_block(s, _PHI_END, _PHI_WRONG)


def _read_xlam(s: TextStream, opener: str) -> Step[None]:
    fence = yield from s.skip(FENCE)
    if fence:
        yield from s.take_literal("json")
        yield from s.skip_space()
    if (yield from read_bare_calls(s)) and fence:
        yield from s.skip(FENCE)


def _read_plain(s: TextStream, opener: str) -> Step[None]:
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
    if text.startswith(FENCE):
        if not text.endswith(FENCE):
            raise Malformed
        text = text.removeprefix(FENCE).removeprefix("json").removesuffix(FENCE)
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


APERTUS = make_json_family(
    "apertus",
    {"<|tools_prefix|>": "<|tools_suffix|>"},
    read_object=_read_apertus,
    detect=is_shown("<|tools_prefix|>"),
    ends_reasoning=True,
    call="<|tools_prefix|>[{$json_name: $arguments}]<|tools_suffix|>",
)
PHI4_MINI = ToolCallFamily(
    name="phi4_mini",
    aliases=("phi4", "phi4_mini_json"),
    detect=any_of(in_template("<|tool|>"), in_template(f"{_WORD}[")),
    openers=(_PHI, _WORD),
    read=_read_phi,
    bare=BARE,
    read_bare=read_bare,
    ends=(_PHI_END, _PHI_WRONG),
    markers=(_PHI, _PHI_END),
    call='<|tool_call|>[{"name": $json_name, "arguments": $arguments}]<|/tool_call|>',
)
XLAM = make_json_family(
    "xlam",
    {"<tool_call>": "</tool_call>", "[TOOL_CALLS]": ""},
    aliases=("xlam2",),
    detect=any_of(in_template("xLAM"), in_template('"tool_call_name"')),
    read_start=_read_xlam,
    markers=("<tool_call>", "</tool_call>"),
    call='[{"name": $json_name, "arguments": $arguments}]',
)
PLAIN_JSON = ToolCallFamily(
    name="json",
    aliases=("plain",),
    read_start=_read_plain,
    call='{"name": $json_name, "arguments": $arguments}',
)
