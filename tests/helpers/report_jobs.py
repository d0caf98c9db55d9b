"""Runs for the tests of reports: with texts that would break a page, with failures, cuts and groups."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxrun.evals.reports.report_lines import LineRow, LineRows
from mlxrun.evals.reports.report_runs import ReportRuns, read_runs
from mlxrun.evals.run_folders.run_line import RunLine
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.lines.line_keys import digest_short
from mlxrun.jobs.records.journal import LineTiming
from mlxrun.jobs.records.output_records import dump_record
from tests.helpers.batch_fakes import Bench, chat, write_job

# Each would run a script, end its element or change how its surroundings look, if it were not escaped.
HOSTILE = (
    "</script><script>window.injected = 1</script>",
    '<img src="x" onerror="window.injected = 1">',
    "<!--<script>",
    "'\"&<>`${1}\\u003c",
    "\u202egnp.exe\u2066",
    "line\u2028separator\u2029 \u200b\ufeff",
    "]]> --> </style></title></textarea>",
    "| a | `b` **c** [d](javascript:alert(1)) |",
)


def hostile_lines() -> list[dict[str, Any]]:
    """Lines that have such a text everywhere: id, group, prompt, expected answer, and so in the answer."""
    lines = []
    for at, text in enumerate(HOSTILE):
        wanted = {"expected": text, "match": "contains", "group": f"{text} {at % 2}"}
        lines.append(chat(f"{at} {text}", text, wanted))
    return lines


def mixed_lines() -> list[Any]:
    """Right and wrong lines in two groups, a cut one, a failed one, a bad one and one without a score."""
    return [
        chat("right", "yes", {"expected": "yes", "match": "contains", "group": "a"}),
        chat("wrong", "no", {"expected": "yes", "match": "contains", "group": "a"}),
        chat("cut", "a long answer", {"expected": "a", "match": "contains", "group": "b"}, max_tokens=3),
        chat("failed", "LONG 1", {"expected": "x", "match": "contains", "group": "b"}),
        chat("free", "no score"),
        "this is not JSON",
    ]


async def run_lines(folder: Path, lines: list[Any], name: str = "job.jsonl") -> Bench:
    """A finished run of these lines."""
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(write_job(folder, lines, name))
    await bench.run()
    return bench


async def read_lines(folder: Path, lines: list[Any]) -> ReportRuns:
    """A report's data of a run of these lines."""
    bench = await run_lines(folder, lines)
    return read_runs([bench.paths.out])


async def run_other_answers(folder: Path, lines: list[Any], ids: set[str]) -> Bench:
    """A run of the same lines in which those with these ids score 0."""

    def change(record: dict[str, Any]) -> None:
        if record["custom_id"] in ids:
            record["eval"]["score"] = 0

    return await run_changed(folder, lines, change)


async def run_changed(folder: Path, lines: list[Any], change: Callable[[dict[str, Any]], None]) -> Bench:
    """A run whose records were changed as if the run had written them so."""
    bench = await run_lines(folder, lines)
    journal = bench.paths.journal.read_bytes()
    records = []
    for data in bench.paths.out.read_bytes().splitlines(keepends=True):
        record = json.loads(data)
        change(record)
        records.append(dump_record(record))
        journal = journal.replace(digest_short(data).hex().encode(), digest_short(records[-1]).hex().encode())
    bench.paths.out.write_bytes(b"".join(records))
    bench.paths.journal.write_bytes(journal)
    return bench


def make_many_rows(count: int) -> list[LineRow]:
    """Rows of two runs with prompts and answers of some hundred characters, as a report of them has."""
    rows, words = LineRows(), ("the", "cat", "sat", "on", "mats", "and", "looked", "at", "moons")
    for at in range(count):
        rng = random.Random(at)
        prompt = f"Question {at}: " + " ".join(rng.choices(words, k=60))
        line = JobLine(
            at, f"line-{at}", "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}
        )
        for run in range(2):
            text = " ".join(rng.choices(words, k=40))
            body = {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}
            scored = {
                "score": rng.randint(0, 1),
                "match": "contains",
                "expected": "moon",
                "group": f"g{at % 7}",
            }
            record = {"id": "", "custom_id": line.custom_id, "response": {"body": body}, "error": None}
            rows.add(run, 0, RunLine(f"line-{at}", at, line, record | {"eval": scored}), TIMING)
    return list(rows.rows.values())


def write_suite(folder: Path, *records: dict[str, Any]) -> None:
    """suite.json of a folder that has cells; `records`: those of some cells, with or without a run."""
    names = [str(job.parent.relative_to(folder)) for job in sorted(folder.rglob("job.jsonl"))]
    known = {each["name"]: each for each in records}
    cells = [
        {"name": name, "job": f"{name}/job.jsonl", **known.get(name, {})}
        for name in dict.fromkeys([*names, *known])
    ]
    (folder / "suite.json").write_text(json.dumps({"format": 1, "cells": cells, "runs": []}))


TIMING = LineTiming(1, "a", False, 1000.0, 1.0, 2.0, 4.0, 100, 0, 20, 1)


def make_timings(*changes: dict[str, Any]) -> list[LineTiming]:
    """Timings that differ from TIMING as given."""
    return [replace(TIMING, **change) for change in changes]
