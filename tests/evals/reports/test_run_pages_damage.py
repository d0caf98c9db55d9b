"""Manifests whose inner values are of other kinds, and files that would block: pages name them, and never
fail."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import JobError
from mlxrun.evals.reports.run_pages import RunPages
from tests.helpers.batch_fakes import chat, chats
from tests.helpers.report_jobs import run_lines
from tests.helpers.suite_bench import SuiteBench
from tests.helpers.suite_files import CAPITALS, write_suite

OTHERS: tuple[Any, ...] = (7, "x", None, [], {}, [1], {"a": 1}, True, -1.5, "1e999")


def list_places(value: Any) -> Iterator[list[Any]]:
    """The keys that lead to each value in a JSON value."""
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        yield [key]
        if isinstance(each, dict | list):
            yield from ([key, *rest] for rest in list_places(each))


def put(value: Any, place: list[Any], other: Any) -> Any:
    found = inner = copy.deepcopy(value)
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = other
    return found


def check_damaged(folder: Path, path: Path, step: int, kinds: int) -> None:
    """Every value of a file, or each of so many, is replaced by others of so many kinds, one at a time. The
    index has all runs, and reports are pages or errors that have a name."""
    whole = json.loads(path.read_text())
    keys = [run.key for run in RunPages(folder).list_runs()]
    for at, place in enumerate(list(list_places(whole))[::step]):
        for other in (OTHERS * 2)[at % len(OTHERS) :][:kinds]:
            path.write_text(json.dumps(put(whole, place, other)))
            pages = RunPages(folder)
            pages.render([])
            for key in keys:
                try:
                    assert pages.render([key])[1]
                except JobError as error:
                    assert any(name in str(error) for name in (path.name, *keys)), (place, other, error)
    path.write_text(json.dumps(whole))


SEEDS = f"{CAPITALS}\n    seeds: [1, 2]\n    vary: {{sampling.temperature: [1]}}\n"
EACH = pytest.mark.parametrize(("step", "kinds"), [(11, 1), pytest.param(1, 4, marks=pytest.mark.sweep)])


@EACH
async def test_a_run(tmp_path: Path, step: int, kinds: int) -> None:
    bench = await run_lines(tmp_path, [*chats(1), chat("long", "LONG")])
    check_damaged(tmp_path, bench.paths.manifest, step, kinds)


@EACH
async def test_a_suite(tmp_path: Path, step: int, kinds: int) -> None:
    bench = SuiteBench(write_suite(tmp_path, SEEDS))
    await bench.run()
    check_damaged(tmp_path, bench.folder / "suite.json", step, kinds)


async def test_fifos_in_place_of_outputs_and_journals(tmp_path: Path) -> None:
    """Each is named, and none is waited for."""
    bench = await run_lines(tmp_path, [*chats(1), chat("long", "LONG")])
    paths = bench.paths
    for path in (paths.out, paths.errors, paths.journal, paths.timings):
        data = path.read_bytes()
        path.unlink()
        os.mkfifo(path)
        pages = RunPages(tmp_path)
        assert len(pages.list_runs()) == 1
        try:
            assert path == paths.timings or "a FIFO" in pages.render(["job.out.jsonl"])[1]
        except JobError as error:
            assert path in (paths.out, paths.journal) and "regular file" in str(error)
        path.unlink()
        path.write_bytes(data)
