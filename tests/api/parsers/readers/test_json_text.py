"""JSON as models write it: what is passed on is valid, as early as it is certain."""

# ruff: noqa: E501

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.api.parsers.readers.json_text import (
    expect,
    read_atom,
    read_key,
    read_raw_value,
    read_string,
    read_value,
)
from mlxrun.api.parsers.text_stream import Malformed, Step, StreamCut, TextStream
from tests.helpers.parser_driver import Call, make_tool
from tests.helpers.reader_driver import run_reader

ANY = [make_tool("f", {})]
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=8,
)  # fmt: skip


def _read_arguments(s: TextStream) -> Step[None]:
    call = s.begin_call("f")
    yield from read_value(s, call, call.schema)
    call.close()


@given(st.dictionaries(st.text(), VALUES, max_size=3), st.integers(1, 5), st.booleans())
def test_any_json(value: dict[str, Any], size: int, ascii_only: bool) -> None:
    """Read into a call or to its end, in chunks of any size."""
    text = json.dumps(value, ensure_ascii=ascii_only)
    run = run_reader(_read_arguments, text, size, ANY)
    assert json.dumps(run.items) == json.dumps([Call("f", json.loads(text))])
    raw = run_reader(read_raw_value, text + ",", size)
    assert json.loads(raw.result) == json.loads(text) and raw.rest == ","


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": True, "b": None}', {"a": True, "b": None}),
        ('{"a": "x\ny"}', {"a": "x\ny"}),
        (r'{"a": "it\'s \d"}', {"a": r"it's \d"}),
        (r'{"a": "\ud83cx"}', {"a": "\ufffdx"}),
        ("{ }", {}),
    ],
)
def test_what_is_almost_json_is_repaired(text: str, value: Any) -> None:
    for size in (1, 3, 0):
        assert run_reader(_read_arguments, text, size, ANY).items == [Call("f", value)]


def test_what_came_before_an_error_or_a_cut_is_passed_on() -> None:
    for text, result, value in (
        ('{"a": [1, {"b": "x', StreamCut, {"a": [1, {"b": "x"}]}),
        ('{"a": 1, "b": 2', StreamCut, {"a": 1}),
        ('{"a": 1, b: 2}', Malformed, {"a": 1}),
    ):
        run = run_reader(_read_arguments, text, 1, ANY)
        assert (run.result, run.items[0]) == (result, Call("f", value))


def test_parts() -> None:
    assert run_reader(read_string, 'a\\"b" c', 1).result == 'a"b'
    assert run_reader(read_key, ' "k" : 1', 1).result == "k"
    assert run_reader(read_atom, "-1.5e3,", 1).result == "-1.5e3"
    assert run_reader(read_atom, "None]", 1).result == "null"
    assert run_reader(read_atom, "12", 1).result is StreamCut
    assert run_reader(read_atom, "1.2.3,", 1).result is Malformed
    assert run_reader(lambda s: expect(s, ",}"), "  }", 1).result == "}"
    assert run_reader(lambda s: expect(s, ",}"), "  ]", 1).result is Malformed
    assert run_reader(lambda s: expect(s, ",}"), "  ", 1).result is StreamCut


def test_a_value_nested_too_deeply_is_refused() -> None:
    assert run_reader(read_raw_value, "[" * 70 + "]" * 70, 0).result is Malformed
    assert run_reader(read_raw_value, "[" * 60 + "]" * 60, 0).result == "[" * 60 + "]" * 60
