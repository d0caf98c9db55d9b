"""Values between tags: where they end, and when they come."""

from __future__ import annotations

import pytest

from mlxrun.api.parsers.readers.tagged_arguments import (
    InvokeTags,
    is_followed,
    read_tagged,
    read_value_text,
    take_tag,
)
from mlxrun.api.parsers.text_stream import Malformed, Step, StreamCut, TextStream
from tests.helpers.parser_driver import Call, make_tool
from tests.helpers.reader_driver import check_reader, run_reader

ENDS = {"</v>": ("<k>", "</c>")}


def _read(key: str, as_json: bool = False) -> object:
    def read(s: TextStream) -> Step[str]:
        call = s.begin_call("write_file")
        end = yield from read_tagged(s, call, key, ENDS, as_json=as_json)
        call.close()
        return end

    return read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a</v></c>", "a"),
        ("\na\n</v>\n</c>", "a"),
        ("\n\na\n\n</v> <k>", "\na\n"),
        ("a\n</v></c>", "a\n"),
        ("a</v>b</v></c>", "a</v>b"),
        ("</v></v></c>", "</v>"),
        ("a</v> </k></v>\n<k>", "a</v> </k>"),
        ("a</v>", "a"),
        ("a</v> <", "a"),
    ],
)
def test_a_string_ends_where_a_tag_may_follow(text: str, value: str) -> None:
    rest = text[text.rindex("</v>") + 4 :]
    run = check_reader(_read("content"), text, [Call("write_file", {"content": value})], rest)  # type: ignore[arg-type]
    assert run.result == "</v>"


def test_newlines_belong_to_a_value_beside_json() -> None:
    read = _read("content", as_json=True)
    check_reader(read, "\na\n</v></c>", [Call("write_file", {"content": "\na\n"})], "</c>")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("mode", "3</v></c>", 3),
        ("mode", "3</v>please", 3),  # nothing can continue a number
        ("tags", '["</v>", "b"]</v></c>', ["</v>", "b"]),
        ("meta", '{"a": "</v> x"}</v><k>', {"a": "</v> x"}),
        ("tags", "[1</v></c>", "[1"),  # broken, and certain to have ended
    ],
)
def test_other_values_are_typed_when_they_are_complete(key: str, text: str, value: object) -> None:
    rest = text[text.rindex("</v>") + 4 :]
    check_reader(_read(key), text, [Call("write_file", {key: value})], rest)  # type: ignore[arg-type]


def test_an_array_that_is_cut_off_at_an_end_tag_within_it_is_no_value() -> None:
    run = run_reader(_read("tags"), '["a </v>')  # type: ignore[arg-type]
    assert run.result is StreamCut and run.items == []


def test_a_string_comes_before_its_end() -> None:
    """All but what may begin the end tag."""
    run = run_reader(_read("content"), "abc</")  # type: ignore[arg-type]
    assert run == (StreamCut, [Call("write_file", {"content": "abc"})], "")


def test_what_follows_is_looked_at_and_not_taken() -> None:
    def read(s: TextStream) -> Step[tuple[bool, bool]]:
        as_far = yield from is_followed(s, ("<k>",))
        certain = yield from is_followed(s, ("<k>",), certain=True)
        return as_far, certain

    for text, found in (
        (" \n<k>", (True, True)),
        (" <x>", (False, False)),
        (" <", (True, False)),
        ("", (True, False)),
        (" " * 500 + "<k>", (False, False)),  # longer than any layout
    ):
        for size in (1, 0):
            run = run_reader(read, text, size)
            assert (run.result, run.rest) == (found, text)


def test_take_tag() -> None:
    for text, result in (("  <k>", "<k>"), ("<k", StreamCut), ("", StreamCut), ("<x>", Malformed)):
        assert run_reader(lambda s: take_tag(s, "<k>", "</c>"), text, 1).result == result


def test_read_bare_without_followers_ends_at_the_first_marker() -> None:
    assert run_reader(lambda s: read_value_text(s, {"|": ()}), "ab|c", 1).result == ("ab", "|")
    assert run_reader(lambda s: read_value_text(s, {"|": ("]",)}), "ab|c|]", 1).result == ("ab|c", "|")


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
        (
            f'"book">{_value("input", "x")}{_value("free", "y")}{END}',
            Call("book", {"input": "x", "free": "y"}),
        ),
        (
            f'"write_file">{_value("content", "a </x:parameter> b")}{END}',
            Call("write_file", {"content": "a </x:parameter> b"}),
        ),
    ],
)
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
