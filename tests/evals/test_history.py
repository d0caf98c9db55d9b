"""History files: their rows, and the tests for jumps and drift against SciPy and statsmodels."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm

from mlxrun.core.errors import JobError
from mlxrun.evals import history
from mlxrun.evals.history import (
    CellTrend,
    HistoryRow,
    add_runs,
    find_failures,
    find_trends,
    list_cells,
    read_history,
)
from mlxrun.evals.rescoring import rescore
from mlxrun.evals.run_folders.run_folder import RunFolder
from mlxrun.jobs.scoring.eval_spec import EvalReader
from tests.helpers.batch_fakes import chats
from tests.helpers.eval_runs import run_lines, sampled_chats

SECONDS = {"unit": "s", "better": "lower", "aggregate": "mean"}


def make_row(value: float, measure: dict[str, str] | None = None, cell: str = "m/t/seed-1") -> HistoryRow:
    return HistoryRow(cell, "2026-01-01T00:00:00Z", 10, value, None, measure, "a" * 64, None, "1.0")


def find(values: Sequence[float], measure: dict[str, str] | None = None) -> CellTrend:
    [trend] = find_trends([make_row(value, measure) for value in values])
    return trend


def test_a_jump_leaves_the_prediction_interval_of_statsmodels() -> None:
    values = [0.71, 0.69, 0.7, 0.72, 0.6]
    trend = find(values)
    model = sm.OLS(values[:-1], np.ones(4)).fit()
    wanted = model.get_prediction([[1.0]]).summary_frame(alpha=0.05)
    assert trend.bounds == pytest.approx((wanted["obs_ci_lower"][0], wanted["obs_ci_upper"][0]))
    assert trend.has_jumped and not find([*values[:-1], 0.8]).has_jumped  # higher is better
    assert find([1 - each for each in values], SECONDS).has_jumped
    assert not find([*values[:-1], 0.69]).has_jumped
    assert find([0.5, 0.7, 0.6]).bounds is None


def test_a_slow_decline_is_drift_and_no_jump() -> None:
    values = [0.80 - 0.004 * at + 0.01 * (at % 2) for at in range(12)]
    trend = find(values)
    assert trend.has_drifted and not trend.has_jumped
    assert not find(values[::-1]).has_drifted and find(values[::-1], SECONDS).has_drifted
    assert find([0.5, 0.4, 0.3, 0.2]).p is None  # four figures cannot be significant
    assert find([0.5, 0.4, 0.3, 0.2, 0.1]).has_drifted


def test_equal_figures_are_steady_and_any_loss_is_a_jump() -> None:
    assert not find([0.8] * 9).has_jumped and not find([0.8] * 9).has_drifted
    assert find([*[0.8] * 8, 0.79]).has_jumped and not find([*[0.8] * 8, 0.8 - 1e-12]).has_jumped


def test_false_alarms_are_as_rare_as_promised() -> None:
    rng, jumps, drifts = np.random.default_rng(0), 0, 0
    for _ in range(400):
        trend = find(rng.normal(0.7, 0.02, size=14).tolist())
        jumps, drifts = jumps + trend.has_jumped, drifts + trend.has_drifted
    assert jumps <= 20 and drifts <= 20  # 10 of each are expected, as only a loss counts


def test_conditions_are_of_cells() -> None:
    rows = [make_row(each, cell=cell) for each in (0.8, 0.8, 0.8, 0.7) for cell in ("a/sums/s", "b/sums/s")]
    rows.append(make_row(0.9, cell="b/sums/s"))
    trends = find_trends(rows)
    [reason] = find_failures(trends, ["jump"])
    assert reason == "a/sums/s: jump: 70.0 % is worse than was to be expected, [80.0, 80.0]"
    assert not list(find_failures(trends, ["jump in b/*", "drift"]))
    with pytest.raises(JobError, match="a condition is jump or drift"):
        list(find_failures(trends, ["regression"]))
    with pytest.raises(JobError, match=r"there is no such cell \(cells: a/sums/s, b/sums/s\)"):
        list(find_failures(trends, ["drift in c"]))


def test_failed_lines_are_part_of_what_was_found() -> None:
    values = (0.8, 0.8, 0.8, 0.8, 0.4)
    rows = [replace(make_row(each), failed=5 if each < 0.5 else 0) for each in values]
    [row] = list_cells(find_trends(rows))
    assert row["found"].endswith("[80.0, 80.0]; 5 lines failed")
    [reason] = find_failures(find_trends(rows), ["jump"])
    assert reason.endswith("; 5 lines failed")
    [row] = list_cells(find_trends([*rows[::-1], *rows[:2]]))
    assert row["found"] == "steady; lines failed or could not be scored in 1 earlier run"
    [row] = list_cells(find_trends([replace(rows[0], unscored=2)]))
    assert row["found"] == "too few runs to tell (1 of 5); 2 lines could not be scored"


def test_rows_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path, row = tmp_path / "nightly.jsonl", asdict(make_row(0.5))
    del row["failed"], row["unscored"]
    path.write_text(json.dumps(row) + "\n")
    assert read_history(path) == [make_row(0.5)]


def test_lines_end_with_line_feeds_only(tmp_path: Path) -> None:
    """Not with what Unicode calls a line separator; empty lines are none."""
    path, row = tmp_path / "nightly.jsonl", make_row(0.5, cell="a\u2028b")
    path.write_text(json.dumps(asdict(row), ensure_ascii=False) + "\n\n")
    assert read_history(path) == [row]


def test_the_trend_is_drawn() -> None:
    [row] = list_cells(find_trends([make_row(each) for each in (0.5, 0.6, 0.55, 0.7)]))
    assert row["trend"] == "▁▅▃█" and row["newest [95 %]"] == "70.0 %" and row["change"] == "+15.0 points"
    assert row["found"] == "too few runs to tell (4 of 5)"
    [row] = list_cells(find_trends([make_row(2.0, SECONDS)] * 6))
    assert row["trend"] == "▄" * 6 and row["found"] == "steady" and row["change"] == "+0.000 s"


async def test_runs_are_noted_once(tmp_path: Path) -> None:
    path = tmp_path / "nightly.jsonl"
    runs = [RunFolder.open(await run_lines(tmp_path / str(seed), sampled_chats(8), seed)) for seed in (1, 2)]
    assert len(add_runs(path, runs[:1])) == 1
    rows = add_runs(path, runs)
    assert add_runs(path, runs) == rows == read_history(path) and len(rows) == 2
    path.write_text(path.read_text().splitlines()[0])  # as an editor leaves it that ends no last line
    assert add_runs(path, runs) == rows == read_history(path)
    total = runs[0].manifest["scores"]["total"]
    assert (rows[0].value, rows[0].lines, rows[0].cell) == (total["share"], 8, "job.out.jsonl")
    assert rows[0].output == runs[0].manifest["output"]["sha256"]


async def test_a_run_that_is_scored_again_is_one_run(tmp_path: Path) -> None:
    """It counted as another night, whose score could be a jump."""
    path = tmp_path / "nightly.jsonl"
    runs = [RunFolder.open(await run_lines(tmp_path / name, chats(4))) for name in "ab"]
    for at, run in enumerate(runs):
        run.manifest["runs"][-1]["ended"] = f"2026-01-0{at + 1}T00:00:00+00:00"
    add_runs(path, runs)
    again = RunFolder.open(runs[0].paths.job)
    rescore(again, EvalReader(changes={"expected": "nothing of it"}))
    again = RunFolder.open(runs[0].paths.job)
    again.manifest["runs"][-1]["ended"] = "2026-01-01T00:00:00+00:00"
    rows = add_runs(path, [again])
    assert [row.value for row in rows] == [1.0, 1.0, 0.0]
    [trend] = find_trends(rows)
    assert [row.value for row in trend.rows] == [0.0, 1.0]


async def test_different_jobs_of_one_name_are_no_series(tmp_path: Path) -> None:
    """Nothing is added of them. A job that was edited since the rows that are there goes on."""
    path = tmp_path / "nightly.jsonl"
    runs = [RunFolder.open(await run_lines(tmp_path / str(count), chats(count))) for count in (2, 3)]
    with pytest.raises(JobError, match=r"2/job.out.jsonl and .*3/job.out.jsonl are runs of different jobs"):
        add_runs(path, runs)
    assert not path.exists()
    assert len(add_runs(path, runs[:1])) == 1
    assert len(add_runs(path, runs)) == 2


async def test_what_is_no_figure_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nightly.jsonl"
    unscored = RunFolder.open(await run_lines(tmp_path / "a", [{"id": "a", "prompt": "x", "max_tokens": 2}]))
    with pytest.raises(JobError, match="the run has no score"):
        add_runs(path, [unscored])
    unfinished = RunFolder.open(await run_lines(tmp_path / "b", chats(4), limit=2))
    with pytest.raises(JobError, match="only finished runs belong into a history"):
        add_runs(path, [unfinished])
    done = RunFolder.open(await run_lines(tmp_path / "c", chats(2)))
    path.write_text(json.dumps(asdict(make_row(1.0, SECONDS, "job.out.jsonl"))) + "\n")
    with pytest.raises(JobError, match="have another unit; begin a new history"):
        add_runs(path, [done])
    for text in ("{", '{"cell": 1}', "[]"):
        path.write_text(text + "\n")
        with pytest.raises(JobError, match=r"nightly.jsonl:1: is no row of a history"):
            read_history(path)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"value": each} for each in (float("nan"), 1e308, 10**400, "x", None)),
        *({"interval": each} for each in (5, [1], ["a", "b"])),
        *({"failed": "x"}, {"cell": []}, {"model": 5}, {"measure": {**SECONDS, "unit": 5}}, {"measure": 5}),
    ],
)
async def test_a_row_with_other_values_is_named(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = tmp_path / "nightly.jsonl"
    path.write_text(json.dumps(asdict(make_row(0.5)) | wrong) + "\n")
    with pytest.raises(JobError, match=r"nightly.jsonl:1: is no row of a history"):
        read_history(path)


@pytest.mark.parametrize("kept", [1, 60, -1])
async def test_a_row_that_was_cut_off(tmp_path: Path, kept: int) -> None:
    """The rows before it are read, and the next run takes its place. `kept`: of its characters."""
    path = tmp_path / "nightly.jsonl"
    run = RunFolder.open(await run_lines(tmp_path / "a", chats(2)))
    rows = [make_row(0.5, cell="ä")]
    whole = json.dumps(asdict(rows[0]), ensure_ascii=False)
    path.write_text(f"{whole}\n{whole[:kept]}")
    assert read_history(path) == rows
    rows = add_runs(path, [run])
    assert len(rows) == 2 and read_history(path) == rows


async def test_what_another_process_adds_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "nightly.jsonl"
    run = RunFolder.open(await run_lines(tmp_path / "a", chats(2)))
    path.write_text(json.dumps(asdict(make_row(0.5))) + "\n")
    build = history.build_row

    def build_slowly(run: RunFolder) -> history.HistoryRow:
        with path.open("a") as file:
            file.write(json.dumps(asdict(make_row(0.75))) + "\n")
        return build(run)

    monkeypatch.setattr(history, "build_row", build_slowly)
    add_runs(path, [run])
    assert [row.value for row in read_history(path)][:2] == [0.5, 0.75] and len(read_history(path)) == 3


async def test_a_full_disk_leaves_no_half_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "nightly.jsonl", os.write
    run = RunFolder.open(await run_lines(tmp_path / "a", chats(2)))
    path.write_text(before := json.dumps(asdict(make_row(0.5))) + "\n")
    rooms = [20, 0]

    def tear(handle: int, data: bytes) -> int:
        if not (room := rooms.pop(0)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data[:room])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", tear)
        with pytest.raises(JobError, match=r"cannot be written: No space left on device$"):
            add_runs(path, [run])
    assert path.read_text() == before
