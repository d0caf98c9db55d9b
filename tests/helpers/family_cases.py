"""The tests of families of formats, over their cases in the corpus."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest

from tests.helpers.parser_checks import (
    check_any_split,
    check_nothing_lost,
    cut_anywhere,
    remove_space,
    substitute,
)
from tests.helpers.parser_corpus import core, deviations, malformed, reasoning
from tests.helpers.parser_driver import Case, Item, normalise

CASES = [*core.CASES, *reasoning.CASES, *malformed.CASES, *deviations.CASES]
# Of these every character is checked; in the others markers may be left out within a text.
_EXACT = {id(case) for case in (*core.CASES, *reasoning.CASES)}
_DEVIATIONS = {id(case) for case in deviations.CASES}
# Cases in which the text of a call does not show its keys or values, or in which a header is dropped.
IMPLICIT_VALUES = {
    "minicpm5: entities in a list",
    "ui_tars: positional arguments",
    "pythonic: positional arguments",
    "pythonic: strings side by side",
    "pythonic: too many positional",
}
DROPPED_HEADERS = {
    "harmony: a tool of no one in reasoning",
    "harmony: cut in a recipient",
    "harmony: a channel without its marker",
    "harmony: a message to the assistant",
}
# Words of headers, of the families with them, count as markers; they are removed from both sides.
HEADER_WORDS = {
    "harmony": re.compile(
        r"(<\|(?:start|channel|constrain)\|>)(?:assistant|analysis|commentary|final|json)"
        r"|commentary(?=<\|channel\|>)"
    ),
    "functionary": re.compile(r"()(?:\Aall\n|>>>(?:all\n)?)"),
    "functionary_v2": re.compile(r"(<\|from\|>)assistant|(?:\A|(?<=<\|recipient\|>))all(?=\n<\|content\|>)"),
    "muse": re.compile(r"(<\|start\|>)assistant|to=\w+(?=<\|message\|>)"),
}


def remove_header_words(case: Case, items: Sequence[Item]) -> tuple[Case, list[Item]]:
    """Remove the words of headers from a case, for `check_nothing_lost`."""
    words = HEADER_WORDS.get(case.family or "")
    if words is None:
        return case, [*items]

    return substitute(case, items, words, r"\1")


def check_family(name: str | None, check: Callable[[Case], None]) -> None:
    """Check every case of a family, and raise the errors of all that fail, with their names. One test for
    each case would take longer than the checks."""
    failed = []
    for case in (case for case in CASES if case.family == name):
        try:
            check(case)
        except Exception as error:
            error.add_note(f"case: {case.id}")
            failed.append(error)
    if failed:
        raise ExceptionGroup(f"{len(failed)} cases of {name}", failed)


def check_losses(case: Case) -> None:
    if id(case) in _DEVIATIONS and case.family not in HEADER_WORDS:
        check_nothing_lost(*remove_space(case, case.expected), values=False)
    elif case.id not in DROPPED_HEADERS:
        values = case.id not in IMPLICIT_VALUES and id(case) not in _DEVIATIONS
        check_nothing_lost(*remove_header_words(case, case.expected), values=values)


def check_cuts(case: Case) -> None:
    # Neighbours of one kind are joined, and a label that is cut off is reasoning: both hide a marker.
    hides = len(normalise(case.expected)) != len(case.expected) or case.reasoning == "gemma4"
    for cut, items in cut_anywhere(case):
        if id(case) in _EXACT and not hides:
            check_nothing_lost(cut, items, values=False)
        elif case.family not in HEADER_WORDS and not hides:
            check_nothing_lost(*remove_space(cut, items), values=False)


class FamilyCases:
    """The tests of the families of these `names`; None: reasoning alone."""

    names: tuple[str | None, ...] = ()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        metafunc.parametrize("name", self.names)

    def test_cases(self, name: str | None) -> None:
        """The expected result, however the text is split."""
        check_family(name, check_any_split)

    def test_nothing_is_lost(self, name: str | None) -> None:
        """Content, reasoning and calls account for every character but white space and markers."""
        check_family(name, check_losses)

    def test_cut_anywhere(self, name: str | None) -> None:
        """Wherever an answer is cut off, its calls are what came of them, and nothing else is lost."""
        check_family(name, check_cuts)
