"""The trends of a history file as a page, which contains all it needs as a report does."""

from __future__ import annotations

from collections.abc import Sequence

from mlxrun.evals.history import CellTrend, list_cells
from mlxrun.evals.reports.charts import draw_trend
from mlxrun.evals.reports.page import render_template


def render_history(trends: Sequence[CellTrend], name: str) -> str:
    """Render the page of these trends. `name`: of the history file."""
    cells = [
        {**row, "plot": _draw(trend), "alarm": trend.has_jumped or trend.has_drifted}
        for trend, row in zip(trends, list_cells(trends), strict=True)
    ]
    return render_template("history.html", cells=cells, name=name)


def _draw(trend: CellTrend) -> str:
    first, last = (each.time[:10] for each in (trend.rows[0], trend.rows[-1]))
    name = f"{trend.cell}: {len(trend.rows)} runs from {first} to {last}"
    return draw_trend([row.value for row in trend.rows], [row.interval for row in trend.rows], name)
