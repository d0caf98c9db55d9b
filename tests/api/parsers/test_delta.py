"""Deltas, and the parser that leaves all text as it is."""

from __future__ import annotations

import dataclasses

import pytest

from mlxrun.api.parsers.delta import Delta, Parser, PlainParser


def test_a_delta_is_compared_by_value_and_cannot_be_changed() -> None:
    assert Delta("content", "a") == Delta("content", "a", 0, "", "") != Delta("reasoning", "a")
    with pytest.raises(dataclasses.FrozenInstanceError):
        Delta("content").text = "a"  # type: ignore[misc]


def test_the_plain_parser_returns_all_text_as_content() -> None:
    """Also what looks like markers, at once and unchanged."""
    parser: Parser = PlainParser()
    text = "<think>\n<tool_call>{}</tool_call> "
    assert [*parser.feed(text)] == [Delta("content", text)]
    assert [*parser.feed("")] == [] == [*parser.finish()]
    assert not parser.markers
