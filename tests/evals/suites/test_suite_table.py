"""What `mlxrun eval` prints: the matrix of scores, and the costs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from mlxrun.evals.suites.suite_cost import CellCost
from mlxrun.evals.suites.suite_table import print_costs, print_matrix
from mlxrun.jobs.lines.job_check import CheckedLines
from tests.helpers.suite_files import CAPITALS, read_cells, write_suite

RECORD = {"task": "t", "variant": "seed-0", "state": "done", "done": 4, "failed": 0, "cut_by_length": 0}


def make_scores(share: float, interval: list[float] | None) -> dict[str, Any]:
    return {"groups": {}, "total": {"share": share, "interval": interval}}


def test_the_matrix() -> None:
    broken = {"groups": {}, "total": {"share": 1, "interval": None, "unscored": 3}}
    records = [
        {**RECORD, "model": "a", "scores": make_scores(0.725, [0.651, 0.789])},
        {**RECORD, "model": "[b]", "scores": broken, "failed": 2, "cut_by_length": 1},
        {**RECORD, "model": "a", "task": "other", "scores": None},
        {**RECORD, "model": "[b]", "task": "other", "scores": None, "state": "failed"},
        {**RECORD, "model": "a", "task": "third", "scores": make_scores(0, None), "state": "todo"},
    ]
    stream = io.StringIO()
    print_matrix(records, stream)
    rows = [line.split("  ") for line in stream.getvalue().splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells == [
        ["task", "variant", "a", "[b]"],
        ["t", "seed-0", "72.5 % [65.1, 78.9]", "100.0 % (2 failed, 3 unscored, 1 cut)"],
        ["other", "seed-0", "4 lines", "failed"],
        ["third", "seed-0", "0.0 % (todo)"],
    ]


def test_the_costs(tmp_path: Path) -> None:
    text = CAPITALS.replace("{tiny: }", "{tiny: , big: , gone: }")
    _, cells, _ = read_cells(write_suite(tmp_path, text))
    found = CheckedLines(lines=3, requests=3, prompt_tokens=1000, max_tokens=60)
    costs = [
        CellCost(cells[0], found, 61.0, done=2),
        CellCost(cells[1], found),
        CellCost(cells[2], error="no [such] model"),
    ]
    stream = io.StringIO()
    print_costs(costs, {"embedded": 7_600_000}, stream)
    lines = stream.getvalue().splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["tiny/capitals/seed-0", "3", "2", "0", "1,000", "60", "<=", "1:01"],
        ["big/capitals/seed-0", "3", "0", "0", "1,000", "60", "unknown"],
        ["gone/capitals/seed-0", "-", "-", "-", "-", "-", "-"],
    ]
    assert lines[4:] == [
        "gone: cannot be loaded: no [such] model",
        "3 cells, 6 lines (2 done already), 2,000 prompt tokens, at most 120 output tokens",
        "time: unknown for models that have not run yet in this folder",
        "time: at most 1:01, by the speed of earlier cells",
        "memory: embedded has 7.6 MB of weights",
    ]
