"""Cases for parsers as data, and what every case must pass: the result, any split of the text, the law.

A case's `want` is a list in the order of the text: a string is text, `Thought` reasoning, `Call` a call.
The law: text, thoughts and calls account for every character but white space and markers.
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


class Thought(NamedTuple):
    text: str


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]


Item = str | Thought | Call


@dataclass(frozen=True)
class Case:
    """One answer. `think`: the reasoning family's name; `well`: as the format's template writes it."""

    id: str
    family: str | None
    text: str
    want: list[Item]
    think: str | None = None
    opened: bool = False
    tools: list[dict[str, Any]] | None = None  # else TOOLS
    well: bool = False


def function(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A tool in OpenAI form."""
    parameters = {"type": "object", "properties": properties, **more}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


TOOLS = [
    function(
        "get_weather",
        {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            "detail": {"type": "boolean"},
        },
    ),
    function("add", {"a": {"type": "number"}, "b": {"type": "number"}}),
    function("now", {}),
    function(
        "write_file",
        {
            "path": {"type": "string"},
            "content": {"type": "string"},
            "mode": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "meta": {"type": "object"},
        },
    ),
    function(
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


def parser(case: Case) -> Parser:
    """The parser of a case; ids are id0, id1, ..."""
    count = itertools.count()
    tools = TOOLS if case.tools is None else case.tools
    return AnswerParser(
        find_tool_call_family(case.family) if case.family else None,
        find_reasoning_family(case.think) if case.think else None,
        tools,
        opened=case.opened,
        new_id=lambda: f"id{next(count)}",
    )


def make_tool_call_parser(name: str, new_id: Callable[[], str] = make_call_id) -> AnswerParser:
    """A parser of tool calls alone, in the format of this name."""
    return AnswerParser(find_tool_call_family(name), None, TOOLS, new_id=new_id)


def play(make: Callable[[], Parser], pieces: Iterable[str]) -> list[Item]:
    """What a parser makes of an answer, neighbours of one kind joined; checks every delta on the way."""
    parser, deltas = make(), []
    for piece in pieces:
        deltas += parser.feed(piece)
    deltas += parser.finish()
    return merged(deltas)


def merged(deltas: Sequence[Delta]) -> list[Item]:
    """The items that deltas amount to."""
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
    return [_item(*item) for item in items]


def _item(kind: str, text: str, name: str = "") -> Item:
    if kind == "call":
        arguments = json.loads(text, parse_constant=_refuse)
        assert isinstance(arguments, dict)
        text.encode()
        return Call(name, arguments)
    return Thought(text) if kind == "reasoning" else text


def _refuse(word: str) -> Any:
    raise AssertionError(f"{word} is no JSON")


def exact(items: Sequence[Item]) -> list[tuple[str, ...]]:
    """Items in a form whose equality tells 3 from 3.0 and True from 1, and knows the order of members.

    Neighbours of one kind are joined: deltas do not tell two thoughts from one."""
    out: list[tuple[str, ...]] = []
    for item in map(_exact, items):
        if out and out[-1][0] == item[0] != "call":
            out[-1] = (item[0], out[-1][1] + item[1])
        else:
            out.append(item)
    return out


def _exact(item: Item) -> tuple[str, ...]:
    if isinstance(item, Call):
        return ("call", item.name, json.dumps(item.arguments))
    return ("reasoning", item.text) if isinstance(item, Thought) else ("content", item)


def pieces(text: str, size: int) -> list[str]:
    """Pieces of one size."""
    return [text[i : i + size] for i in range(0, len(text), size)]


def cut_at(text: str, at: Iterable[int]) -> list[str]:
    """Pieces between these places."""
    edges = [0, *sorted(at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


def places(text: str) -> range:
    """Where to cut a text: everywhere, or here and there in a long one."""
    return range(1, len(text), 1 + len(text) // 60)


def splits(text: str) -> st.SearchStrategy[list[str]]:
    """Any pieces of a text, empty ones too."""
    return st.lists(st.integers(0, len(text)), max_size=12).map(lambda at: cut_at(text, at))


def check(case: Case, make: Callable[[], Parser] | None = None) -> None:
    """The wanted result: whole, by 4 characters, by single ones, and cut in two at every place."""
    make = make or (lambda: parser(case))
    want = exact(case.want)
    for size in (max(len(case.text), 1), 1, 4):
        assert exact(play(make, pieces(case.text, size))) == want, f"{case.id}, pieces of {size}"
    for place in places(case.text):
        assert exact(play(make, cut_at(case.text, [place]))) == want, f"{case.id}, cut at {place}"


def check_law(case: Case, items: Sequence[Item], values: bool = True) -> None:
    """Texts and thoughts are there in order as they were written; what is between them is white space and
    markers, and the calls, with their names and, if only one reading of the text is possible, `values`."""
    markers = "|".join(map(re.escape, _markers(case)))
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
        pattern += re.escape(item.text if isinstance(item, Thought) else item or "")
    match = re.fullmatch(pattern, case.text, re.DOTALL)
    assert match is not None, f"{case.id}: {items} do not account for {case.text!r}"
    for calls, gap in zip(groups, match.groups(), strict=True):
        assert not (calls and values) or _holds(gap, calls), f"{case.id}: {calls} are not in {gap!r}"


def _holds(gap: str, calls: Sequence[Call]) -> bool:
    """Whether raw text has the calls' names and the words of their arguments in it, in this order."""
    at = 0
    for call in calls:
        at = gap.find(call.name, at)
        if at < 0:
            return False
        end = at
        for leaf in _leaves(call.arguments):
            spellings = {leaf, json.dumps(leaf)[1:-1], json.dumps(leaf, ensure_ascii=False)[1:-1]}
            found = [gap.find(s) for s in spellings if s in gap]
            if not found and not _escaped(leaf):
                return False
            end = max([end, *found])
        at = at if len(calls) == 1 else at + len(call.name)
    return True


def _escaped(leaf: str) -> bool:
    """Whether a value may be spelt in ways that are not worth trying."""
    return any(char in leaf for char in "\\\"'\n\t/") or not leaf.isascii()


def _leaves(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in (key, *_leaves(item))]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value] if isinstance(value, str) else []


def _markers(case: Case) -> list[str]:
    """All that may vanish, longest first."""
    found: set[str] = set()
    if case.family:
        found |= {*find_tool_call_family(case.family).markers, *find_tool_call_family(case.family).ignored}
    if case.think:
        reasoning = find_reasoning_family(case.think)
        found |= {*reasoning.markers, *reasoning.ignored}
        if reasoning.read_answer is None:
            for opener, closers in reasoning.pairs:
                found |= {opener, *closers}
    return sorted(found, key=len, reverse=True)


def passes(case: Case, wrap: Callable[[Parser], Parser]) -> bool:
    """Whether a case gives what it should, by single characters, with a parser that was tampered with."""
    try:
        got = play(lambda: wrap(parser(case)), case.text)
    except (ValueError, AssertionError):
        return False
    return exact(got) == exact(case.want)


class Forgetful:
    """The twin that must fail: it drops what was held back at the end."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser

    def feed(self, text: str) -> Sequence[Delta]:
        return self._parser.feed(text)

    def finish(self) -> Sequence[Delta]:
        return ()
