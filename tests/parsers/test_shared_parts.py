"""The parts that all parsers share: markers in pieces, typed values, what flows at once, and choosing."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.parsers.answer_parser import AnswerParser
from mlxrun.parsers.marker_scanner import get_scanner
from mlxrun.parsers.registry import TOOL_CALL_FAMILIES, find_reasoning_family, find_tool_call_family
from mlxrun.parsers.tool_schemas import (
    ToolSchemas,
    ValueSchema,
    encode_bare_value,
    repair_string,
    repair_value,
)
from tests.helpers.parser_corpus.core import coder, hermes
from tests.helpers.parser_driver import Call, function, make_tool_call_parser, merged, splits

# -- markers ----------------------------------------------------------------------------------------


def _scan(markers: tuple[str, ...], pieces: list[str]) -> list[tuple[str, str | None]]:
    """All that a scanner finds, as the stream uses it: text, and the marker behind it."""
    scan, text, found, plain = get_scanner(*markers), "", [], ""
    for i, piece in enumerate([*pieces, ""]):
        text += piece
        ended = i == len(pieces)
        while True:
            stop, marker = scan.find(text, 0, ended)
            plain += text[:stop]
            text = text[stop:]
            if marker is None:
                break
            found.append((plain, marker))
            plain, text = "", text[len(marker) :]
    return [*found, (plain + text, None)]


@given(st.data())
def test_markers_do_not_depend_on_pieces(data: st.DataObject) -> None:
    """A56: markers that begin alike, hold one another or overlap: the first counts, then the longest."""
    letters = st.text("ab<", min_size=1, max_size=4)
    markers = tuple(data.draw(st.lists(letters, min_size=1, max_size=4, unique=True)))
    text = data.draw(st.text("ab<x", max_size=20))
    pattern = "|".join(re.escape(m) for m in sorted(markers, key=len, reverse=True))
    edges = [0, *(edge for m in re.finditer(pattern, text) for edge in m.span()), len(text)]
    spans = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    want = [*zip(spans[0::2], [*spans[1::2], None], strict=True)]
    assert _scan(markers, data.draw(splits(text))) == want


def test_only_what_may_become_a_marker_is_held() -> None:
    scan = get_scanner("<tool_call>", "<|x|>")
    for text, held in [("a <", 2), ("a <t", 2), ("a <to", 2), ("a <tool_call", 2), ("a <b", 4), ("a <|", 2)]:
        assert scan.find(text, 0, False) == (held, None)
        assert scan.find(text, 0, True) == (len(text), None)


# -- typed values -----------------------------------------------------------------------------------

ROOT = {"$defs": {"n": {"type": "number"}, "list": {"type": "array", "items": {"$ref": "#/$defs/n"}}}}


@pytest.mark.parametrize(
    ("text", "schema", "want"),
    [
        ("3", {"type": "string"}, '"3"'),
        (" 3 ", {"type": "string"}, '" 3 "'),
        ("true", {"type": "string"}, '"true"'),
        ("null", {"type": "string"}, '"null"'),
        ('{"a": 1}', {"type": "string"}, '"{\\"a\\": 1}"'),
        ("3", {"type": "number"}, "3"),
        ("3.0", {"type": "number"}, "3.0"),
        ("3.10", {"type": "number"}, "3.10"),
        ("-1.5e-3", {"type": "number"}, "-1.5e-3"),
        (" 3.0\n", {"type": "number"}, "3.0"),
        ("+3", {"type": "number"}, "3"),
        (".5", {"type": "number"}, "0.5"),
        ("5.", {"type": "number"}, "5"),
        ("1_000", {"type": "number"}, '"1_000"'),
        ("nan", {"type": "number"}, '"nan"'),
        ("Infinity", {"type": "number"}, '"Infinity"'),
        ("three", {"type": "number"}, '"three"'),
        ("3.0", {"type": "integer"}, "3"),
        ("3.5", {"type": "integer"}, "3.5"),
        ("12345678901234567890", {"type": "integer"}, "12345678901234567890"),
        ("true", {"type": "boolean"}, "true"),
        ("False", {"type": "boolean"}, "false"),
        ("yes", {"type": "boolean"}, '"yes"'),
        ("null", {"type": "null"}, "null"),
        ("None", {"type": ["integer", "null"]}, "null"),
        ("null", {"type": "integer"}, "null"),
        ("null", {"type": ["string", "null"]}, "null"),
        ("null", {"type": "string", "nullable": True}, "null"),
        ("3", {"type": ["string", "integer"]}, "3"),
        ("3", {"anyOf": [{"type": "string"}, {"type": "number"}]}, "3"),
        ("x", {"anyOf": [{"type": "string"}, {"type": "number"}]}, '"x"'),
        ("x", {"oneOf": [{"type": "integer"}, {"type": "null"}]}, '"x"'),
        ("[1, 2.0]", {"type": "array"}, "[1, 2.0]"),
        ("[1,2]", {"type": "string"}, '"[1,2]"'),
        ('["1", 2]', {"type": "array", "items": {"type": "integer"}}, "[1, 2]"),
        ("[1, 2]", {"type": "array", "items": {"type": "string"}}, '["1", "2"]'),
        ("['a', None, (1,)]", {"type": "array"}, '["a", null, [1]]'),
        ('"[1, 2]"', {"type": "array"}, "[1, 2]"),
        ("[1, 2", {"type": "array"}, '"[1, 2"'),
        ("a, b", {"type": "array"}, '"a, b"'),
        ('{"a": "1"}', {"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a": 1}'),
        ("{'a': True}", {"type": "object"}, '{"a": true}'),
        ('{"a": 1}', {"type": "array"}, '"{\\"a\\": 1}"'),
        ("[NaN]", {"type": "array"}, '"[NaN]"'),
        (r"['\d+', 'a']", {"type": "array"}, r'["\\d+", "a"]'),  # an escape of which Python would warn
        ("[" * 5000, {"type": "array"}, json.dumps("[" * 5000)),
        ("fast", {"enum": ["fast", "slow"]}, '"fast"'),
        ("\nfast\n", {"enum": ["fast", "slow"]}, '"fast"'),
        ("2", {"enum": [1, 2, "2x"]}, "2"),
        ("2", {"enum": ["1", "2"]}, '"2"'),
        ("True", {"enum": [True, None]}, "true"),
        ("other", {"enum": ["fast", "slow"]}, '"other"'),
        ("7", {"const": 7}, "7"),
        ("3.0", {"$ref": "#/$defs/n"}, "3.0"),
        ('["1.0"]', {"$ref": "#/$defs/list"}, "[1.0]"),
        ("x", {"$ref": "#/$defs/none"}, '"x"'),
        ("x", {"$ref": "https://example.org/x"}, '"x"'),
        ("3", {}, '"3"'),
        ("[3]", {}, "[3]"),
        ('{"a": 3.0}', {}, '{"a": 3.0}'),
        ("(3)", {}, '"(3)"'),
        ("", {"type": "integer"}, '""'),
        ("", {}, '""'),
    ],
)
def test_typed(text: str, schema: Any, want: str) -> None:
    """A58: numbers stay as written, strings stay strings, arrays and objects are parsed once."""
    assert encode_bare_value(text, ValueSchema(schema, ROOT)) == want


@pytest.mark.parametrize(
    ("text", "want"),
    [("3", "3"), ("3.0", "3.0"), ("true", "true"), ("null", "null"), ("x", '"x"'), ("+3", '"+3"')],
)
def test_guessed(text: str, want: str) -> None:
    """Formats whose templates write all but strings as JSON."""
    assert encode_bare_value(text, ValueSchema({}), guess=True) == want


def test_mended() -> None:
    """A58: a string where the schema has none is what it says; where strings are allowed it stays one."""
    assert repair_string("[1]", ValueSchema({"type": "array"})) == "[1]"
    assert repair_string("[1]", ValueSchema({"type": ["array", "string"]})) == '"[1]"'
    assert repair_string("[1]", ValueSchema({})) == '"[1]"'
    schema = ValueSchema(
        {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}}}}
    )
    assert repair_value([{"n": "1"}, {"n": 2}, {"m": "3"}], schema) == [{"n": 1}, {"n": 2}, {"m": "3"}]


def test_half_a_surrogate_is_valid_utf8_all_the_same() -> None:
    assert encode_bare_value('["\\ud800"]', ValueSchema({"type": "array"})) == '["\\ud800"]'


def test_tools_of_odd_forms_offer_nothing() -> None:
    tools = ToolSchemas([{"type": "web_search"}, {"function": {"name": 3}}, function("a", {}), {"name": "b"}])
    assert tools.names == {"a", "b"}
    assert not ToolSchemas(None)


# -- what flows at once -----------------------------------------------------------------------------

PLAIN = [f" word{i}" if i % 7 else "\n" for i in range(10_000)]


@pytest.mark.parametrize("name", [family.name for family in TOOL_CALL_FAMILIES])
def test_plain_text_wakes_nobody(name: str) -> None:
    """A54, A61: of ten thousand plain tokens only the first few are looked at, and no space is eaten.

    Families whose markers begin with a letter look up where that letter comes.
    """
    machine = make_tool_call_parser(name)
    begun = {marker[0] for marker in find_tool_call_family(name).openers} & set("".join(PLAIN))
    deltas = [delta for token in PLAIN for delta in machine.feed(token)]
    assert "".join(delta.text for delta in deltas) == "".join(PLAIN).rstrip()
    assert machine.reads <= 3 or begun
    assert [*machine.finish()] == []


def test_a_marker_wakes() -> None:
    """The twin of the test above: the counter counts."""
    machine = make_tool_call_parser("hermes")
    for token in ["a"] * 10 + ["<"] * 10:
        machine.feed(token)
    assert machine.reads == 11


@pytest.mark.parametrize("opened", [False, True])
def test_a_thought_flows_too(opened: bool) -> None:
    """A61, A62."""
    parser = AnswerParser(None, find_reasoning_family("think"), opened=opened)
    before = [] if opened else [*parser.feed("<think>")]
    deltas = [delta for token in PLAIN[1:] for delta in parser.feed(token)]
    assert not before
    assert {delta.kind for delta in deltas} == {"reasoning"}
    assert parser.reads <= 3


def test_text_is_not_held_back() -> None:
    """Only white space and what may become a marker wait; every other character is given at once."""
    parser = make_tool_call_parser("hermes")
    given = ""
    text = "a < b, x<tool_x> and </tool_call> <fun\n\nend <tool_call"
    for i, char in enumerate(text, 1):
        given += "".join(delta.text for delta in parser.feed(char))
        seen = text[:i]
        held = seen.rstrip(" \n")
        for marker in ("<tool_call>", "<function=", "<TOOLCALL>"):
            for size in range(1, len(marker)):
                if seen.endswith(marker[:size]):
                    held = seen[: len(seen) - size].rstrip(" \n")
        assert given == held
    assert given + "".join(delta.text for delta in parser.finish()) == text


@pytest.mark.parametrize("write", [hermes, coder])
def test_a_string_comes_as_it_is_written(write: Any) -> None:
    """A55: the name with the first argument; then what has come of the text is passed on, but for an escape
    or an end tag that has begun."""
    content = "line one\n" * 50
    text = write("write_file", {"path": "p", "content": content})
    start, end = text.index("line one"), text.rindex("line one")
    parser = make_tool_call_parser("hermes")
    fragments, name = "", ""
    for i, char in enumerate(text, 1):
        for delta in parser.feed(char):
            assert delta.kind == "call"
            name += delta.name
            fragments += delta.text
        if start < i < end:
            assert name == "write_file"
            so_far = json.loads(fragments + '"}')["content"]
            assert content[: len(so_far)] == so_far
            assert text[start:i].count("line one") == so_far.count("line one")
    assert json.loads(fragments) == {"path": "p", "content": content}


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ('[TOOL_CALLS][{"name": "now", "id": "abcdef123", "arguments": {}}]', ["abcdef123"]),
        ('[TOOL_CALLS][{"id": "abcdef123", "arguments": {}, "name": "now"}]', ["abcdef123"]),
        ('[TOOL_CALLS][{"id": "abcdef123", "function": {"name": "now", "arguments": {}}}]', ["abcdef123"]),
        ('[TOOL_CALLS][{"id": "call 1", "name": "now"}]', ["ef0123450"]),
        ('[TOOL_CALLS][{"id": 123456789, "name": "now"}]', ["ef0123450"]),
        (
            '[TOOL_CALLS][{"id": "a1b2c3d4e", "name": "now"}, {"id": "a1b2c3d4e", "name": "now"}]',
            ["a1b2c3d4e", "ef0123450"],
        ),
        # Behind the arguments it comes too late: they are out by then.
        ('[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcdef123"}]', ["ef0123450"]),
        ("[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]now[ARGS]{}", ["ef0123450", "ef0123451"]),
        ("[TOOL_CALLS]now[CALL_ID]abcdef123[ARGS]{}", ["abcdef123"]),
    ],
)
def test_ids_of_mistral(text: str, ids: list[str]) -> None:
    """The model's own; else nine letters and digits, as its templates refuse any other."""
    for name in ("mistral", "mistral_v3"):
        count = itertools.count()
        parser = make_tool_call_parser(name, new_id=lambda: f"call_0123456789abcdef01234{next(count) + 50}")  # noqa: B023
        deltas = [*parser.feed(text), *parser.finish()]
        assert [delta.id for delta in deltas if delta.id] == ids


