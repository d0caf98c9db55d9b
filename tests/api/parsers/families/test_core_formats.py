"""The formats of hermes, qwen3_coder, seed_oss, json and reasoning: any splits, and fragments of cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.parser_checks import check_nothing_lost, remove_space
from tests.helpers.parser_corpus.core import CASES as CALLS
from tests.helpers.parser_corpus.reasoning import CASES as REASONING
from tests.helpers.parser_driver import (
    Case,
    MemorylessParser,
    ParserWithoutFinish,
    any_split,
    is_passed,
    make_parser,
    normalise,
    run_parser,
    split_evenly,
)

CASES = [*CALLS, *REASONING]


@given(st.data())
def test_any_split(data: st.DataObject) -> None:
    """Any split of any case."""
    case = data.draw(st.sampled_from(CASES))
    split = data.draw(any_split(case.text))
    assert normalise(run_parser(lambda: make_parser(case), split)) == normalise(case.expected)


def test_a_parser_without_finish_fails() -> None:
    """The counterpart of the tests of the cases: without its `finish` every family loses something."""
    failed = [case for case in CASES if not is_passed(case, ParserWithoutFinish)]
    assert {case.family for case in failed} == {case.family for case in CASES}
    assert {case.reasoning for case in failed} == {case.reasoning for case in CASES}


@pytest.mark.parametrize("family", sorted({case.family for case in CALLS if case.family}))
def test_a_parser_without_memory_fails(family: str) -> None:
    """A second counterpart of the tests of the cases."""
    cases = [case for case in CALLS if case.family == family and case.well_formed]
    assert cases
    assert not any(is_passed(case, lambda _, case=case: MemorylessParser(case)) for case in cases)  # type: ignore[misc]


def _any_fragments(family: str) -> st.SearchStrategy[str]:
    """Answers of one family, complete and in fragments, in any order."""
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
def test_any_fragments(family: str, think: str | None, data: st.DataObject) -> None:
    """Whatever a model writes, the split does not matter, nothing is lost and calls are valid JSON."""
    text = data.draw(_any_fragments(family))
    case = Case("fragments", family, text, [], reasoning=think)
    whole = run_parser(lambda: make_parser(case), [text])
    check_nothing_lost(*remove_space(case, whole), values=False)
    for split in (split_evenly(text, 1), split_evenly(text, 4), data.draw(any_split(text))):
        assert normalise(run_parser(lambda: make_parser(case), split)) == normalise(whole)


def test_ids_are_unique() -> None:
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids)
    assert len(ids) >= 200
