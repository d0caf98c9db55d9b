"""JSON calls without a marker: what begins one, and what stays text."""

from __future__ import annotations

import pytest

from mlxrun.api.parsers.readers.json_call import BARE, read_bare, read_bare_calls
from mlxrun.api.parsers.text_stream import Malformed, Step, TextStream
from tests.helpers.parser_driver import Call
from tests.helpers.reader_driver import check_reader, run_reader

F = '{"name": "get_weather", "arguments": {"city": "A"}}'
A = Call("get_weather", {"city": "A"})


def _behind(opener: str, anywhere: bool = False) -> object:
    def read(s: TextStream) -> Step[bool]:
        return (yield from read_bare(s, opener, anywhere))

    return read


@pytest.mark.parametrize(
    ("opener", "text", "rest"),
    [
        ("{", F[1:] + " x", "x"),
        ("[{", F[1:] + "] x", " x"),
        ("```", f"json\n{F}\n``` x", " x"),
        ("```", f"\n[{F}]\n```", ""),
        ("{", f'"type": "function", {F[1:]}', ""),
        ("{", '"arguments": {"city": "A"}, "name": "get_weather"}', ""),
    ],
)
def test_calls(opener: str, text: str, rest: str) -> None:
    assert opener in BARE
    assert check_reader(_behind(opener), text, [A], rest).result is True  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("opener", "text"),
    [
        ("{", '"name": "rm", "arguments": {}}'),
        ("{", '"name": "now"}'),
        ("{", '"name": "now", "description": "x"}'),
        ("{", '"type": "object"}'),
        ("{", '"arguments": [1]}'),
        ("{", "}"),
        ("[{", '"id": 1}]'),
        ("```", "python\nx = {}\n```"),
        ("```", "json\n[1]\n```"),
    ],
)
def test_other_text_is_given_back_at_once(opener: str, text: str) -> None:
    """Nothing is taken once the text cannot be a call."""
    for size in (1, 0):
        run = run_reader(_behind(opener), text, size)  # type: ignore[arg-type]
        assert (run.result, run.items, run.rest) == (Malformed, [], text)


def test_a_call_begins_a_line_or_stands_anywhere() -> None:
    def read(s: TextStream) -> Step[bool]:
        s.out.add("content", "Here: ")
        return (yield from read_bare(s, "{"))

    def read_anywhere(s: TextStream) -> Step[bool]:
        s.out.add("content", "Here: ")
        return (yield from read_bare(s, "{", anywhere=True))

    assert run_reader(read, F[1:]).result is Malformed
    assert run_reader(read_anywhere, F[1:]).items == ["Here:", A]


def test_an_answer_that_is_expected_to_be_calls() -> None:
    """There a call without arguments counts, and the brackets are not taken yet."""
    check_reader(read_bare_calls, f'[{F}, {{"name": "now"}}]', [A, Call("now", {})])
    for text in ('{"city": "A"}', '{"name": "rm"}', "[1]", "{}"):
        assert run_reader(read_bare_calls, text, 1).result is Malformed
