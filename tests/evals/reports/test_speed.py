"""Throughput and latency over time, from the times of lines."""

from __future__ import annotations

import pytest

from mlxrun.evals.reports.speed import find_percentile, measure_series, measure_totals
from tests.helpers.report_jobs import make_timings


def test_nothing_is_measured_of_no_lines() -> None:
    assert measure_totals([]) is None and measure_series([]) is None
    assert measure_series(make_timings({"took": 0.0})) is None


def test_totals() -> None:
    totals = measure_totals(
        make_timings({}, {"reused": 100, "computed": 0, "tries": 2}, {"failed": True, "first": None})
    )
    assert totals is not None
    assert (totals.lines, totals.seconds) == (3, 4.0)
    assert (totals.computed, totals.reused, totals.output) == (200, 100, 60)
    assert totals.reused_share == pytest.approx(1 / 3)
    assert totals.first == (1.0, 1.0) and totals.latency == (3.0, 3.0), "without the time that lines waited"


def test_all_tokens_are_in_the_series() -> None:
    timings = make_timings(*({"started": 1000.0 + at, "key": str(at), "reused": at} for at in range(40)))
    series = measure_series(timings)
    assert series is not None and series.seconds == 43.0
    width = series.seconds / len(series.prompt)
    assert sum(series.prompt) * width == pytest.approx(40 * 100)
    assert sum(series.output) * width == pytest.approx(40 * 20)
    assert {value for value in series.latency if value is not None} == {3.0}


def test_parts_in_which_no_line_ended_have_no_latency() -> None:
    series = measure_series(make_timings({"reused": 300}))
    assert series is not None
    assert series.latency == [None, 3.0] and series.reused == [None, 0.75]


def test_tokens_are_where_they_were_computed() -> None:
    """The prompt in the first half of the time, the answer in the second."""
    (timing,) = make_timings({"waited": 0.0, "first": 2.0, "took": 4.0})
    series = measure_series([timing] * 16)
    assert series is not None and len(series.prompt) == 4
    assert series.prompt == pytest.approx([800, 800, 0, 0]) and series.output == pytest.approx(
        [0, 0, 160, 160]
    )


def test_time_between_runs_is_left_out() -> None:
    first, second = make_timings({}, {"run": 2, "started": 90_000.0})
    series = measure_series([first, second])
    assert series is not None and series.seconds == 8.0 and series.resumes == [4.0]


def test_lines_that_took_no_time_or_had_no_tokens() -> None:
    timings = make_timings({}, {"took": 0.0, "waited": None, "first": None, "failed": True, "output": 0})
    series = measure_series(timings)
    assert series is not None
    assert sum(series.prompt) * series.seconds / len(series.prompt) == pytest.approx(200)


def test_percentiles() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (find_percentile(values, 0.5), find_percentile(values, 0.95)) == (50, 95)
    assert find_percentile([7.0], 0.95) == 7.0
