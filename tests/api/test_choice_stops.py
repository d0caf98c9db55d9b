"""Stop strings: found across token borders, never shown, the same for every split."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrun.api.choice import StopMatcher
from tests.helpers.examples import count_examples


def run(stops: list[str], parts: list[str]) -> tuple[str, str | None]:
    """The text shown, and the stop that was matched."""
    matcher = StopMatcher(stops)
    shown = "".join(matcher.feed(part) for part in parts)
    return shown + matcher.finish(), matcher.matched


def slow(stops: list[str], text: str) -> tuple[str, str | None]:
    """What the definition says: the first end wins, then the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize(
    ("stops", "text", "shown", "matched"),
    [
        (["END"], "one END two", "one ", "END"),
        (["END"], "one EN", "one EN", None),
        (["aab"], "aaab", "a", "aab"),
        (["abcd", "bc"], "abcd", "a", "bc"),
        (["c", "abc"], "xabc", "x", "abc"),
        (["\n\n"], "a\n\n\nb", "a", "\n\n"),
        (["ab", "ab"], "ab", "", "ab"),
        ([], "text", "text", None),
        ([""], "text", "text", None),
    ],
)
def test_table(stops: list[str], text: str, shown: str, matched: str | None) -> None:
    assert run(stops, [text]) == run(stops, list(text)) == (shown, matched)


def test_no_more_is_withheld_than_could_match() -> None:
    matcher = StopMatcher(["<end>", "nd"])
    assert [matcher.feed(part) for part in ("a<", "e", "x", "<en", "!")] == ["a", "", "<ex", "", "<en!"]
    assert matcher.matched is None


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["x"])
    assert [matcher.feed("axb"), matcher.feed("c"), matcher.finish()] == ["a", "", ""]


def test_a_match_where_none_may_be_is_text() -> None:
    """A stop string that ends later counts, though it begins there."""
    matcher = StopMatcher(["ab", "c"])
    assert matcher.feed("xabca", may_match=False) == "xabc"
    assert matcher.matched is None
    assert matcher.feed("ba") == "" and matcher.matched == "ab"


@settings(max_examples=count_examples(300), deadline=None)
@given(
    st.lists(st.text(alphabet="ab<", max_size=4), max_size=3),
    st.text(alphabet="ab<", max_size=12),
    st.text(alphabet="ab<", max_size=12),
    st.integers(0, 12),
)
def test_text_where_none_may_match_is_as_defined(stops: list[str], free: str, rest: str, cut: int) -> None:
    """The first end behind it wins, however it is split."""
    matcher = StopMatcher(stops)
    shown = matcher.feed(free[:cut], may_match=False) + matcher.feed(free[cut:], may_match=False)
    shown += "".join(matcher.feed(char) for char in rest)
    shown += matcher.finish()
    for end in range(len(free) + 1, len(free) + len(rest) + 1):
        text = (free + rest)[:end]
        found = max((stop for stop in stops if stop and text.endswith(stop)), key=len, default=None)
        if found is not None:
            assert (shown, matcher.matched) == (text[: end - len(found)], found)
            return
    assert (shown, matcher.matched) == (free + rest, None)


TEXT = st.text(alphabet="ab<", max_size=20)


@settings(max_examples=count_examples(300), deadline=None)
@given(
    st.lists(st.text(alphabet="ab<", max_size=5), max_size=4), TEXT, st.lists(st.integers(0, 20), max_size=4)
)
def test_every_split_is_as_defined(stops: list[str], text: str, cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(text)]
    parts = [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    assert run(stops, parts) == slow(stops, text)
