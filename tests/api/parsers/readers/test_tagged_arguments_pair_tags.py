"""Tags that pair keys with values, of any prefix."""

# ruff: noqa: E501

from __future__ import annotations

import pytest

from mlxrun.api.parsers.readers.tagged_arguments import PairTags
from mlxrun.api.parsers.text_stream import Malformed
from tests.helpers.parser_driver import Call
from tests.helpers.reader_driver import check_reader, run_reader

TAGS = PairTags("x_")
CITY = "<x_arg_key>city</x_arg_key><x_arg_value>A</x_arg_value>"
A = Call("get_weather", {"city": "A"})


@pytest.mark.parametrize(
    ("text", "items"),
    [
        ("now</x_tool_call>", [Call("now", {})]),
        (f"get_weather{CITY}</x_tool_call>", [A]),
        (f"\nget_weather\n{CITY}\n</x_tool_call>", [A]),
        (f"<x_tool_call>get_weather{CITY}</x_tool_call>", [A]),
        ('{"name": "get_weather", "arguments": {"city": "A"}}</x_tool_call>', [A]),
        ('write_file<x_arg_key>tags</x_arg_key><x_arg_value>[\\"a\\"]</x_arg_value></x_tool_call>', [Call("write_file", {"tags": ["a"]})]),
        ("write_file<x_arg_key>path</x_arg_key><x_arg_value>a</x_arg_value>b</x_arg_value></x_tool_call>", [Call("write_file", {"path": "a</x_arg_value>b"})]),
        ("</x_tool_call>", []),
    ],
)  # fmt: skip
def test_calls(text: str, items: list[Call]) -> None:
    check_reader(TAGS.read, text, [*items])


@pytest.mark.parametrize("text", ["rm</x_tool_call>", "so\n", f"get_weather please{CITY}"])
def test_what_is_no_call_is_given_back(text: str) -> None:
    run = run_reader(TAGS.read, text, 1)
    assert run.result is Malformed and run.items == [] and run.rest == text


def test_markers() -> None:
    assert {TAGS.opener, TAGS.close, TAGS.key} < set(TAGS.markers)
    assert all(marker.startswith(("<x_", "</x_")) for marker in TAGS.markers)
