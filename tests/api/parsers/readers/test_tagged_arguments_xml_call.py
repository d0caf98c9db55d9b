"""The XML of Qwen3-Coder, behind `<function=`."""

# ruff: noqa: E501

from __future__ import annotations

import pytest

from mlxrun.api.parsers.readers.tagged_arguments import OPENER, read_function
from mlxrun.api.parsers.text_stream import Malformed
from tests.helpers.parser_driver import Call
from tests.helpers.reader_driver import check_reader, run_reader

FILE = "write_file"


@pytest.mark.parametrize(
    ("text", "call", "rest"),
    [
        ("now></function>x", Call("now", {}), "x"),
        ('"now">\n</function>', Call("now", {}), ""),
        ("get_weather>\n<parameter=city>\nA\n</parameter>\n</function>\n", Call("get_weather", {"city": "A"}), "\n"),
        ("get_weather\n<parameter=city>A</parameter></function>", Call("get_weather", {"city": "A"}), ""),
        ("write_file>\n<parameter=path>\np\n<parameter=mode>\n3\n</function>\n</tool_call>", Call(FILE, {"path": "p", "mode": 3}), "\n</tool_call>"),
        ("write_file><parameter=path>a\n</function> b</parameter></function>", Call(FILE, {"path": "a\n</function> b"}), ""),
        ("write_file><parameter=path>p</parameter>\n</tool_call>x", Call(FILE, {"path": "p"}), "x"),
        (' get_weather >{"city": "A"}</function>x', Call("get_weather", {"city": "A"}), "x"),
        ('now>\n{}', Call("now", {}), ""),
    ],
)  # fmt: skip
def test_calls(text: str, call: Call, rest: str) -> None:
    assert OPENER == "<function="
    check_reader(read_function, text, [call], rest)


@pytest.mark.parametrize("text", ["rm></function>", ">x", "now<x>", "now>please</function>", "<b>"])
def test_what_is_no_call_is_given_back(text: str) -> None:
    run = run_reader(read_function, text, 1)
    assert run.result is Malformed and run.items == [] and run.rest == text


def test_words_behind_a_value_end_the_call() -> None:
    run = run_reader(read_function, "add><parameter=a>1</parameter>please")
    assert run.items == [Call("add", {"a": 1})] and run.rest == "please"
