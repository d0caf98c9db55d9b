"""Text of which more comes: what readers see does not depend on how it was split."""

# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.api.parsers.text_buffer import MAX_NAME, Malformed, Step, StreamCut, TextBuffer
from tests.helpers.parser_driver import any_split
from tests.helpers.reader_driver import run_reader

Read = Callable[[TextBuffer], Step[Any]]

READS: dict[str, tuple[str, Read, Any, str]] = {  # text, reader, result, what is left
    "peek": ("abc", lambda s: s.peek(2), "ab", "abc"),
    "peek at the end": ("a", lambda s: s.peek(2), "a", "a"),
    "skip space": (" \n\tx", lambda s: s.skip_space(), "x", "x"),
    "skip space at the end": ("  ", lambda s: s.skip_space(), "", ""),
    "a literal": ("<ab>c", lambda s: s.take_literal("<a", "<ab>"), "<ab>", "c"),
    "a shorter literal": ("<abc", lambda s: s.take_literal("<a", "<ab>"), "<a", "bc"),
    "no literal": ("<b", lambda s: s.take_literal("<a", "<ab>"), "", "<b"),
    "a literal that is cut off": ("<ab", lambda s: s.take_literal("<ab>"), "", "<ab"),
    "a literal behind space": (" \n<a>", lambda s: s.skip("<a>"), "<a>", ""),
    "repeated literals": (" <a><b>\n<a>c", lambda s: s.skip_all("<a>", "<b>"), None, "c"),
    "a name": (" f <x>y", lambda s: s.read_name("<x>", "\n"), ("f", "<x>"), "y"),
    "a name with its space": (" f <x>", lambda s: s.read_name("<x>", strip=False), (" f ", "<x>"), ""),
    "a name without an end": ("f <x", lambda s: s.read_name("<x>"), StreamCut, "f <x"),
    "no name": ("f" * (MAX_NAME + 1) + "<x>", lambda s: s.read_name("<x>"), Malformed, "f" * (MAX_NAME + 1) + "<x>"),
    "letters": ("ab1", lambda s: s.peek_while(str.isalpha), "ab", "ab1"),
    "letters further on": ("ab1", lambda s: s.peek_while(str.isalpha, 1), "b", "ab1"),
    "letters without an end": ("ab", lambda s: s.peek_while(str.isalpha), StreamCut, "ab"),
    "letters that may end the text": ("ab", lambda s: s.peek_while(str.isalpha, required=False), "ab", "ab"),
    "too many letters": ("a" * 500, lambda s: s.peek_while(str.isalpha), Malformed, "a" * 500),
}  # fmt: skip


@pytest.mark.parametrize("what", READS)
def test_reads(what: str) -> None:
    """Whatever the chunks, the same result and the same text left."""
    text, read, result, rest = READS[what]
    for size in (1, 2, 5, 0):
        run = run_reader(read, text, size)
        assert (run.result, run.rest) == (result, rest), f"chunks of {size}"


@given(st.data())
def test_any_split(data: st.DataObject) -> None:
    text, read, result, rest = READS[data.draw(st.sampled_from(sorted(READS)))]
    buffer = TextBuffer()
    chunks = data.draw(any_split(text))
    steps = read(buffer)
    found: Any = None
    try:
        while True:
            next(steps)
            if chunks:
                buffer._text += chunks.pop(0)
            else:
                buffer.ended = True
    except StopIteration as done:
        found = done.value
    except (Malformed, StreamCut) as error:
        found = type(error)
    assert found == result
    assert buffer.rest + "".join(chunks) == rest or found in (Malformed, StreamCut)
    assert buffer.is_drained() is (buffer.rest == "")
