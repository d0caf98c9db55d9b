"""Cases for parsers as data, and what every case must pass: the expected result for any split of the text.

`Case.expected` is a list in the order of the text: a string is content, `Reasoning` reasoning, `Call` a call.
Nothing is lost: content, reasoning and calls account for every character but white space and markers.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hypothesis import strategies as st

from mlxrun.parsers.answer_parser import AnswerParser
from mlxrun.parsers.delta import Delta, Parser
from mlxrun.parsers.delta_builder import make_call_id
from mlxrun.parsers.registry import find_reasoning_family, find_tool_call_family


class Reasoning(NamedTuple):
    text: str


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


Item = str | Reasoning | Call


@dataclass(frozen=True)
class Case:
    """One answer. `family`, `reasoning`: names; `well_formed`: written as the format's template does."""

    id: str
    family: str | None
    text: str
    expected: list[Item]
    reasoning: str | None = None
    opened: bool = False
    tools: list[dict[str, Any]] | None = None  # else TOOLS
    well_formed: bool = False


def make_tool(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Make a tool as OpenAI's API has it."""
    parameters = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [
    make_tool(
        "get_weather",
        {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "detail": {"type": "boolean"},
        },
    ),
    make_tool("add", {"a": {"type": "number"}, "b": {"type": "number"}}),
    make_tool("now", {}),
    make_tool(
        "write_file",
        {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "mode": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "meta": {"type": "object"},
        },
    ),
    make_tool(
        "book",
        {
            "where": {"$ref": "#/$defs/place"},
            "nights": {"type": ["integer", "null"]},
            "prices": {"type": "array", "items": {"type": "number"}},
            "note": {"type": ["string", "null"]},
            "key": {"type": ["integer", "string"]},
            "level": {"enum": [1, 2, "high"]},
            "free": {},
        },
        **{
            "$defs": {
                "place": {
                    "type": "object",
                    "properties": {
                        "city": {"type": "string"},
                        "zip": {"type": "string"},
                        "at": {"type": "number"},
                    },
                }
            }
        },
    ),
]


def make_parser(case: Case) -> Parser:
    """Make the parser of a case; ids are id0, id1, ..."""
    count = itertools.count()
    tools = TOOLS if case.tools is None else case.tools
    return AnswerParser(
        find_tool_call_family(case.family) if case.family else None,
        find_reasoning_family(case.reasoning) if case.reasoning else None,
        tools,
        opened=case.opened,
        new_id=lambda: f"id{next(count)}",
    )


def make_tool_call_parser(name: str, new_id: Callable[[], str] = make_call_id) -> AnswerParser:
    """Make a parser of tool calls alone, in the format of this name."""
    return AnswerParser(find_tool_call_family(name), None, TOOLS, new_id=new_id)


def run_parser(make: Callable[[], Parser], chunks: Iterable[str]) -> list[Item]:
    """Run a parser over an answer and return its items; checks every delta on the way."""
    parser, deltas = make(), []
    for chunk in chunks:
        deltas += parser.feed(chunk)
    deltas += parser.finish()
    return merge_deltas(deltas)


def merge_deltas(deltas: Sequence[Delta]) -> list[Item]:
    """Merge deltas into items."""
    items: list[list[Any]] = []
    calls: list[list[Any]] = []
    ids: set[str] = set()
    for delta in deltas:
        if delta.kind != "call":
            assert delta.text, "an empty delta"
            assert (delta.index, delta.id, delta.name) == (0, "", "")
            if items and items[-1][0] == delta.kind:
                items[-1][1] += delta.text
            else:
                items.append([delta.kind, delta.text])
        elif delta.name:
            assert delta.index == len(calls)
            assert delta.id and delta.id not in ids
            ids.add(delta.id)
            calls.append(["call", delta.text, delta.name])
            items.append(calls[-1])
        else:
            assert delta.text, "an empty fragment"
            assert delta.index == len(calls) - 1
            assert not delta.id
            calls[-1][1] += delta.text
    return [_make_item(*item) for item in items]


def _make_item(kind: str, text: str, name: str = "") -> Item:
    if kind == "call":
        arguments = json.loads(text, parse_constant=_reject_constant)
        assert isinstance(arguments, dict)
        text.encode()
        return Call(name, arguments)
    return Reasoning(text) if kind == "reasoning" else text


def _reject_constant(word: str) -> Any:
    raise AssertionError(f"{word} is no JSON")


def normalise(items: Sequence[Item]) -> list[tuple[str, ...]]:
    """Write items so that equality distinguishes 3 from 3.0 and True from 1, and orders of members.

    Neighbours of one kind are joined, as deltas do not show where one ends."""
    out: list[tuple[str, ...]] = []
    for item in map(_normalise_item, items):
        if out and out[-1][0] == item[0] != "call":
            out[-1] = (item[0], out[-1][1] + item[1])
        else:
            out.append(item)
    return out


def _normalise_item(item: Item) -> tuple[str, ...]:
    if isinstance(item, Call):
        return ("call", item.name, json.dumps(item.arguments))
    return ("reasoning", item.text) if isinstance(item, Reasoning) else ("content", item)


def split_evenly(text: str, size: int) -> list[str]:
    """Split a text into chunks of one size."""
    return [text[i : i + size] for i in range(0, len(text), size)]


def split_at(text: str, at: Iterable[int]) -> list[str]:
    """Split a text at these positions."""
    edges = [0, *sorted(at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def sample_positions(text: str) -> range:
    """Return where to split a text: everywhere, or at some positions of a long one."""
    return range(1, len(text), 1 + len(text) // 60)


def any_split(text: str) -> st.SearchStrategy[list[str]]:
    """Any split of a text, with empty chunks too."""
    return st.lists(st.integers(0, len(text)), max_size=12).map(lambda at: split_at(text, at))


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
    only white space, markers and the calls, with their names and, if the text is unambiguous, `values`."""
    markers = "|".join(map(re.escape, _list_markers(case)))
    nothing = rf"(?:[ \t\r\n]{'|' if markers else ''}{markers})*"
    pattern, calls, groups = "", [], []
    for item in [*items, None]:
        if isinstance(item, Call):
            calls.append(item)
            continue
        names = ".*?".join(re.escape(call.name) for call in calls)
        pattern += f"(.*?{names}.*?)" if calls else f"({nothing})"
        groups.append(calls)
        calls = []
        pattern += re.escape(item.text if isinstance(item, Reasoning) else item or "")
    match = re.fullmatch(pattern, case.text, re.DOTALL)
    assert match is not None, f"{case.id}: {items} do not account for {case.text!r}"
    for calls, gap in zip(groups, match.groups(), strict=True):
        assert not (calls and values) or _contains_calls(gap, calls), f"{case.id}: {calls} are not in {gap!r}"


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


def is_passed(case: Case, wrap: Callable[[Parser], Parser]) -> bool:
    """Whether a case has the expected result, by single characters, with a parser that `wrap` changes."""
    try:
        got = run_parser(lambda: wrap(make_parser(case)), case.text)
    except (ValueError, AssertionError):
        return False
    return normalise(got) == normalise(case.expected)


class ParserWithoutFinish:
    """A broken parser, which must fail: it drops the text that was held back at the end."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser

    def feed(self, text: str) -> Sequence[Delta]:
        return self._parser.feed(text)

    def finish(self) -> Sequence[Delta]:
        return ()


class MemorylessParser:
    """A broken parser, to which every chunk is an answer of its own: it misses markers that are split."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def feed(self, text: str) -> Sequence[Delta]:
        one = make_parser(self._case)
        return [*one.feed(text), *one.finish()]

    def finish(self) -> Sequence[Delta]:
        return ()
