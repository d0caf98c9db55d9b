"""Markers in text that is split anywhere."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from mlxrun.api.parsers.text_buffer import get_scanner
from tests.helpers.parser_driver import any_split


def _scan(markers: tuple[str, ...], chunks: list[str]) -> list[tuple[str, str | None]]:
    """Find all markers as the stream does: return each with the text before it."""
    scan, text, found, plain = get_scanner(*markers), "", [], ""
    for i, chunk in enumerate([*chunks, ""]):
        text += chunk
        ended = i == len(chunks)
        while True:
            stop, marker = scan.find(text, 0, ended)
            plain += text[:stop]
            text = text[stop:]
            if marker is None:
                break
            found.append((plain, marker))
            plain, text = "", text[len(marker) :]
    return [*found, (plain + text, None)]


@given(st.data())
def test_markers_do_not_depend_on_how_the_text_is_split(data: st.DataObject) -> None:
    """Markers that begin alike, contain one another or overlap: the first counts, then the longest."""
    letters = st.text("ab<", min_size=1, max_size=4)
    markers = tuple(data.draw(st.lists(letters, min_size=1, max_size=4, unique=True)))
    text = data.draw(st.text("ab<x", max_size=20))
    pattern = "|".join(re.escape(m) for m in sorted(markers, key=len, reverse=True))
    edges = [0, *(edge for m in re.finditer(pattern, text) for edge in m.span()), len(text)]
    spans = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
    expected = [*zip(spans[0::2], [*spans[1::2], None], strict=True)]
    assert _scan(markers, data.draw(any_split(text))) == expected


def test_only_text_that_may_become_a_marker_is_held_back() -> None:
    scan = get_scanner("<tool_call>", "<|x|>")
    for text, stop in [("a <", 2), ("a <t", 2), ("a <to", 2), ("a <tool_call", 2), ("a <b", 4), ("a <|", 2)]:
        assert scan.find(text, 0, False) == (stop, None)
        assert scan.find(text, 0, True) == (len(text), None)
