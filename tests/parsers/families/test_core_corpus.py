"""The parsers' corpus: every case whole and in any pieces, the law, and the twins that must fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.parsers.delta import Delta
from tests.helpers.parser_corpus.core import CASES as CALLS
from tests.helpers.parser_corpus.reasoning import CASES as THOUGHTS
from tests.helpers.parser_driver import (
    Call,
    Case,
    Forgetful,
    check,
    check_law,
    exact,
    parser,
    passes,
    pieces,
    places,
    play,
    splits,
)

CASES = [*CALLS, *THOUGHTS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case(case: Case) -> None:
    """A55-A60, A62, B24, B26: the wanted result whatever the pieces are."""
    check(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_law(case: Case) -> None:
    """Text, thoughts and calls account for every character but white space and markers."""
    check_law(case, case.want)


# Neighbours of one kind are joined, so where two thoughts meet a cut cannot be checked by the law.
APART = [case for case in CASES if len(exact(case.want)) == len(case.want)]


@pytest.mark.parametrize("case", APART, ids=lambda case: case.id)
def test_cut_anywhere(case: Case) -> None:
    """A56, B26: wherever an answer is cut, its calls are valid JSON and all else is accounted for."""
    for place in places(case.text):
        text = case.text[:place]
        cut = replace(case, text=text)
        items = play(lambda cut=cut: parser(cut), [text])  # type: ignore[misc]
        check_law(cut, items, values=False)
        calls = [item for item in items if isinstance(item, Call)]
        for call, whole in zip(calls, (item for item in case.want if isinstance(item, Call)), strict=False):
            assert _begins(call.arguments, whole.arguments), (text, call, whole)


def _begins(part: Any, whole: Any) -> bool:
    """Whether arguments are what a cut may leave of others."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return list(part) == list(whole)[: len(part)] and all(_begins(part[k], whole[k]) for k in part)
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(map(_begins, part, whole))
    if isinstance(part, str) and isinstance(whole, str):
        return True
    return exact([Call("", {"a": part})]) == exact([Call("", {"a": whole})])


@given(st.data())
def test_any_split(data: st.DataObject) -> None:
    """A56: every chunking of every fixture."""
    case = data.draw(st.sampled_from(CASES))
    split = data.draw(splits(case.text))
    assert exact(play(lambda: parser(case), split)) == exact(case.want)


def test_a_parser_that_forgets_what_it_holds_fails() -> None:
    """The twin of `test_case`: without its `finish` every family loses something."""
    failed = [case for case in CASES if not passes(case, Forgetful)]
    assert {case.family for case in failed} == {case.family for case in CASES}
    assert {case.think for case in failed} == {case.think for case in CASES}


class Deaf:
    """A twin whose every piece is an answer of its own: markers over borders are not seen."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def feed(self, text: str) -> Sequence[Delta]:
        one = parser(self._case)
        return [*one.feed(text), *one.finish()]

    def finish(self) -> Sequence[Delta]:
        return ()


@pytest.mark.parametrize("family", sorted({case.family for case in CALLS if case.family}))
def test_a_parser_without_memory_fails(family: str) -> None:
    """A second twin of `test_case`."""
    cases = [case for case in CALLS if case.family == family and case.well]
    assert cases
    assert not any(passes(case, lambda _, case=case: Deaf(case)) for case in cases)  # type: ignore[misc]


def _soup(family: str) -> st.SearchStrategy[str]:
    """Pieces of answers of one family, whole and torn, in any order."""
    texts = [case.text for case in CASES if case.family == family and len(case.text) < 200]
    torn = st.sampled_from(texts).flatmap(
        lambda text: st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(
            lambda ends: text[min(ends) : max(ends)]
        )
    )
    junk = st.sampled_from(
        ["<", ">", "{", "}", '"', "\\", "\n", " ", ",", "[", "</", "<tool_call>", "</think>", "ř"]
    )
    return st.lists(st.one_of(torn, st.sampled_from(texts), junk), max_size=6).map("".join)


@pytest.mark.parametrize("think", [None, "think"])
@pytest.mark.parametrize("family", ["hermes", "qwen3_coder", "seed_oss", "json"])
@given(data=st.data())
def test_soup(family: str, think: str | None, data: st.DataObject) -> None:
    """A56, B24: whatever a model writes, pieces do not matter, all is accounted for, calls are valid JSON."""
    text = data.draw(_soup(family))
    case = Case("soup", family, text, [], think=think)
    whole = play(lambda: parser(case), [text])
    check_law(case, whole, values=False)
    for split in (pieces(text, 1), pieces(text, 4), data.draw(splits(text))):
        assert exact(play(lambda: parser(case), split)) == exact(whole)


def test_ids_are_unique() -> None:
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids)
    assert len(ids) >= 200
