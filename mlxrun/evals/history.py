"""A history file: the figures of runs that are repeated, such as each night, and whether they drift.

The file is JSONL. A row has the figure of one cell of a suite, or of one job, and what computed it. Two tests
look at the figures of a cell in the order of the file:

    jump    the newest is worse than the 95 % prediction interval of those before it, by Student's t
    drift   figures get worse over time, by the test of Mann and Kendall (1945), which steps and slow declines
            alike make significant (p < 0.05)
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from mlxrun.core.errors import JobError
from mlxrun.evals.run_folders.run_folder import DONE, RunFolder
from mlxrun.evals.run_folders.run_folder_paths import find_cell
from mlxrun.jobs.records.run_paths import Appender, wrap_write_errors
from mlxrun.jobs.run.progress import pluralize
from mlxrun.jobs.scoring.intervals import ALPHA, find_quantile
from mlxrun.jobs.scoring.measure import LOWER, SHARE, ScoreMeasure
from mlxrun.jobs.scoring.score_groups import is_described_unscored

FEWEST_BEFORE_JUMP, FEWEST_OF_DRIFT = 3, 5  # with fewer figures, nothing can be significant
WORDS = ("jump", "drift")
_MOST = 1e150  # of a figure; the squares of larger ones are infinite
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class HistoryRow:
    """The figure of one run. `cell`: model, task and variant of a suite's cell, or the output's name; `time`:
    when it ended; `value`, `interval`: in the unit of `measure`, None for a share; `output`, `model`: digests
    of the output and of the model's files; `version`: of mlxrun; `failed`, `unscored`: lines that failed or
    could not be scored, 0 in rows of versions that did not note them."""

    cell: str
    time: str
    lines: int
    value: float
    interval: tuple[float, float] | None
    measure: dict[str, str] | None
    output: str
    model: str | None
    version: str | None
    failed: int = 0
    unscored: int = 0

    @property
    def score_measure(self) -> ScoreMeasure:
        return SHARE if self.measure is None else ScoreMeasure(**self.measure)


@dataclass(frozen=True, slots=True)
class CellTrend:
    """The figures of one cell, the newest last. `bounds`: the prediction interval of the newest; `p`: of the
    test of a trend. Both are None for too few figures."""

    cell: str
    rows: Sequence[HistoryRow]
    bounds: tuple[float, float] | None
    p: float | None
    slope: float

    @property
    def measure(self) -> ScoreMeasure:
        return self.rows[-1].score_measure

    @property
    def has_jumped(self) -> bool:
        """Whether the newest figure is worse than those before it let expect."""
        if self.bounds is None:
            return False
        low, high = self.bounds
        newest = self.rows[-1].value
        slack = 1e-9 * max(1.0, abs(newest))  # equal figures may differ in their last digit
        return newest > high + slack if self.measure.better == LOWER else newest < low - slack

    @property
    def has_drifted(self) -> bool:
        """Whether figures get worse over time."""
        return self.p is not None and self.p < ALPHA and self.measure.is_better(-self.slope)

    def holds(self, word: str) -> bool:
        """Whether a condition of `--fail-if` holds."""
        return self.has_jumped if word == "jump" else self.has_drifted

    def draw(self, most: int = 30) -> str:
        """Draw the newest figures as a line of bars."""
        values = [row.value for row in self.rows[-most:]]
        low, high = min(values), max(values)
        if high == low:
            return _BARS[3] * len(values)
        return "".join(_BARS[round((each - low) / (high - low) * (len(_BARS) - 1))] for each in values)

    def describe(self) -> dict[str, Any]:
        """Describe the trend as JSON."""
        found = {"cell": self.cell, "values": [row.value for row in self.rows], "prediction": self.bounds}
        found |= {name: [getattr(row, name) for row in self.rows] for name in ("failed", "unscored")}
        return found | {"trend_p": self.p, "jump": self.has_jumped, "drift": self.has_drifted}


def read_history(path: Path) -> list[HistoryRow]:
    """Read a history file; empty if there is none. A last row that was not written to its end is left out.
    JobError with the line that is wrong."""
    whole, _ = _read_whole_rows(path)
    return _parse_rows(path, whole)


def _read_whole_rows(path: Path) -> tuple[bytes, bool]:
    """The content without a last row that a kill or a full disk cut off, and whether there was one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return b"", False
    except OSError as error:
        raise JobError(f"{path}: cannot be read: {error}") from error
    last = data.rpartition(b"\n")[2]
    try:
        json.loads(last)  # an editor may leave out the line end of a whole row
    except ValueError:
        return data.removesuffix(last), bool(last)
    return data, False


