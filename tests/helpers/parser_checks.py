"""What every case of a parser must pass: the expected result for any split of the text, with nothing lost.

Nothing is lost: content, reasoning and calls account for every character but white space and markers.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mlxrun.api.parsers.delta import Parser
from mlxrun.api.parsers.registry import find_reasoning_family, find_tool_call_family
from tests.helpers.parser_driver import (
    Call,
    Case,
    Item,
    Reasoning,
    make_parser,
    normalise,
    run_parser,
    sample_positions,
    split_at,
    split_evenly,
)


def check_any_split(case: Case, make: Callable[[], Parser] | None = None) -> None:
    """Check the result for the complete text, chunks of 4 and 1 characters, and two split anywhere."""
    make = make or (lambda: make_parser(case))
    want = normalise(case.expected)
    for size in (max(len(case.text), 1), 1, 4):
        assert normalise(run_parser(make, split_evenly(case.text, size))) == want, (
            f"{case.id}, chunks of {size}"
        )
    for place in sample_positions(case.text):
        assert normalise(run_parser(make, split_at(case.text, [place]))) == want, (
            f"{case.id}, split at {place}"
        )


def check_nothing_lost(case: Case, items: Sequence[Item], values: bool = True) -> None:
    """Check that content and reasoning are there as they were written, in order, and that between them are
    only white space, markers and the calls, with their names and, if the text is unambiguous, `values`.

    Calls within reasoning that the answer ends with are in its text."""
    late = len(list(itertools.takewhile(lambda item: isinstance(item, Call), reversed(items))))
    before = items[: len(items) - late]
    found = _match_items(case, items)
    if found is None and late and before and isinstance(before[-1], Reasoning):
        names = [item.name for item in items[len(before) :] if isinstance(item, Call)]
        found = _match_items(case, before) if all(name in before[-1].text for name in names) else None
    assert found is not None, f"{case.id}: {items} do not account for {case.text!r}"
    for calls, gap in found:
        assert not (calls and values) or _contains_calls(gap, calls), f"{case.id}: {calls} are not in {gap!r}"


def _match_items(case: Case, items: Sequence[Item]) -> list[tuple[list[Call], str]] | None:
    """Match the text of a case with its items; return the calls between texts, and what was written there.

    The texts of items stand before that of the case, each ended by NUL, and the pattern refers back to them.
    So cases have few patterns, which takes less time than to compile one for each."""
    markers = "|".join(map(re.escape, _list_markers(case)))
    nothing = rf"(?:[ \t\r\n]{'|' if markers else ''}{markers})*"
    pattern = ""
    calls: list[Call] = []
    groups: list[list[Call]] = []
    texts: list[str] = []
    for item in [*items, None]:
        if isinstance(item, Call):
            calls.append(item)
            continue
        names = ".*?".join(re.escape(call.name) for call in calls)
        pattern += f"(.*?{names}.*?)" if calls else f"({nothing})"
        groups.append(calls)
        calls = []
        text = item.text if isinstance(item, Reasoning) else item or ""
        if text:
            assert "\0" not in text
            pattern += f"(?P=text{len(texts)})"
            texts.append(text)
    head = "".join(rf"(?P<text{at}>[^\0]*)\0" for at in range(len(texts)))
    match = re.fullmatch(head + pattern, "".join(f"{text}\0" for text in texts) + case.text, re.DOTALL)
    return None if match is None else [*zip(groups, match.groups()[len(texts) :], strict=True)]


def cut_anywhere(case: Case) -> Iterator[tuple[Case, list[Item]]]:
    """Cut the text of a case off at many places; yield each as a case, and its items. Checks that their calls
    are what the cut leaves of the expected ones."""
    whole = [item for item in case.expected if isinstance(item, Call)]
    for place in sample_positions(case.text):
        cut = dataclasses.replace(case, text=case.text[:place])
        items = run_parser(lambda cut=cut: make_parser(cut), [cut.text])  # type: ignore[misc]
        calls = [item for item in items if isinstance(item, Call)]
        for call, complete in zip(calls, whole, strict=False):
            assert call.name == complete.name, (cut.text, call, complete)
            assert _may_be_left(call.arguments, complete.arguments), (cut.text, call, complete)
        yield cut, items


def _may_be_left(part: Any, whole: Any) -> bool:
    """Whether arguments may be what is left of others after a cut."""
    if isinstance(part, dict) and isinstance(whole, dict):
        keys = list(whole)[: len(part)]
        return list(part) == keys and all(_may_be_left(part[key], whole[key]) for key in keys)
    if isinstance(part, list) and isinstance(whole, list):
        return len(part) <= len(whole) and all(map(_may_be_left, part, whole))
    if isinstance(part, str) and isinstance(whole, str):
        return True
    return normalise([Call("", {"a": part})]) == normalise([Call("", {"a": whole})])


def remove_space(case: Case, items: Sequence[Item]) -> tuple[Case, list[Item]]:
    """Remove white space from a case, and the markers and empty blocks that are left out within text."""
    family = find_tool_call_family(case.family) if case.family else None
    markers = list(family.ignored) if family else []
    openers, ends = (family.openers, family.ends) if family else ((), ())
    empty = [rf"{re.escape(one)}\s*{re.escape(f'</{one[1:]}')}" for one in openers if f"</{one[1:]}" in ends]
    if case.reasoning:
        tags = [
            tag for opener, each in find_reasoning_family(case.reasoning).pairs for tag in (opener, *each)
        ]
        closers = [closer for _, each in find_reasoning_family(case.reasoning).pairs for closer in each]
        markers += [tag for tag in tags if tag in closers or " " in tag]
    drops = "|".join([*empty, *map(re.escape, markers)])
    nothing = re.compile(rf"\s+|{drops}" if drops else r"\s+")

    return substitute(case, items, nothing, "")


def substitute(
    case: Case, items: Sequence[Item], pattern: re.Pattern[str], by: str
) -> tuple[Case, list[Item]]:
    """Replace what matches in the text of a case, and in content and reasoning."""

    def replace(item: Item) -> Item:
        if isinstance(item, Reasoning):
            return Reasoning(pattern.sub(by, item.text))
        return pattern.sub(by, item) if isinstance(item, str) else item

    return dataclasses.replace(case, text=pattern.sub(by, case.text)), [replace(item) for item in items]


def _contains_calls(gap: str, calls: Sequence[Call]) -> bool:
    """Whether raw text contains the names of the calls and the words of their arguments, in this order."""
    at = 0
    for call in calls:
        at = gap.find(call.name, at)
        if at < 0:
            return False
        end = at
        for leaf in _list_strings(call.arguments):
            spellings = {leaf, json.dumps(leaf)[1:-1], json.dumps(leaf, ensure_ascii=False)[1:-1]}
            found = [gap.find(s) for s in spellings if s in gap]
            if not found and not _may_be_escaped(leaf):
                return False
            end = max([end, *found])
        at = at if len(calls) == 1 else at + len(call.name)
    return True


def _may_be_escaped(leaf: str) -> bool:
    """Whether a value may be written in more ways than are tried here."""
    return any(char in leaf for char in "\\\"'\n\t/") or not leaf.isascii()


def _list_strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in (key, *_list_strings(item))]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _list_strings(item)]
    return [value] if isinstance(value, str) else []


def _list_markers(case: Case) -> list[str]:
    """List the markers that may be dropped, longest first."""
    found: set[str] = set()
    if case.family:
        found |= {*find_tool_call_family(case.family).markers, *find_tool_call_family(case.family).ignored}
    if case.reasoning:
        reasoning = find_reasoning_family(case.reasoning)
        found |= {*reasoning.markers, *reasoning.ignored}
        if reasoning.read_answer is None:
            for opener, closers in reasoning.pairs:
                found |= {opener, *closers}
    return sorted(found, key=len, reverse=True)
