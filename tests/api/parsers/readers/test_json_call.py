"""Calls that are JSON objects, in the variants that models write."""

from __future__ import annotations

import pytest

from mlxrun.api.parsers.readers.json_call import read_arguments, read_calls
from mlxrun.api.parsers.text_stream import Malformed, Step, TextStream
from tests.helpers.parser_driver import Call
from tests.helpers.reader_driver import check_reader, run_reader

A, NOW = Call("get_weather", {"city": "A"}), Call("now", {})
F = '{"name": "get_weather", "arguments": {"city": "A"}}'


@pytest.mark.parametrize(
    "text",
    [
        F,
        F.replace("arguments", "parameters"),
        F.replace('"get_weather"', '" get_weather "'),
        '{"arguments": {"city": "A"}, "name": "get_weather"}',
        '{"name": "get_weather", "arguments": "{\\"city\\": \\"A\\"}"}',
        '{"id": [1], "name": "get_weather", "arguments": {"city": "A"}, "x": {}}',
        '{"type": "function", "function": ' + F + ', "id": 1}',
    ],
)
def test_one_call(text: str) -> None:
    assert check_reader(read_calls, text, [A]).result is True


@pytest.mark.parametrize(
    "text", ["{}", '{"name": "rm", "arguments": {}}', '{"arguments": {}}', '{"name": 1}']
)
def test_an_object_that_is_no_call_is_text(text: str) -> None:
    assert check_reader(read_calls, f"{text} x", [f"{text} "], "x").result is False


def test_calls_without_arguments() -> None:
    for arguments in (
        "",
        ', "arguments": null',
        ', "arguments": ""',
        ', "arguments": []',
        ', "arguments": {}',
    ):
        check_reader(read_calls, f'{{"name": "now"{arguments}}}', [NOW])


def test_several_calls() -> None:
    n = '{"name": "now"}'
    for text in (f"[{F}, {n}]", f"{F}\n{n}", f"{F}{n}"):
        assert check_reader(read_calls, text, [A, NOW]).result is True
    text = f'[{n}, {{"name": "rm"}}, {n}]'
    run = check_reader(read_calls, f"{text} x", [NOW, ', {"name": "rm"}', NOW, "]"], " x")
    assert run.result is False


def test_brackets_that_were_taken() -> None:
    for opened, text in (("{", F[1:]), ("[{", F[1:] + "]")):
        check_reader(lambda s, opened=opened: read_calls(s, opened=opened), text, [A])  # type: ignore[misc]


def test_arguments_alone() -> None:
    def read(s: TextStream) -> Step[None]:
        yield from read_arguments(s, s.begin_call("get_weather"))

    check_reader(read, ' {"city": "A"}]', [A], "]")
    check_reader(read, '"{\\"city\\": \\"A\\"}"', [A])
    for text in ("[1]", '"x"', "3,"):
        assert run_reader(read, text).result is Malformed
