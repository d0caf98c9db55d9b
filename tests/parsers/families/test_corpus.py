"""The corpus of the other families: all cases whole and in any pieces, the law, cuts, soup, and the twins."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrun.parsers.delta import Delta
from mlxrun.parsers.registry import find_tool_call_family
from tests.helpers.parser_corpus.call_formats import FORMS
from tests.helpers.parser_corpus.malformed import CASES as MENDED
from tests.helpers.parser_corpus.well_formed import CASES as WELL
from tests.helpers.parser_driver import (
    Call,
    Case,
    Forgetful,
    Item,
    Thought,
    check,
    check_law,
    exact,
    function,
    parser,
    passes,
    pieces,
    play,
    splits,
)

CASES = [*WELL, *MENDED]
FAMILIES = sorted({family for family, _, _ in FORMS.values()})
# Where a call's text does not show its values or keys, or a header is dropped with what it named.
UNLIKE = {
    "pythonic: positional arguments",
    "pythonic: strings side by side",
    "pythonic: too many positional",
}
HEADERS = {
    "harmony: a tool of no one in a thought",
    "harmony: cut in a recipient",
    "harmony: a channel without its marker",
}
# Words of harmony's headers count as markers; they are cut out of both sides alike.
_WORDS = re.compile(
    r"(<\|(?:start|channel|constrain)\|>)(?:assistant|analysis|commentary|final|json)|commentary(?=<\|channel\|>)"
)


def _headless(case: Case, items: list[Item]) -> tuple[Case, list[Item]]:
    """A case of harmony as the law's check can read it."""
    if case.family != "harmony":
        return case, items

    def cut(text: str) -> str:
        return _WORDS.sub(r"\1", text)

    plain = [
        item
        if isinstance(item, Call)
        else Thought(cut(item.text))
        if isinstance(item, Thought)
        else cut(item)
        for item in items
    ]
    return dataclasses.replace(case, text=cut(case.text)), plain


def _bare(case: Case, items: list[Item]) -> tuple[Case, list[Item]]:
    """A case without white space, and without the markers that are dropped in the middle of text."""
    assert case.family is not None
    drops = "|".join(map(re.escape, find_tool_call_family(case.family).ignored))
    nothing = re.compile(rf"\s+|{drops}" if drops else r"\s+")

    def cut(text: str) -> str:
        return nothing.sub("", text)

    plain = [
        item
        if isinstance(item, Call)
        else Thought(cut(item.text))
        if isinstance(item, Thought)
        else cut(item)
        for item in items
    ]
    return dataclasses.replace(case, text=cut(case.text)), plain


@pytest.mark.parametrize("form", FORMS)
def test_well(form: str) -> None:
    """A55-A58, A60: what templates write, whole, by single characters and by four; and the law."""
    cases = [case for case in WELL if case.id.startswith(f"{form}: ")]
    assert len(cases) >= 25
    for case in cases:
        for size in (len(case.text), 1, 4):
            found = play(lambda case=case: parser(case), pieces(case.text, size))  # type: ignore[misc]
            assert exact(found) == exact(case.want), f"{case.id}, pieces of {size}"
        check_law(*_headless(case, case.want))


@pytest.mark.parametrize("case", MENDED, ids=lambda case: case.id)
def test_case(case: Case) -> None:
    """A55-A58, A60, A62, B24, B26: the wanted result whatever the pieces are."""
    check(case)


@pytest.mark.parametrize("case", [c for c in MENDED if c.id not in HEADERS], ids=lambda case: case.id)
def test_law(case: Case) -> None:
    """Text, thoughts and calls account for every character but white space and markers."""
    check_law(*_headless(case, case.want), values=case.id not in UNLIKE)


@given(st.data())
def test_any_split(data: st.DataObject) -> None:
    """A56: every chunking of every fixture."""
    case = data.draw(st.sampled_from(CASES))
    split = data.draw(splits(case.text))
    assert exact(play(lambda: parser(case), split)) == exact(case.want)


def test_a_parser_that_forgets_what_it_holds_fails() -> None:
    """The twin of `test_case`: without its `finish` every family loses something."""
    assert {case.family for case in CASES if not passes(case, Forgetful)} == set(FAMILIES)


class Deaf:
    """A twin whose every piece is an answer of its own: markers over borders are not seen."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def feed(self, text: str) -> Sequence[Delta]:
        one = parser(self._case)
        return [*one.feed(text), *one.finish()]

    def finish(self) -> Sequence[Delta]:
        return ()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_parser_without_memory_fails(family: str) -> None:
    """A second twin of `test_well`."""
    cases = [case for case in WELL if case.family == family and case.well]
    assert len(cases) >= 20
    assert not any(passes(case, lambda _, case=case: Deaf(case)) for case in cases)  # type: ignore[misc]


def _within(part: Any, whole: Any) -> bool:
    """Whether a value is what a cut can leave of another."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return list(part) == list(whole)[: len(part)] and all(_within(part[key], whole[key]) for key in part)
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(map(_within, part, whole))
    if isinstance(part, str) and isinstance(whole, str):
        # One character more may begin an end tag, or be text.
        return whole.startswith(part) or (part.startswith(whole) and part[len(whole) :].strip() == "<")
    return json.dumps(part) == json.dumps(whole)


