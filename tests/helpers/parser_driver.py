"""Cases for parsers as data, parsers that read them, and what these return as a list of items.

`Case.expected` is a list in the order of the text: a string is content, `Reasoning` reasoning, `Call` a call.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hypothesis import strategies as st

from mlxrun.api.parsers.answer_parser import AnswerParser
from mlxrun.api.parsers.delta import Delta, Parser, make_call_id
from mlxrun.api.parsers.registry import find_reasoning_family, find_tool_call_family


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
    """Merge deltas into items. Of text that goes on behind something else the line feed is left out that
    has to begin it."""
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
    kinds: set[str] = set()
    for item in items:
        if item[0] != "call" and item[0] in kinds:
            assert item[1].startswith("\n"), "no line feed between two sections"
            item[1] = item[1][1:]
        kinds.add(item[0])
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

    Neighbours of one kind are joined by a line feed, as deltas do not show where one ends."""
    out: list[tuple[str, ...]] = []
    for item in map(_normalise_item, items):
        if out and out[-1][0] == item[0] != "call":
            out[-1] = (item[0], f"{out[-1][1]}\n{item[1]}")
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

    def finish(self, stopped: bool = False) -> Sequence[Delta]:
        return ()


class MemorylessParser:
    """A broken parser, to which every chunk is an answer of its own: it misses markers that are split."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def feed(self, text: str) -> Sequence[Delta]:
        one = make_parser(self._case)
        return [*one.feed(text), *one.finish()]

    def finish(self, stopped: bool = False) -> Sequence[Delta]:
        return ()
