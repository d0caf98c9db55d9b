"""The formats of the other families: well-formed calls, any arguments and splits, and fragments of cases."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.examples import count_examples
from tests.helpers.family_cases import HEADER_WORDS, remove_header_words
from tests.helpers.parser_checks import check_nothing_lost, remove_space
from tests.helpers.parser_corpus.call_formats import FORMATS
from tests.helpers.parser_corpus.malformed import CASES as MALFORMED
from tests.helpers.parser_corpus.newer_formats import LOST_VALUES
from tests.helpers.parser_corpus.well_formed import CASES as WELL_FORMED
from tests.helpers.parser_driver import (
    Call,
    Case,
    MemorylessParser,
    ParserWithoutFinish,
    any_split,
    is_passed,
    make_parser,
    make_tool,
    normalise,
    run_parser,
    split_evenly,
)

CASES = [*WELL_FORMED, *MALFORMED]
FAMILIES = sorted({family for family, _, _ in FORMATS.values()})


@pytest.mark.parametrize("form", FORMATS)
def test_well_formed(form: str) -> None:
    """What templates write, complete, by single characters and by four; nothing is lost."""
    cases = [case for case in WELL_FORMED if case.id.startswith(f"{form}: ")]
    assert len(cases) >= 25
    for case in cases:
        for size in (len(case.text), 1, 4):
            found = run_parser(lambda case=case: make_parser(case), split_evenly(case.text, size))  # type: ignore[misc]
            assert normalise(found) == normalise(case.expected), f"{case.id}, chunks of {size}"
        check_nothing_lost(*remove_header_words(case, case.expected))


@given(st.data())
def test_any_split(data: st.DataObject) -> None:
    """Any split of any case."""
    case = data.draw(st.sampled_from(CASES))
    split = data.draw(any_split(case.text))
    assert normalise(run_parser(lambda: make_parser(case), split)) == normalise(case.expected)


def test_a_parser_without_finish_fails() -> None:
    """The counterpart of the tests of the cases: without its `finish` every family loses something."""
    assert {case.family for case in CASES if not is_passed(case, ParserWithoutFinish)} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_parser_without_memory_fails(family: str) -> None:
    """A second counterpart of `test_well_formed`."""
    cases = [case for case in WELL_FORMED if case.family == family and case.well_formed]
    assert len(cases) >= 20
    some = cases[::4]
    assert not any(is_passed(case, lambda _, case=case: MemorylessParser(case)) for case in some)  # type: ignore[misc]


def _is_prefix(part: Any, whole: Any) -> bool:
    """Whether a value may be what is left of another after a cut."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return list(part) == list(whole)[: len(part)] and all(
            _is_prefix(part[key], whole[key]) for key in part
        )
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(map(_is_prefix, part, whole))
    if isinstance(part, str) and isinstance(whole, str):
        # One character more may begin an end tag, or be text.
        return whole.startswith(part) or (part.startswith(whole) and part[len(whole) :].strip() in ("<", "]"))
    return json.dumps(part) == json.dumps(whole)


@pytest.mark.parametrize("form", FORMATS)
def test_every_cut_of_a_call_is_sound(form: str) -> None:
    """Cut off anywhere, a call is a prefix of the complete one, or what came is text as it was written."""
    family, _, write = FORMATS[form]
    leaf = 2 if form in LOST_VALUES else None
    arguments = {"path": 'a "b"\n{ü}', "tags": ["x", "y, z"], "meta": {"k": [1.5, {"d": leaf}]}, "mode": 42}
    text = write("write_file", arguments)
    seen = 0
    for end in range(len(text) + 1):
        case = Case(f"{form} cut at {end}", family, text[:end], [])
        items = run_parser(lambda case=case: make_parser(case), split_evenly(case.text, 3))  # type: ignore[misc]
        calls = [item for item in items if isinstance(item, Call)]
        assert len(calls) <= 1
        for call in calls:
            assert call.name == "write_file"
            assert _is_prefix(call.arguments, arguments), case.id
            seen = max(seen, len(call.arguments))
        if not calls and family != "harmony":
            check_nothing_lost(*remove_space(case, items))
    assert seen == len(arguments)


def test_a_cut_that_is_not_sound_is_found() -> None:
    """The counterpart of `test_every_cut_of_a_call_is_sound`."""
    whole = {"a": "xy", "b": [1, {"c": 2}]}
    assert _is_prefix({"a": "x"}, whole)
    assert not _is_prefix({"a": "y"}, whole)
    assert _is_prefix({"a": "xy<"}, whole)
    assert not _is_prefix({"a": "xy</"}, whole)
    assert not _is_prefix({"b": [1]}, whole)
    assert not _is_prefix({"a": "xy", "b": [1, {"c": 2.0}]}, whole)


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
    make_tool(
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


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=count_examples(60))
@given(arguments=_ARGUMENTS, size=st.integers(1, 7))
def test_any_arguments(form: str, arguments: dict[str, Any], size: int) -> None:
    """All arguments that a template writes are read, to the last digit and character."""
    family, _, write = FORMATS[form]
    if form in LOST_VALUES:
        arguments = {key: value for key, value in arguments.items() if key not in ("data", "list")}
    case = Case(form, family, write("any", arguments), [], tools=_ANY_TOOL)
    found = run_parser(lambda: make_parser(case), split_evenly(case.text, size))
    assert normalise(found) == normalise([Call("any", arguments)])


def _any_fragments(family: str) -> st.SearchStrategy[str]:
    """Answers of one family, complete and in fragments, in any order."""
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
@settings(max_examples=count_examples(40))
@given(data=st.data())
def test_any_fragments(family: str, think: str | None, data: st.DataObject) -> None:
    """Whatever a model writes, the split does not matter, nothing is lost and calls are valid JSON."""
    text = data.draw(_any_fragments(family))
    case = Case(
        "fragments", family, text, [], reasoning=family if family in ("harmony", "muse") and think else think
    )
    whole = run_parser(lambda: make_parser(case), [text])
    if family not in HEADER_WORDS:
        check_nothing_lost(*remove_space(case, whole), values=False)
    for split in (split_evenly(text, 1), split_evenly(text, 4), data.draw(any_split(text))):
        assert normalise(run_parser(lambda: make_parser(case), split)) == normalise(whole)


def test_ids_are_unique() -> None:
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids)
    assert len(MALFORMED) >= 200
