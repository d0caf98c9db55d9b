"""The table and the charts of speed."""

from __future__ import annotations

from pathlib import Path

from mlxrun.evals.reports import speed
from mlxrun.evals.reports.report_runs import read_runs
from tests.helpers.batch_fakes import chats
from tests.helpers.report_jobs import make_timings, run_lines


async def test_runs_have_rows_and_charts_of_one_scale(tmp_path: Path) -> None:
    paths = [(await run_lines(tmp_path / name, chats(3))).paths.out for name in "ab"]
    runs = read_runs(paths).runs
    runs[0].timings = make_timings({}, {"key": "b", "started": 1001.0})
    runs[1].timings = make_timings({"computed": 4000})
    first, second = speed.list_speeds(runs)
    totals = first.totals
    assert (first.label, totals.prompt_rate, totals.output_rate, totals.lines_per_minute) == (
        "a/job",
        40,
        8,
        "24",
    )
    assert [chart.name for chart in first.charts] == [chart.name for chart in second.charts]
    assert ">2000<" in first.charts[0].plot and ">2000<" in second.charts[0].plot


async def test_runs_without_times_have_no_row(tmp_path: Path) -> None:
    bench = await run_lines(tmp_path, chats(2))
    bench.paths.timings.unlink()
    assert speed.list_speeds(read_runs([bench.paths.out]).runs) == []
