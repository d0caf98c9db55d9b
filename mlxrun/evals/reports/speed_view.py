"""The speed of runs as a report shows it: a table, and small charts over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup

from mlxrun.evals.reports.charts import choose_top, draw_series
from mlxrun.evals.reports.facts import describe_hits
from mlxrun.evals.reports.report_runs import ReportRun
from mlxrun.evals.reports.speed import SpeedSeries, SpeedTotals, measure_series, measure_totals

MOST_CHARTED = 6  # runs whose series are drawn


@dataclass(frozen=True, slots=True)
class SpeedChart:
    """A small chart with its name."""

    name: str
    note: str
    plot: Markup


@dataclass(frozen=True, slots=True)
class SpeedRow:
    """How fast one run was."""

    run: int
    label: str
    totals: SpeedTotals
    hits: str
    charts: list[SpeedChart] = field(default_factory=list)

    @property
    def lines_per_minute(self) -> str:
        return f"{60 * self.totals.lines / max(self.totals.seconds, 1e-3):,.0f}"

    @property
    def prompt_rate(self) -> int:
        return round(self.totals.computed / max(self.totals.seconds, 1e-3))

    @property
    def output_rate(self) -> int:
        return round(self.totals.output / max(self.totals.seconds, 1e-3))


def list_speeds(runs: Sequence[ReportRun]) -> list[SpeedRow]:
    """A row for each run whose lines have times; the charts of all runs have the same scales."""
    charted = runs if len(runs) <= MOST_CHARTED else []
    series = {at: found for at, run in enumerate(charted) if (found := measure_series(run.timings))}
    shown: list[list[float | None]] = [[], [], []]
    for found in series.values():
        shown[0] += found.prompt
        shown[1] += found.output
        shown[2] += found.latency_high
    scales = [choose_top(max((value or 0.0 for value in values), default=0.0)) for values in shown]
    rows = []
    for at, run in enumerate(runs):
        totals = measure_totals(run.timings)
        if totals is not None:
            charts = draw_charts(series[at], scales) if at in series else []
            rows.append(SpeedRow(at, run.label, totals, describe_hits(run.manifest), charts))
    return rows


def draw_charts(series: SpeedSeries, scales: Sequence[float]) -> list[SpeedChart]:
    """Throughput, latency and cache hits of one run over its time. `scales`: the ends of the first three."""
    resumed = "; dashed: resumed" if series.resumes else ""
    prompt, output, latency = scales

    def draw(name: str, note: str, top: float, *values: Sequence[float | None]) -> SpeedChart:
        label = f"{name} over time, {note}"
        plot = draw_series(values, series.seconds, label, top=top, resumes=series.resumes)
        return SpeedChart(name, note, plot)

    share = [None if each is None else 100 * each for each in series.reused]
    return [
        draw("Prompt", f"tokens per second{resumed}", prompt, series.prompt),
        draw("Output", "tokens per second", output, series.output),
        draw("Line latency", "s, median and p90", latency, series.latency, series.latency_high),
        draw("Prompt from the prefix cache", "%", 100.0, share),
    ]
