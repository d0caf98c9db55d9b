"""The cost of a suite before it runs: lines, tokens, memory, and the time if the speed is known.

Prompts are built as for a run, so the model's own tokenizer counts them. The speed comes from earlier cells
of the same model, by their manifest.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from mlxrun.api.text.model_info import ModelInfo
from mlxrun.config.settings import Config
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import MlxrunError
from mlxrun.core.terminal import make_columns, print_line, print_table
from mlxrun.evals.suites.cell_jobs import CellJobs
from mlxrun.evals.suites.matrix import Cell
from mlxrun.jobs.lines.job_check import CheckedLines, check_job
from mlxrun.jobs.run.line_answerer import LinePreparer
from mlxrun.jobs.run.progress import format_duration, pluralize

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CellCost:
    """The cost of one cell. `done`: lines that need not run again; `seconds`: the most time of the others,
    None if no speed is known; `error`: why the cell cannot run."""

    cell: Cell
    found: CheckedLines | None = None
    seconds: float | None = None
    error: str | None = None
    done: int = 0


@dataclass(frozen=True, slots=True)
class CostCheck:
    """Computes costs. `folder`: the folder of the suite's runs; `load`: reads a model without weights;
    `limit`: the most lines of each cell; `records`: those of earlier starts, by cell names; `say`: gets lines
    that would be refused."""

    folder: Path
    jobs: CellJobs
    load: Callable[[Config], ModelInfo]
    limit: int | None
    records: Mapping[str, Mapping[str, Any]]
    say: Say

    async def check(self, cells: Sequence[Cell]) -> list[CellCost]:
        """Compute the costs of cells, in order. Lines of cells that differ only in their seed are counted
        once."""
        costs: list[CellCost] = []
        infos: dict[str, ModelInfo | MlxrunError] = {}
        counted: dict[tuple[str, str], CheckedLines] = {}
        with tempfile.TemporaryDirectory(prefix="mlxrun-") as folder:
            for cell in cells:
                key = cell.engine_key, cell.lines_key + cell.name.rpartition("/")[0]
                if cell.engine_key not in infos:
                    infos[cell.engine_key] = self._load(cell.config)
                info = infos[cell.engine_key]
                if isinstance(info, MlxrunError):
                    costs.append(CellCost(cell, error=str(info)))
                    continue
                if key not in counted:
                    counted[key] = await self._count(cell, info, Path(folder))
                found, done = counted[key], self._count_done(cell)
                left = max(0, found.lines - done) / found.lines if found.lines else 0
                seconds = self._estimate(cell, found)
                costs.append(CellCost(cell, found, None if seconds is None else seconds * left, done=done))
        return costs

    def _count_done(self, cell: Cell) -> int:
        """Lines that an earlier start finished, by its manifest; 0 if the lines are others by now."""
        record = self.records.get(cell.name)
        if record is None or record.get("config_hash") != cell.config_hash:
            return 0
        digest = self.jobs.compute_digest(cell, self.folder / cell.name / "job.jsonl")
        return int(record["done"] + record["failed"]) if digest == record["job_sha256"] else 0

    def _load(self, config: Config) -> ModelInfo | MlxrunError:
        try:
            return self.load(config)
        except MlxrunError as error:
            return error

    async def _count(self, cell: Cell, info: ModelInfo, folder: Path) -> CheckedLines:
        path = folder / "job.jsonl"
        self.jobs.write(cell, path)
        config = self.jobs.add_media_folder(cell)
        preparer = LinePreparer(info, config, folder)

        def report(number: int, reason: str) -> None:
            self.say(f"{cell.name}: line {number}: {reason}")

        return await check_job(path, preparer, self.limit, report)

    def _estimate(self, cell: Cell, found: CheckedLines) -> float | None:
        """Seconds that all lines of a cell take at most, by the measured speed of its model."""
        tokens = seconds = 0.0
        for record in self.records.values():
            if record["model"] == cell.model and record["tokens"] and record["seconds"]:
                tokens += record["tokens"]["prompt"] + record["tokens"]["output"]
                seconds += record["seconds"]
        if not tokens:
            return None
        return (found.prompt_tokens + found.max_tokens) * seconds / tokens


def print_costs(costs: Sequence[CellCost], weights: Mapping[str, int], stream: TextIO) -> None:
    """Print a row for each cell, and the totals. `weights`: bytes of each model's weights."""
    columns = ("cell", "lines", "done", "refused", "prompt tokens", "output tokens", "time")
    rows: list[tuple[str, ...]] = []
    for cost in costs:
        if cost.found is None:
            rows.append((cost.cell.name, *"------"))
            continue
        found = cost.found
        time = "unknown" if cost.seconds is None else f"<= {format_duration(cost.seconds)}"
        numbers = (found.lines, cost.done, found.refused, found.prompt_tokens, found.max_tokens)
        rows.append((cost.cell.name, *(f"{each:,}" for each in numbers), time))
    print_table(make_columns(columns, 1), rows, stream)
    errors = {str(cost.error): cost.cell.model for cost in costs if cost.error is not None}
    for error, model in errors.items():
        print_line(f"{model}: cannot be loaded: {error}", stream)
    known = [cost.found for cost in costs if cost.found is not None]
    times = [cost.seconds for cost in costs if cost.found is not None]
    prompt, output = sum(each.prompt_tokens for each in known), sum(each.max_tokens for each in known)
    done = sum(cost.done for cost in costs)
    print_line(
        f"{pluralize(len(costs), 'cell')}, {pluralize(sum(each.lines for each in known), 'line')}"
        f"{f' ({done:,} done already)' if done else ''}, "
        f"{prompt:,} prompt tokens, at most {output:,} output tokens",
        stream,
    )
    total = sum(each for each in times if each is not None)
    if None in times:
        print_line("time: unknown for models that have not run yet in this folder", stream)
    if total:
        print_line(f"time: at most {format_duration(total)}, by the speed of earlier cells", stream)
    for name, size in weights.items():
        print_line(f"memory: {name} has {format_rounded(size)} of weights", stream)
