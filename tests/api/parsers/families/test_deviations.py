"""What models write beside their formats: any splits, and tools that are not offered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxrun.api.parsers.readers import tagged_arguments
from mlxrun.api.parsers.text_stream import Step, TextStream
from tests.helpers.parser_corpus.deviations import CASES, TAGGED, UNCLOSED
from tests.helpers.parser_driver import (
    Call,
    Case,
    MemorylessParser,
    ParserWithoutFinish,
    any_split,
    is_passed,
    make_parser,
    normalise,
    run_parser,
)


@given(st.data())
def test_any_split(data: st.DataObject) -> None:
    """Any split of any case."""
    case = data.draw(st.sampled_from(CASES))
    split = data.draw(any_split(case.text))
    assert normalise(run_parser(lambda: make_parser(case), split)) == normalise(case.expected)


@pytest.mark.parametrize("family", [family for family, *_ in UNCLOSED])
def test_a_parser_without_finish_fails(family: str) -> None:
    """The counterpart of the tests of the cases: calls in open reasoning come at the end of the answer."""
    cases = [case for case in CASES if case.family == family and "in reasoning that is not closed" in case.id]
    cases = [case for case in cases if isinstance(case.expected[-1], Call)]
    assert len(cases) == 2
    assert not any(is_passed(case, ParserWithoutFinish) for case in cases)


def test_a_parser_without_memory_fails() -> None:
    """A second counterpart of the tests of the cases."""
    calls = [case for case in CASES if any(isinstance(item, Call) for item in case.expected)]
    assert not any(is_passed(case, lambda _, case=case: MemorylessParser(case)) for case in calls)  # type: ignore[misc]


def test_a_parser_that_ends_values_at_the_first_tag_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third counterpart: every string that contains its own end tag is cut short."""

    def is_followed(s: TextStream, texts: tuple[str, ...], certain: bool = False) -> Step[bool]:
        yield from ()
        return True

    cases = [case for case in CASES if case.id.endswith(": an end tag in a string")]
    assert len(cases) == len(TAGGED)
    assert all(is_passed(case, lambda parser: parser) for case in cases)
    monkeypatch.setattr(tagged_arguments, "is_followed", is_followed)
    assert not any(is_passed(case, lambda parser: parser) for case in cases)


def test_a_tool_that_is_not_offered_is_never_called() -> None:
    """Of every case, without the tools that it calls: no call, and the names stay in the text."""
    for case in CASES:
        names = [item.name for item in case.expected if isinstance(item, Call)]
        other = Case(case.id, case.family, case.text, [], case.reasoning, case.opened, tools=[_OTHER])
        items = run_parser(lambda other=other: make_parser(other), [case.text])  # type: ignore[misc]
        assert not any(isinstance(item, Call) for item in items), case.id
        assert all(any(name in str(item) for item in items) for name in names), case.id


_OTHER = {"type": "function", "function": {"name": "something_else", "parameters": {}}}


def test_ids_are_unique() -> None:
    ids = [case.id for case in CASES]
    assert len(set(ids)) == len(ids)
    assert len(ids) >= 500
