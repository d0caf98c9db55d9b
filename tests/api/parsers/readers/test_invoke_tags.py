"""Tags with names as attributes, of any prefix."""

# ruff: noqa: E501

from __future__ import annotations

import pytest

from mlxrun.api.parsers.readers.invoke_tags import InvokeTags
from mlxrun.api.parsers.text_stream import Malformed
from tests.helpers.parser_driver import Call, make_tool
from tests.helpers.reader_driver import check_reader, run_reader

A = Call("get_weather", {"city": "A"})
END = "</x:invoke>"


def _value(key: str, value: str, more: str = "") -> str:
    return f'<x:parameter name="{key}"{more}>{value}</x:parameter>'


@pytest.mark.parametrize(
    ("text", "call"),
    [
        (f'"now">{END}', Call("now", {})),
        (f"get_weather>\n{_value('city', 'A')}\n{END}", A),
        (f"'get_weather'>{_value('city', 'A')}{END}", A),
        (f'"add">{_value("a", "1.0")}{_value("b", "2")}{END}', Call("add", {"a": 1.0, "b": 2})),
        ('"book">' + _value("free", "3", ' string="true"') + END, Call("book", {"free": "3"})),
        ('"book">' + _value("free", "3", ' string="false"') + END, Call("book", {"free": 3})),
        ('"now"/>', Call("now", {})),
        ("now />", Call("now", {})),
        (f'"get_weather">\n{{"city": "A"}}\n{END}', A),
        ('"get_weather">' + _value("arguments", '{"city": "A"}') + END, A),
        ('"get_weather">' + _value("input", '"{\\"city\\": \\"A\\"}"') + END, A),
        ('"book">' + _value("input", "x") + _value("free", "y") + END, Call("book", {"input": "x", "free": "y"})),
        ('"write_file">' + _value("content", "a </x:parameter> b") + END, Call("write_file", {"content": "a </x:parameter> b"})),
    ],
)  # fmt: skip
def test_calls(text: str, call: Call) -> None:
    tags = InvokeTags("x:")
    assert tags.opener == "<x:invoke name=" and tags.close == END
    check_reader(tags.read, text, [call])


def test_an_argument_of_that_name_is_one() -> None:
    tool = make_tool("run", {"input": {"type": "object"}})
    check_reader(
        InvokeTags("x:").read, f'"run">{_value("input", "{}")}{END}', [Call("run", {"input": {}})], "", [tool]
    )


def test_the_tags_around_calls_may_follow_a_value() -> None:
    text = f'"get_weather">{_value("city", "A")}</block>'
    run = run_reader(InvokeTags("x:", "</block>").read, text)
    assert run.items == [A] and run.rest == "</block>"
    without = run_reader(InvokeTags("x:").read, text)
    assert without.items == [Call("get_weather", {"city": "A</x:parameter></block>"})]


@pytest.mark.parametrize("text", ['"rm"/>', '"no\nw">', f'"now">please{END}'])
def test_what_is_no_call_is_given_back(text: str) -> None:
    run = run_reader(InvokeTags("x:").read, text, 1)
    assert run.result is Malformed and run.items == [] and run.rest == text
