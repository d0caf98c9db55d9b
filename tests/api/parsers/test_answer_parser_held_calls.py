"""Held calls: the items of an answer are the same, except for a call that a stop string cut off."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from mlxrun.api.parsers.answer_parser import AnswerParser
from mlxrun.api.parsers.registry import TOOL_CALL_FAMILIES, find_reasoning_family, find_tool_call_family
from tests.helpers.family_cases import CASES
from tests.helpers.parser_checks import check_nothing_lost
from tests.helpers.parser_corpus import core
from tests.helpers.parser_driver import (
    TOOLS,
    Call,
    Case,
    Item,
    make_parser,
    merge_deltas,
    normalise,
    run_parser,
    sample_positions,
)

NAMES = tuple(family.name for family in TOOL_CALL_FAMILIES)
# An answer of `json` is a call only if all of it is JSON: any call of it that is cut off is content.
CUT_NAMES = tuple(dict.fromkeys(case.family for case in core.CASES if case.family != "json"))


def make_held_parser(case: Case, held_calls: int = sys.maxsize) -> AnswerParser:
    return AnswerParser(
        find_tool_call_family(case.family) if case.family else None,
        find_reasoning_family(case.reasoning) if case.reasoning else None,
        TOOLS if case.tools is None else case.tools,
        opened=case.opened,
        held_calls=held_calls,
    )


def run_stopped(case: Case, chunks: Sequence[str], held_calls: int = sys.maxsize) -> list[Item]:
    """The items of an answer that a stop string ends behind these chunks."""
    parser = make_held_parser(case, held_calls)
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk)]
    return merge_deltas([*deltas, *parser.finish(stopped=True)])


def list_calls(items: Sequence[Item]) -> list[tuple[str, ...]]:
    return [normalise([item])[0] for item in items if isinstance(item, Call)]


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_that_ends_by_itself_is_the_same(name: str) -> None:
    """Also where it ends within a call: that call is closed."""
    for case in (case for case in CASES if case.family == name):
        found = run_parser(lambda case=case: make_held_parser(case), case.text)  # type: ignore[misc]
        assert normalise(found) == normalise(case.expected), case.id
    for case in (case for case in core.CASES if case.family == name):
        for place in sample_positions(case.text):
            cut = replace(case, text=case.text[:place])
            found = run_parser(lambda cut=cut: make_held_parser(cut), [cut.text])  # type: ignore[misc]
            assert found == run_parser(lambda cut=cut: make_parser(cut), [cut.text]), cut.text  # type: ignore[misc]


@pytest.mark.parametrize("name", CUT_NAMES)
def test_a_call_that_a_stop_string_cuts_off_is_text(name: str) -> None:
    """The other calls have all their arguments, and nothing is lost, wherever the stop string comes. The twin
    that holds no calls has calls that were cut off."""
    differs = False
    for case in (case for case in core.CASES if case.family == name):
        whole = list_calls(case.expected)
        for place in sample_positions(case.text):
            text = case.text[:place]
            items = run_stopped(case, [text])
            assert items == run_stopped(case, list(text)), (case.id, text)
            calls = list_calls(items)
            assert calls == whole[: len(calls)], (case.id, text)
            check_nothing_lost(replace(case, text=text), items, values=False)
            twin = list_calls(run_stopped(case, [text], held_calls=0))
            differs |= twin != whole[: len(twin)]
    assert differs


def test_only_the_first_calls_are_held() -> None:
    """A held call comes with its last bracket, and another one with its first argument."""
    calls = [core.hermes("get_weather", {"city": city}) for city in "ab"]
    parser = make_held_parser(Case("", "hermes", "", []), held_calls=1)
    seen = [(delta.index, delta.name, delta.text) for char in "".join(calls) for delta in parser.feed(char)]
    assert seen[0] == (0, "get_weather", '{"city": "a"}')
    assert (
        seen[1] == (1, "get_weather", '{"city": "')
        and "".join(text for *_, text in seen[1:]) == '{"city": "b"}'
    )