def _parse_rows(path: Path, data: bytes) -> list[HistoryRow]:
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError as error:
        raise JobError(f"{path}: cannot be read: {error}") from error
    found = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            row = HistoryRow(**json.loads(text))
            _check_row(row)
        except (ValueError, TypeError, RecursionError) as error:
            raise JobError(f"{path}:{number}: is no row of a history: {error}") from error
        found.append(row)
    return found


def _check_row(row: HistoryRow) -> None:
    """Raise ValueError or TypeError if a row has values that are not those of a run."""
    texts = [row.cell, row.time, row.output, *(each for each in (row.model, row.version) if each is not None)]
    counts = row.lines, row.failed, row.unscored
    figures = [row.value, *((0.0, 0.0) if row.interval is None else row.interval)]
    if not all(isinstance(each, str) for each in [*texts, *dict(row.measure or {}).values()]):
        raise ValueError("a value that is no text")
    if not all(isinstance(each, int) for each in counts):
        raise ValueError("a number of lines that is none")
    if len(figures) != 3 or not all(abs(each) <= _MOST for each in figures):  # which NaN is not either
        raise ValueError("a value that is no figure")
    if row.score_measure.better not in ("lower", "higher"):
        raise ValueError("a direction that is none")


def build_row(run: RunFolder) -> HistoryRow:
    """Build the row of a run. JobError if it is unfinished, or has no figure."""
    manifest, out = run.manifest, run.paths.out
    total = run.total_score
    value = total.get("value", total.get("share"))
    if run.state != DONE:
        raise JobError(f"{out}: the run is {run.state}; only finished runs belong into a history")
    if value is None:
        raise JobError(f"{out}: the run has no score")
    if total.get("unscored") and is_described_unscored(total):
        raise JobError(
            f"{out}: the run has no score: none of its answers could be scored (`note` in it says why)"
        )
    cell = find_cell(out)
    row = HistoryRow(
        cell=out.name if cell is None else "/".join(cell[1:]),
        time=run.ended,
        lines=int(total["lines"]),
        value=float(value),
        interval=total.get("interval"),
        measure=total.get("measure"),
        output=str(manifest["output"]["sha256"]),
        model=manifest["model"].get("fingerprint"),
        version=manifest["versions"].get("mlxrun"),
        failed=int(manifest["counts"]["failed"]),
        unscored=int(total.get("unscored", 0)),
    )
    try:
        _check_row(row)
    except (ValueError, TypeError) as error:
        raise JobError(f"{out}: its score cannot be in a history: {error}") from error
    return row


def add_runs(path: Path, runs: Sequence[RunFolder]) -> list[HistoryRow]:
    """Add the rows of runs to a history file, and return all. A run that is there already is not added.
    JobError if the others are of different jobs with one name, which would be one series."""
    whole, is_torn = _read_whole_rows(path)
    known = _parse_rows(path, whole)
    seen = {(row.cell, row.time, row.output) for row in known}
    built = [(run, build_row(run)) for run in runs]
    new = [(run, row) for run, row in built if (row.cell, row.time, row.output) not in seen]
    _check_jobs(path, new)
    rows = [row for _, row in new]
    for row in rows:
        before = next((each for each in reversed(known) if each.cell == row.cell), None)
        if before is not None and before.measure != row.measure:
            raise JobError(f"{path}: the figures of {row.cell} have another unit; begin a new history")
    text = "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows)
    if rows:
        with wrap_write_errors(path, begun=False), closing(Appender(path, begun=False)) as file:
            if is_torn:  # else another process may have added rows meanwhile
                os.truncate(path, len(whole))
            line_end = b"\n" if whole and not whole.endswith(b"\n") else b""
            file.append(line_end + text.encode("utf-8", "backslashreplace"))  # a name may be no UTF-8
    return [*known, *rows]


def _check_jobs(path: Path, new: Sequence[tuple[RunFolder, HistoryRow]]) -> None:
    """JobError if runs with one name are of different jobs."""
    known: dict[str, RunFolder] = {}
    for run, row in new:
        other = known.setdefault(row.cell, run)
        if other.manifest["input"]["sha256"] != run.manifest["input"]["sha256"]:
            raise JobError(
                f"{path}: {other.paths.out} and {run.paths.out} are runs of different jobs, which would be "
                f"one series, {row.cell}; note each in a history of its own"
            )


