"""The page of a history: a row and a line for each cell, and names that stay texts."""

from __future__ import annotations

from dataclasses import replace

from mlxrun.evals.history import HistoryRow, find_trends
from mlxrun.evals.reports.page import render_history
from tests.evals.reports.test_page import find_dangers

ROW = HistoryRow("a/b/seed-1", "2026-11-01T00:00:00Z", 8, 0.5, (0.3, 0.7), None, "0", None, None)


def test_a_line_for_each_cell() -> None:
    names = ("a/b/seed-1", "<script>alert(1)</script>")
    rows = [replace(ROW, cell=name, value=value) for value in (0.5, 0.6, 0.4, 0.5, 0.1) for name in names]
    html = render_history(find_trends(rows), "<b>.jsonl")
    assert html.count('<path class="line"') == 2 and html.count('<circle class="dot"') == 10
    assert "10.0\u00a0% [30.0, 70.0]" in html and "is worse than was to be expected" in html
    assert find_dangers(html) == [] and "&lt;script&gt;alert" in html


def test_one_run_and_no_interval() -> None:
    html = render_history(find_trends([replace(ROW, interval=None)]), "nightly.jsonl")
    assert html.count('<circle class="dot"') == 1 and "NaN" not in html and 'whisker"' not in html
