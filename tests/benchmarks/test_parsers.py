"""`python -m benchmarks parsers`: its samples, its arithmetic and its report. Speed itself is not tested."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator

import pytest
from click.testing import CliRunner
from rich.console import Console

from benchmarks.__main__ import command
from benchmarks.parser_samples import CALLS, TEXT, TOOLS, make_call, make_reasoning
from benchmarks.parsers import SIZES, ParsersPlan, print_parsers_report, run_parsers_bench
from mlxrun.api.parsers.answer_parser import AnswerParser
from mlxrun.api.parsers.registry import (
    REASONING_FAMILIES,
    TOOL_CALL_FAMILIES,
    find_reasoning_family,
    find_tool_call_family,
)

PLAN = ParsersPlan(("hermes", "think"), length=2000, repeat=2)


def test_every_parser_has_a_sample() -> None:
    assert set(CALLS) == {family.name for family in TOOL_CALL_FAMILIES}


@pytest.mark.parametrize("name", CALLS)
def test_a_sample_is_a_call(name: str) -> None:
    """Else `marked` would measure plain text."""
    parser = AnswerParser(find_tool_call_family(name), None, TOOLS)
    deltas = [*parser.feed(make_call(name)), *parser.finish()]
    assert [delta.name for delta in deltas if delta.name] == ["save"]
    assert json.loads("".join(delta.text for delta in deltas)) == {"path": "a.txt", "text": TEXT}


@pytest.mark.parametrize("name", [family.name for family in REASONING_FAMILIES])
def test_a_sample_is_a_thought(name: str) -> None:
    parser = AnswerParser(None, find_reasoning_family(name))
    deltas = [*parser.feed(make_reasoning(name)), *parser.finish()]
    assert {delta.kind for delta in deltas} == {"reasoning"}
    assert "".join(delta.text for delta in deltas).strip() == TEXT.strip()


def test_rates() -> None:
    """Characters over seconds: the clock ticks once an answer."""
    said: list[str] = []
    ticks: Iterator[int] = itertools.count()
    report = run_parsers_bench(PLAN, said.append, lambda: float(next(ticks)))
    hermes, think = report["parsers"]
    assert (hermes["kind"], hermes["name"], think["kind"], think["name"]) == (
        *("tools", "hermes"),
        *("reasoning", "think"),
    )
    assert set(hermes["text"]) == set(hermes["marked"]) == {str(size) for size in SIZES}
    assert all(1900 < rate <= 2000 for rate in hermes["text"].values())
    assert set(hermes["marked"].values()) == {len(make_call("hermes")) * (2000 // len(make_call("hermes")))}
    assert len(said) == 2


def test_table() -> None:
    ticks = itertools.count()
    report = run_parsers_bench(PLAN, lambda line: None, lambda: next(ticks) / 1000)
    out = io.StringIO()
    print_parsers_report(report, Console(file=out))
    assert "| hermes |" in out.getvalue().replace("  ", "")
    assert "1.9 M/s" in out.getvalue()


def test_command() -> None:
    done = CliRunner().invoke(
        command, ["parsers", "--parser", "think", "--length", "100", "--repeat", "1", "--json", "-"]
    )
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["settings"] == {"length": 100, "repeat": 1, "sizes": list(SIZES)}
    wrong = CliRunner().invoke(command, ["parsers", "--parser", "nope"])
    assert wrong.exit_code == 2
    assert "--parser nope: there are" in wrong.output
