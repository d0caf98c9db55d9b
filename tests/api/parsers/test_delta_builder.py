"""How deltas are joined, and which white space between sections stays."""

# ruff: noqa: E501

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.api.parsers.delta import SPACE, Delta, DeltaBuilder, TextKind, make_call_id

CALL = "call"
Part = tuple[str, str]  # a kind and its text, or CALL and a name


def _build(parts: list[Part]) -> list[Delta]:
    out = DeltaBuilder(lambda: "id")
    for kind, text in parts:
        if kind == CALL:
            out.begin_call(text)
        else:
            out.add("reasoning" if kind == "reasoning" else "content", text)
    out.finish()
    return out.take()


@pytest.mark.parametrize(
    ("parts", "texts"),
    [
        ([("content", "a "), ("content", " b ")], ["a  b "]),
        ([("content", " \n"), ("content", "a")], [" \na"]),
        ([("content", "\n\n")], ["\n\n"]),
        ([("reasoning", " a \n"), ("content", "\n b ")], ["a", "b "]),
        ([("content", "a \n"), (CALL, "f"), ("content", " b")], ["a", "f", "\nb"]),
        ([("content", "a"), (CALL, "f"), (CALL, "g"), ("content", "\n \n")], ["a", "f", "g"]),
        ([(CALL, "f"), ("content", " b")], ["f", "b"]),
        ([("reasoning", "a"), ("content", "b"), ("reasoning", "c"), ("content", "d")], ["a", "b", "\nc", "\nd"]),
        ([("reasoning", ""), ("content", "b")], ["b"]),
    ],
)  # fmt: skip
def test_sections(parts: list[Part], texts: list[str]) -> None:
    """White space between sections is dropped, and sections of one kind are joined by a line feed."""
    assert [delta.text or delta.name for delta in _build(parts)] == texts


@given(
    st.lists(st.tuples(st.sampled_from(["content", "reasoning"]), st.text("ab \n", max_size=4)), max_size=8),
    st.data(),
)
def test_how_text_is_split_does_not_matter(parts: list[tuple[TextKind, str]], data: st.DataObject) -> None:
    split: list[Part] = []
    for kind, text in parts:
        at = data.draw(st.integers(0, len(text)))
        split += [(kind, text[:at]), (kind, text[at:])] if 0 < at < len(text) else [(kind, text)]

    def merge(found: list[Delta]) -> list[tuple[str, str]]:
        merged: list[tuple[str, str]] = []
        for delta in found:
            if merged and merged[-1][0] == delta.kind:
                merged[-1] = (delta.kind, merged[-1][1] + delta.text)
            else:
                merged.append((delta.kind, delta.text))
        return merged

    assert merge(_build([*parts])) == merge(_build(split))


def test_a_marker_ends_a_section() -> None:
    out = DeltaBuilder()
    out.add("content", "a ")
    assert not out.fresh and not out.at_line_start and out.continues("content")
    out.end_section()
    assert out.fresh and out.at_line_start and not out.continues("content")
    out.add("content", " b")
    assert "".join(delta.text for delta in out.take()) == "a\nb"


def test_where_a_line_starts() -> None:
    out = DeltaBuilder()
    assert out.at_line_start
    for text, found in (("a", False), (" ", False), ("\n", True), (" ", True), ("b", False)):
        out.add("content", text)
        assert out.at_line_start is found


def test_ids_of_calls_are_unique() -> None:
    """The model's own is used once."""
    ids = iter(["x", "y"])
    out = DeltaBuilder(lambda: next(ids))
    assert [out.begin_call("f", "mine"), out.begin_call("f", "mine"), out.begin_call("f")] == [0, 1, 2]
    assert [delta.id for delta in out.take()] == ["mine", "x", "y"]
    assert re.fullmatch(r"call_[0-9a-f]{24}", make_call_id())
    assert make_call_id() != make_call_id()


def test_arguments_go_to_their_call() -> None:
    out = DeltaBuilder(lambda: "id")
    index = out.begin_call("f")
    out.add_arguments(index, "{")
    assert out.take() == [Delta("call", "{", 0, "id", "f")]
    out.add_arguments(index, '"a')
    out.add_arguments(index, '": 1}')
    out.add("content", f"x{SPACE}")
    assert out.take() == [Delta("call", '"a": 1}', 0), Delta("content", "x")]
    assert out.take() == []
