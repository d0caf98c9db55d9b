"""Hidden characters are written out, messages are short lines, and JSON stays JSON."""

from __future__ import annotations

import json

import pytest

from mlxrun.core.errors import MAX_MESSAGE, shorten_message
from mlxrun.core.visible_text import dump_json, make_line, make_message, make_visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;t\x07", r"\x1b]0;t\x07"),
        ("a\tb\rc\x7f", r"a\tb\rc\x7f"),
        ("\x9b31m\x85", r"\x9b31m\x85"),
        ("\u202ea\u2069\u200f\u061c", r"\u202ea\u2069\u200f\u061c"),
        ("\u2028\ufeff", r"\u2028\ufeff"),
        ("\ud800x\udfff", r"\ud800x\udfff"),
        ("a\nb", "a\nb"),
        ("ä € 中 😀 é \\x1b", "ä € 中 😀 é \\x1b"),
    ],
)
def test_hidden_characters_are_written_out(text: str, shown: str) -> None:
    assert make_visible(text) == shown
    assert make_line(text) == shown.replace("\n", "\\n")


def test_a_message_is_cut_in_its_middle() -> None:
    """Its beginning and its end stay, and it says how much is missing."""
    assert make_message("a" * MAX_MESSAGE) == "a" * MAX_MESSAGE
    for text in ("a" * 10**6, "\x1b" * 10_000, "😀" * 5_000, "a\n" * 10_000, "\ud800" * 9_000):
        message = make_message(f"file: {text} is wrong")
        assert len(message.encode()) <= MAX_MESSAGE and "\n" not in message
        assert message.startswith("file: ") and message.endswith(" is wrong")
        assert "characters left out" in message
    message = shorten_message("a" * 1_000_000)
    assert f"({1_000_000 - message.count('a', 0, 975) - 970:,} characters left out)" in message


@pytest.mark.parametrize("indent", [None, 2])
def test_json_that_is_shown_is_the_same_json(indent: int | None) -> None:
    value = {"a\x1b\x9b": ["\u202e\x7f\n\t", "ä😀", "\ud800"], "b": 1}
    text = dump_json(value, indent)
    assert json.loads(text) == value
    assert make_visible(text) == text and "ä😀" in text