@pytest.mark.parametrize("form", FORMS)
def test_every_cut_of_a_call_is_sound(form: str) -> None:
    """A56: cut anywhere, a call is a part of the whole one, or what came is text as it was written."""
    family, _, write = FORMS[form]
    arguments = {"path": 'a "b"\n{ü}', "tags": ["x", "y, z"], "meta": {"k": [1.5, {"d": None}]}, "mode": 42}
    text = write("write_file", arguments)
    seen = 0
    for end in range(len(text) + 1):
        case = Case(f"{form} cut at {end}", family, text[:end], [])
        items = play(lambda case=case: parser(case), pieces(case.text, 3))  # type: ignore[misc]
        calls = [item for item in items if isinstance(item, Call)]
        assert len(calls) <= 1
        for call in calls:
            assert call.name == "write_file"
            assert _within(call.arguments, arguments), case.id
            seen = max(seen, len(call.arguments))
        if not calls and family != "harmony":
            check_law(*_bare(case, items))
    assert seen == len(arguments)


def test_a_cut_that_is_not_sound_is_seen() -> None:
    """The twin of `test_every_cut_of_a_call_is_sound`."""
    whole = {"a": "xy", "b": [1, {"c": 2}]}
    assert _within({"a": "x"}, whole)
    assert not _within({"a": "y"}, whole)
    assert _within({"a": "xy<"}, whole)
    assert not _within({"a": "xy</"}, whole)
    assert not _within({"b": [1]}, whole)
    assert not _within({"a": "xy", "b": [1, {"c": 2.0}]}, whole)


_TEXT = st.text(st.sampled_from("aé日🙂 \n\t\r\\\"'`<>|{}[](),:;=/&%#0.-\u2028"), max_size=12)
_LEAF = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), _TEXT
)
_KEY = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)
_DATA = st.recursive(
    _LEAF,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEY, inner, max_size=3)),
    max_leaves=6,
)
_ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "text": _TEXT,
        "data": st.dictionaries(_KEY, _DATA, max_size=3),
        "list": st.lists(_DATA, max_size=3),
        "number": st.floats(allow_nan=False, allow_infinity=False),
        "count": st.integers(),
        "flag": st.booleans(),
    },
)
_ANY_TOOL = [
    function(
        "any",
        {
            "text": {"type": "string"},
            "data": {"type": "object"},
            "list": {"type": "array"},
            "number": {"type": "number"},
            "count": {"type": "integer"},
            "flag": {"type": "boolean"},
        },
    )
]


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60)
@given(arguments=_ARGUMENTS, size=st.integers(1, 7))
def test_any_arguments(form: str, arguments: dict[str, Any], size: int) -> None:
    """A57, A58: whatever arguments a template writes come back, to the last digit and character."""
    family, _, write = FORMS[form]
    case = Case(form, family, write("any", arguments), [], tools=_ANY_TOOL)
    found = play(lambda: parser(case), pieces(case.text, size))
    assert exact(found) == exact([Call("any", arguments)])


def _soup(family: str) -> st.SearchStrategy[str]:
    """Pieces of answers of one family, whole and torn, in any order."""
    texts = [case.text for case in CASES if case.family == family and len(case.text) < 200]
    torn = st.sampled_from(texts).flatmap(
        lambda text: st.tuples(st.integers(0, len(text)), st.integers(0, len(text))).map(
            lambda ends: text[min(ends) : max(ends)]
        )
    )
    junk = st.sampled_from(
        ["<", ">", "{", "}", '"', "'", "\\", "\n", " ", ",", "[", "(", "|>", "</think>", "ř"]
    )
    return st.lists(st.one_of(torn, st.sampled_from(texts), junk), max_size=6).map("".join)


@pytest.mark.parametrize("think", [None, "think"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40)
@given(data=st.data())
def test_soup(family: str, think: str | None, data: st.DataObject) -> None:
    """A56, B24: whatever a model writes, pieces do not matter, all is accounted for, calls are valid JSON."""
    text = data.draw(_soup(family))
    case = Case("soup", family, text, [], think="harmony" if family == "harmony" and think else think)
    whole = play(lambda: parser(case), [text])
    if family != "harmony":
        check_law(*_bare(case, whole), values=False)
    for split in (pieces(text, 1), pieces(text, 4), data.draw(splits(text))):
        assert exact(play(lambda: parser(case), split)) == exact(whole)


def test_ids_are_unique() -> None:
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids)
    assert len(MENDED) >= 200
