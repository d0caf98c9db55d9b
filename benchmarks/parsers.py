"""`python -m benchmarks parsers`: characters a second of every parser, for plain text and for its format.

No model takes part. `text` is plain text with line ends. `marked` is, for a tool-call parser, an answer of
one call, for a reasoning parser one of reasoning. Each is fed in chunks of several sizes; a token is about 4
characters. Seconds are processor time: nothing here waits, and other processes do not count.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.parser_samples import TOOLS, WORDS, list_parsers, make_call, make_reasoning
from mlxrun import __version__
from mlxrun.api.parsers.answer_parser import AnswerParser
from mlxrun.api.parsers.delta import Parser
from mlxrun.api.parsers.registry import find_reasoning_family, find_tool_call_family
from mlxrun.cli.bench.report import make_console, make_table

FORMAT = 1
SIZES = (1, 4, 16, 64)
KINDS = ("text", "marked")

Say = Callable[[str], None]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class ParsersPlan:
    """What to measure. `length`: characters of an answer of plain text; `parsers`: names, empty for all."""

    parsers: tuple[str, ...] = ()
    length: int = 100_000
    repeat: int = 3


def run_parsers_bench(plan: ParsersPlan, say: Say, clock: Clock = time.process_time) -> dict[str, Any]:
    """Measure everything; return the report, as `--json` writes it: medians in characters a second."""
    rows = []
    for kind, name in list_parsers():
        if not plan.parsers or name in plan.parsers:
            rows.append({"kind": kind, "name": name} | _measure(plan, kind, name, clock))
            say(f"{kind} {name}: {_format_rate(rows[-1]['text']['4'])} at 4 characters")
    settings = {"length": plan.length, "repeat": plan.repeat, "sizes": list(SIZES)}
    return {"format": FORMAT, "versions": {"mlxrun": __version__}, "settings": settings, "parsers": rows}


def _measure(plan: ParsersPlan, kind: str, name: str, clock: Clock) -> dict[str, Any]:
    def make() -> Parser:
        if kind == "tools":
            return AnswerParser(find_tool_call_family(name), None, TOOLS)
        return AnswerParser(None, find_reasoning_family(name))

    line = WORDS + "\n"
    plain = line * max(plan.length // len(line), 1)
    marked = make_call(name) if kind == "tools" else make_reasoning(name)
    answers = {"text": [plain], "marked": [marked] * max(plan.length // len(marked), 1)}
    rates: dict[str, Any] = {}
    for what in KINDS:
        rates[what] = {
            str(size): statistics.median(
                _measure_rate(make, answers[what], size, clock) for _ in range(plan.repeat)
            )
            for size in SIZES
        }
    return rates


def _measure_rate(make: Callable[[], Parser], answers: Sequence[str], size: int, clock: Clock) -> float:
    """Measure characters a second over all answers, each with a new parser."""
    split = [[text[i : i + size] for i in range(0, len(text), size)] for text in answers]
    start = clock()
    for chunks in split:
        parser = make()
        feed = parser.feed
        for chunk in chunks:
            feed(chunk)
        parser.finish()
    return sum(map(len, answers)) / (clock() - start)


def print_parsers_report(report: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a table: rows are parsers, columns chunks of plain text, then of calls or reasoning."""
    console = make_console(console)
    sizes = [str(size) for size in report["settings"]["sizes"]]
    columns = ["kind", "parser", *(f"{what} {size}" for what in KINDS for size in sizes)]
    cells = [
        [row["kind"], row["name"], *(_format_rate(row[what][size]) for what in KINDS for size in sizes)]
        for row in report["parsers"]
    ]
    console.print(make_table(columns, 2, cells, console.is_terminal))
    note = (
        "Values are characters read per second of processor time. The number in a heading is the characters "
        "in each chunk; text is plain text, marked is a tool call or reasoning."
    )
    console.print(note, highlight=False, soft_wrap=True)


def _format_rate(rate: float) -> str:
    return f"{rate / 1e6:.1f} M/s"