def test_ids_of_others_are_as_they_were_made() -> None:
    parser = make_tool_call_parser("hermes", new_id=lambda: "call_0123456789abcdef01234567")
    deltas = parser.feed('<tool_call>{"id": "abcdef123", "name": "now"}</tool_call>')
    assert [delta.id for delta in deltas if delta.id] == ["call_0123456789abcdef01234567"]


def test_a_call_in_one_piece_is_whole() -> None:
    """A56: complete in one coarse piece, before the end."""
    deltas = make_tool_call_parser("hermes", new_id=lambda: "id0").feed(hermes("add", {"a": 1, "b": 2.0}))
    assert merged(deltas) == [Call("add", {"a": 1, "b": 2.0})]


def test_ids() -> None:
    """`call_` and 24 hexadecimal digits, all different."""
    parser = make_tool_call_parser("hermes")
    deltas = [*parser.feed(hermes("now", {}) * 20), *parser.finish()]
    ids = [delta.id for delta in deltas if delta.id]
    assert len(set(ids)) == 20
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", i) for i in ids)


def test_long_arguments_are_read_in_linear_time() -> None:
    """A string of newlines, each of which is escaped alone, and arguments that wait for their name."""
    content = "\n" * 30_000
    for text in (
        '<tool_call>{"name": "write_file", "arguments": {"content": "' + content + '"}}</tool_call>',
        hermes("write_file", {"content": content}),
        coder("write_file", {"content": content}),
    ):
        parser = make_tool_call_parser("hermes", new_id=lambda: "id0")
        assert merged([*parser.feed(text), *parser.finish()]) == [Call("write_file", {"content": content})]