def find_trends(rows: Sequence[HistoryRow]) -> list[CellTrend]:
    """Find the trend of each cell, in the order of their first rows. A run that was scored again has a row of
    each score, of which the newest counts, in the place of the first."""
    cells: dict[str, list[HistoryRow]] = {}
    places: dict[tuple[str, str, str | None], int] = {}
    for row in rows:
        own, run = cells.setdefault(row.cell, []), (row.cell, row.time, row.model)
        at = places.get(run)
        if at is not None and own[at].output != row.output:
            own[at] = row
        else:
            places[run] = len(own)
            own.append(row)
    return [_find_trend(cell, own) for cell, own in cells.items()]


def _find_trend(cell: str, rows: Sequence[HistoryRow]) -> CellTrend:
    values = [row.value for row in rows]
    bounds, p, slope = None, None, 0.0
    before = values[:-1]
    if len(before) >= FEWEST_BEFORE_JUMP:
        reach = find_quantile(len(before) - 1) * stdev(before) * math.sqrt(1 + 1 / len(before))
        bounds = fmean(before) - reach, fmean(before) + reach
    if len(values) >= FEWEST_OF_DRIFT and max(values) > min(values):
        from scipy import stats

        found = stats.kendalltau(range(len(values)), values)
        p, slope = float(found.pvalue), float(found.statistic)
    return CellTrend(cell, rows, bounds, p, slope)


def find_failures(trends: Sequence[CellTrend], conditions: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each condition that holds: `jump` or `drift`, of all cells or `in PATTERN`.
    JobError for a condition that is none, or of no cell."""
    for text in conditions:
        word, _, pattern = (part.strip() for part in text.partition(" in "))
        if word not in WORDS:
            raise JobError(
                f"--fail-if {text!r}: a condition is {' or '.join(WORDS)}, or one of them `in CELL`"
            )
        chosen = [trend for trend in trends if fnmatchcase(trend.cell, pattern or "*")]
        if not chosen:
            cells = ", ".join(each.cell for each in trends)
            raise JobError(f"--fail-if {text!r}: there is no such cell (cells: {cells})")
        yield from (f"{trend.cell}: {text}: {describe_trend(trend)}" for trend in chosen if trend.holds(word))


def describe_trend(trend: CellTrend) -> str:
    """Describe what was found of a cell in words."""
    measure, newest = trend.measure, trend.rows[-1].value
    parts = []
    if trend.has_jumped and trend.bounds is not None:
        expected = measure.format_bounds(trend.bounds, newest)
        parts.append(f"{measure.format(newest)} is worse than was to be expected, {expected}")
    if trend.has_drifted and trend.p is not None:
        parts.append(f"it gets worse over {len(trend.rows)} runs (p = {trend.p:.2g})")
    runs, needed = len(trend.rows), max(FEWEST_BEFORE_JUMP + 1, FEWEST_OF_DRIFT)
    if not parts:
        parts.append("steady" if runs >= needed else f"too few runs to tell ({runs} of {needed})")
    return "; ".join([*parts, *_list_lost(trend.rows)])


def _list_lost(rows: Sequence[HistoryRow]) -> Iterator[str]:
    """Yield phrases about lines without an answer or a score, in the newest run and in earlier ones."""
    *earlier, newest = rows
    if newest.failed:
        yield f"{pluralize(newest.failed, 'line')} failed"
    if newest.unscored:
        yield f"{pluralize(newest.unscored, 'line')} could not be scored"
    if count := sum(row.failed + row.unscored > 0 for row in earlier):
        yield f"lines failed or could not be scored in {pluralize(count, 'earlier run')}"


def list_cells(trends: Sequence[CellTrend]) -> Iterator[Mapping[str, str]]:
    """Yield the row of each cell for the table: newest figure, change, bars, and what was found."""
    for trend in trends:
        row, measure = trend.rows[-1], trend.measure
        change = ""
        if len(trend.rows) > 1:
            difference = row.value - trend.rows[-2].value
            change = f"{measure.format_number(difference, row.value, '+')} {measure.points}".rstrip()
        yield {
            "cell": trend.cell,
            "trend": trend.draw(),
            "newest [95 %]": measure.format(row.value, row.interval),
            "change": change,
            "runs": str(len(trend.rows)),
            "found": describe_trend(trend),
        }
