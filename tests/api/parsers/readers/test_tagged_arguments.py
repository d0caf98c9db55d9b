"""Values between tags: where they end, and when they come."""

from __future__ import annotations

import pytest

from mlxrun.api.parsers.readers.tagged_arguments import is_followed, read_tagged, read_value_text, take_tag
from mlxrun.api.parsers.text_stream import Malformed, Step, StreamCut, TextStream
from tests.helpers.parser_driver import Call
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
