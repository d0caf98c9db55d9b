"""Errors about a translated body name the field that the client sent."""

from __future__ import annotations

import pytest

from mlxrun.core.errors import RequestError
from mlxrun.core.field_errors import find_source, rename_field

SOURCES = {
    "messages": "input",
    "messages[1]": "input[2]",
    "messages[1].content": "input[2].output",
    "tools[0].function": "tools[3]",
}


@pytest.mark.parametrize(
    ("param", "expected"),
    [
        ("messages[1].content[0].text", ("input[2].output", "[0].text")),
        ("messages[1].role", ("input[2]", ".role")),
        ("messages[10].role", ("input", "[10].role")),
        ("messages", ("input", "")),
        ("tools[0].function.name", ("tools[3]", ".name")),
        ("tools[0]", ("", "tools[0]")),
        ("temperature", ("", "temperature")),
        ("", ("", "")),
    ],
)
def test_the_longest_known_path_is_the_source(param: str, expected: tuple[str, str]) -> None:
    assert find_source(param, SOURCES) == expected


@pytest.mark.parametrize(
    ("text", "param", "expected"),
    [
        ("a.b: is empty", "a.b", "c: is empty"),
        ("it is empty", "a.b", "it is empty"),
        ("a.b2: is empty", "a.b", "a.b2: is empty"),
        ("is empty", None, "is empty"),
    ],
)
def test_the_text_changes_with_the_field(text: str, param: str | None, expected: str) -> None:
    error = RequestError(text, param=param)
    rename_field(error, "c")
    assert (str(error), error.param) == (expected, "c")
