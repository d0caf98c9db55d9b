"""How fast runs were: a table, and small charts over time, from the lines' times in timings.jsonl.

A line's computed prompt tokens are spread evenly over the time until its first output token. Its output
tokens are spread over the time from there to its end. Time without a running line, such as between a kill and
the next run, is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from markupsafe import Markup

from mlxrun.evals.reports.charts import choose_top, draw_series
from mlxrun.evals.reports.report_runs import ReportRun, describe_hits
from mlxrun.jobs.records.journal import LineTiming

MOST_PARTS, LINES_PER_PART = 60, 8  # of a chart
MOST_CHARTED = 6  # runs whose series are drawn


@dataclass(frozen=True, slots=True)
class SpeedSeries:
    """Values over time: one for each of equally long parts of `seconds`, None where there is none.

    `prompt`, `output`: tokens a second, for the prompt only computed tokens; `reused`: the share of prompt
    tokens from the prefix cache. `latency`: the median seconds from a line's first prompt tokens to its end,
    over lines that ended in this part; `latency_high`: their 90th percentile. `resumes`: when further runs
    began, in seconds from the start.
    """

    seconds: float
    prompt: list[float]
    output: list[float]
    reused: list[float | None]
    latency: list[float | None]
    latency_high: list[float | None]
    resumes: list[float]


@dataclass(frozen=True, slots=True)
class SpeedTotals:
    """One run, or all runs of a job. `seconds`: time in which any line was running; `computed`, `reused`:
    prompt tokens; `output`: output tokens. `first`, `latency`: medians and 95th percentiles of a line's
    seconds until its first output token and until its end, without the time that it waited."""

    lines: int
    seconds: float
    computed: int
    reused: int
    output: int
    first: tuple[float, float] | None
    latency: tuple[float, float] | None

    @property
    def reused_share(self) -> float:
        prompt = self.computed + self.reused
        return self.reused / prompt if prompt else 0.0

    @property
    def lines_per_minute(self) -> str:
        return f"{60 * self.lines / max(self.seconds, 1e-3):,.0f}"

    @property
    def prompt_rate(self) -> int:
        return round(self.computed / max(self.seconds, 1e-3))

    @property
    def output_rate(self) -> int:
        return round(self.output / max(self.seconds, 1e-3))


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


def list_speeds(runs: Sequence[ReportRun]) -> list[SpeedRow]:
    """List a row for each run whose lines have times. The charts of all runs have the same scales."""
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
    """Draw throughput, latency and cache hits of one run over its time. `scales`: the upper ends of the first
    three."""
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


def find_percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the sorted values that is at least as large as this share of them."""
    return values[max(0, math.ceil(share * len(values)) - 1)]


def measure_totals(timings: Sequence[LineTiming]) -> SpeedTotals | None:
    """Measure the totals of all lines; None if there are none."""
    if not timings:
        return None
    first = sorted(each.first - (each.waited or 0.0) for each in timings if each.first is not None)
    latency = sorted(_get_latency(each) for each in timings if not each.failed)
    return SpeedTotals(
        lines=len(timings),
        seconds=sum(end - start for start, end in _list_spans(timings)),
        computed=sum(each.computed for each in timings),
        reused=sum(each.reused for each in timings),
        output=sum(each.output for each in timings),
        first=_take_two(first),
        latency=_take_two(latency),
    )


def measure_series(timings: Sequence[LineTiming]) -> SpeedSeries | None:
    """Measure the series of all lines; None if they took no time."""
    bins = min(MOST_PARTS, 2 + len(timings) // LINES_PER_PART)
    spans = _list_spans(timings)
    seconds = sum(end - start for start, end in spans)
    if seconds <= 0:
        return None
    axis = _Axis(spans, seconds / bins, bins)
    prompt, output, computed, reused = ([0.0] * bins for _ in range(4))
    ended: list[list[float]] = [[] for _ in range(bins)]
    for each in timings:
        end = each.started + each.took
        begun = min(each.started + (each.waited or 0.0), end)
        first = end if each.first is None else max(begun, min(each.started + each.first, end))
        axis.spread(prompt, each.computed, begun, first)
        axis.spread(output, each.output, first, end)
        at = axis.find_bin(end)
        computed[at] += each.computed
        reused[at] += each.reused
        if not each.failed:
            ended[at].append(_get_latency(each))
    for values in ended:
        values.sort()
    sums = [a + b for a, b in zip(computed, reused, strict=True)]
    return SpeedSeries(
        seconds=seconds,
        prompt=[value / axis.width for value in prompt],
        output=[value / axis.width for value in output],
        reused=[part / both if both else None for part, both in zip(reused, sums, strict=True)],
        latency=[find_percentile(values, 0.5) if values else None for values in ended],
        latency_high=[find_percentile(values, 0.9) if values else None for values in ended],
        resumes=[axis.measure(start) for start in _list_starts(timings)[1:]],
    )


def _get_latency(timing: LineTiming) -> float:
    return max(0.0, timing.took - (timing.waited or 0.0))


def _take_two(values: Sequence[float]) -> tuple[float, float] | None:
    return (find_percentile(values, 0.5), find_percentile(values, 0.95)) if values else None


def _list_starts(timings: Iterable[LineTiming]) -> list[float]:
    """When the first line of each run began."""
    by_run = groupby(sorted(timings, key=lambda each: each.run), key=lambda each: each.run)
    return sorted(min(each.started for each in group) for _, group in by_run)


def _list_spans(timings: Iterable[LineTiming]) -> list[tuple[float, float]]:
    """The times in which any line was under way, in order and apart from each other."""
    spans: list[tuple[float, float]] = []
    for start, end in sorted((each.started, each.started + each.took) for each in timings):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((start, end))
    return spans


@dataclass(frozen=True, slots=True)
class _Axis:
    """Time without the gaps between spans, in bins of `width` seconds."""

    spans: Sequence[tuple[float, float]]
    width: float
    bins: int

    def measure(self, time: float) -> float:
        """Seconds from the start to a time, without gaps."""
        return sum(max(0.0, min(time, end) - start) for start, end in self.spans)

    def find_bin(self, time: float) -> int:
        return min(self.bins - 1, int(self.measure(time) / self.width))

    def spread(self, values: list[float], amount: float, start: float, end: float) -> None:
        """Add an amount evenly over a time; all of it to one bin if the time is short."""
        low, high = self.measure(start), self.measure(end)
        if not amount:
            return
        if high - low < 1e-9:
            values[min(self.bins - 1, int(low / self.width))] += amount
            return
        for at in range(int(low / self.width), min(self.bins - 1, int(high / self.width)) + 1):
            inside = min(high, (at + 1) * self.width) - max(low, at * self.width)
            values[at] += amount * max(0.0, inside) / (high - low)
