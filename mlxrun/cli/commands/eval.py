"""`mlxrun eval`: runs a suite of models x tasks x seeds on engines in this process. With `--tasks` it writes
the suite itself, of tasks that come with mlxrun.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxrun.cli.commands.job import make_row_report
from mlxrun.cli.long_runs import keep_awake, raise_open_files
from mlxrun.cli.options import add_config_options, list_first, load_command_config, say
from mlxrun.cli.run_setup import read_model, share_memory_limit
from mlxrun.core.cache_home import expand_home
from mlxrun.core.errors import JobError
from mlxrun.core.terminal import print_line

if TYPE_CHECKING:
    from mlxrun.config.loading import LoadedConfig
    from mlxrun.config.nodes import ConfigNode
    from mlxrun.config.settings import Config
    from mlxrun.engine.client import EngineClient
    from mlxrun.evals.suites.cell_jobs import CellJobs
    from mlxrun.evals.suites.matrix import Cell
    from mlxrun.evals.suites.suite_file import SuiteFile
    from mlxrun.model.load.model_info import LoadedModelInfo

EPILOG = """\b
Examples:
  mlxrun eval suite.yaml                       runs every model on every task; prints a matrix of scores
  mlxrun eval suite.yaml                       again: continues where it was killed or interrupted
  mlxrun eval suite.yaml --dry-run             checks all rows; counts lines, tokens, memory; loads no weights
  mlxrun eval suite.yaml --limit 20            the first 20 lines of each cell; without it, later, the others
  mlxrun eval suite.yaml --only 'small/*' --only '*/sums'
  mlxrun eval --tasks gsm8k,mmlu --model qwen3-8b-4bit      standard tasks (mlxrun tasks lists them)
  mlxrun eval --tasks gsm8k --data gsm8k.jsonl --limit 100   the same from a file, where there is no hub
  mlxrun eval --tasks mmlu,arc --data mmlu=m.parquet --examples mmlu=dev.parquet --data arc=a.parquet

\b
A suite:
  models:
    small: {config: small.yaml}
    large: {set: {model.path: Qwen/Qwen3-8B, model.dtype: bfloat16}}
  tasks:
    sums:
      data: sums.csv
      prompt: "What is {{ a }} + {{ b }}?"
      expected: sum
      match: number
      few_shot: {count: 3, answer: "{{ sum }}"}
      generation: {max_tokens: 20}
  seeds: [1, 2]
  vary: {sampling.temperature: [0, 0.7]}
docs/suites.md has every key.

\b
SUITE x.yaml writes x.out/suite.json and x.out/MODEL/TASK/VARIANT/job.jsonl for each cell, whose run is an
ordinary one (see mlxrun batch --help). Each model is loaded once, and only if it has lines left. One that
cannot be loaded fails its cells alone, and is tried again by the next start; a model.path that is not the
folder of a model is a mistake in the suite, and nothing runs. If a cell's job changes, its changed lines run
again; with another model or other settings, the cell is refused unless --fresh is given.

\b
Exit codes: 0 all cells done; 1 some lines failed; 2 suite, config, or a decision is needed; 3 a model or the
engine failed; 130 interrupted, resumable.
"""


@click.command(epilog=EPILOG)
@click.argument("suite", type=click.Path(path_type=Path), required=False)
@add_config_options
@click.option("--tasks", metavar="NAMES", help="Standard tasks instead of a suite, with commas between them.")
@click.option("--model", metavar="MODEL", help="The model of --tasks: a folder, a hub id or its last part.")
@click.option(
    "--data",
    "data",
    multiple=True,
    metavar="[TASK=]FILE",
    help="Rows of a standard task, instead of the hub's: CSV, TSV, JSONL or Parquet, with its columns.",
)
@click.option(
    "--examples",
    multiple=True,
    metavar="[TASK=]FILE",
    help="Examples before its questions, instead of the hub's.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Where the cells go. Default: SUITE with the ending .out; with --tasks, MODEL-TASKS.out.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="PATTERN",
    help="Only cells whose model, model/task or model/task/variant matches, with * as in a shell.",
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N lines of each cell.")
@click.option("--fresh", is_flag=True, help="Start over; earlier answers are moved to earlier/ in each run.")
@click.option("--retry-failed", is_flag=True, help="Run lines that failed in an earlier start again.")
@click.option("--mixed", is_flag=True, help="Continue cells that began with other versions or devices.")
@click.option("--dry-run", is_flag=True, help="Check every row, and count lines, tokens, time and memory.")
def command(
    suite: Path | None,
    config_path: Path | None,
    sets: tuple[str, ...],
    tasks: str | None,
    model: str | None,
    data: tuple[str, ...],
    examples: tuple[str, ...],
    output: Path | None,
    only: tuple[str, ...],
    dry_run: bool,
    **flags: Any,
) -> int:
    """Run the suite SUITE, a YAML file, or standard tasks; the same command continues an interrupted one."""
    import mlxrun.model  # noqa: F401  its limits of memory are checked before more is imported
    from mlxrun.cli.signal_loop import run_async
    from mlxrun.core.durable_writes import write_atomically
    from mlxrun.evals.suites.cell_jobs import CellJobs

    if (suite is None) is (tasks is None):
        raise click.UsageError("give a suite, or --tasks")
    if suite is not None and (model is not None or data or examples):
        raise click.UsageError("--model, --data and --examples are for --tasks; a suite has keys for them")
    base = load_command_config(config_path, sets)
    raw = None
    if tasks is not None:
        name, raw = _write_suite(tasks, model, data, examples)
        output = output or Path(f"{name}.out")
        suite = output / "suite.yaml"
    assert suite is not None
    file, cells = _read_cells(suite, raw, config_path, sets)
    jobs = CellJobs(file, make_row_report)
    jobs.check(cells)
    file.raise_problems()
    command = _EvalCommand(cells, _choose_cells(cells, only), jobs, output or suite.with_suffix(".out"))
    if dry_run:
        return run_async(command.check_cost(flags["limit"]))
    if raw is not None:
        suite.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(suite, raw)
    raise_open_files()
    with keep_awake(base.config.batch.keep_awake):
        return run_async(command.run(flags))


def _write_suite(
    tasks: str, model: str | None, data: Sequence[str], examples: Sequence[str]
) -> tuple[str, bytes]:
    """The name and the text of a suite of standard tasks. JobError for names that are not known."""
    from mlxrun.cli.options import find_model
    from mlxrun.config.yaml_source import render_yaml
    from mlxrun.evals.tasks.task_box import build_suite, describe_unknown_task, list_task_names

    names = list(dict.fromkeys(name.strip() for name in tasks.split(",")))
    for name in names:
        if name not in list_task_names():
            raise JobError(f"--tasks: {describe_unknown_task(name)}")
    files = {key: _read_files(key, given, names) for key, given in (("data", data), ("examples", examples))}
    path = None if model is None else find_model(model)
    if path is not None and expand_home(path).exists():
        path = os.path.abspath(expand_home(path))  # the suite is in another folder
    short = re.sub(r"[^A-Za-z0-9._-]+", "_", Path(path or "model").name).strip("._-")[:60] or "model"
    suite = build_suite(short, path, names, **files)
    text = "".join(
        f"{section}:\n" + "".join(f"  {key}: {render_yaml(value)}\n" for key, value in entries.items())
        for section, entries in suite.items()
    )
    return f"{short}-{'-'.join(names)}"[:120], text.encode()


def _read_files(key: str, given: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """The files of an option by the names of their tasks, as absolute paths."""
    files: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or name not in names:
            name, path = names[0], text
            if len(names) > 1 or (equals and not Path(text).exists()):
                raise JobError(f"--{key} {text}: write TASK=FILE, with one of {', '.join(names)}")
        if name in files:
            raise JobError(f"--{key} {text}: {name} has a file already")
        files[name] = os.path.abspath(path)
    return files


def _read_cells(
    path: Path, raw: bytes | None, config_path: Path | None, sets: Sequence[str]
) -> tuple[SuiteFile, list[Cell]]:
    """The suite and its cells; problems are in the suite. `raw`: its text, if it is not yet written."""
    from mlxrun.cli.options import check_chat_template, check_parsers
    from mlxrun.config.loading import load_config
    from mlxrun.evals.suites.matrix import build_cells
    from mlxrun.evals.suites.suite_checks import check_suite
    from mlxrun.evals.suites.suite_file import read_suite

    def load(own: Path | None, trees: Sequence[tuple[ConfigNode, Path]]) -> LoadedConfig:
        checks = (check_parsers, check_chat_template)
        return load_config(own or config_path, sets, os.environ, checks, trees=trees)

    file = read_suite(path, raw)
    check_suite(file)
    return file, build_cells(file, load)


def _choose_cells(cells: Sequence[Cell], patterns: Sequence[str]) -> list[Cell]:
    """The cells that match one of the patterns; JobError for a pattern that none matches."""
    chosen: set[str] = set()
    for pattern in patterns:
        found = [cell.name for cell in cells if any(fnmatchcase(name, pattern) for name in _list_names(cell))]
        if not found:
            names = ", ".join(dict.fromkeys(f"{cell.model}/{cell.task_name}" for cell in cells))
            raise JobError(f"--only {pattern}: no cell has this name; the suite has {names}")
        chosen |= set(found)
    return [cell for cell in cells if not patterns or cell.name in chosen]


def _list_names(cell: Cell) -> tuple[str, str, str]:
    return cell.model, f"{cell.model}/{cell.task_name}", cell.name


@dataclass(frozen=True, slots=True)
class _EvalCommand:
    """What the command does once the suite is read. `chosen`: the cells that are to run, of all `cells`."""

    cells: Sequence[Cell]
    chosen: Sequence[Cell]
    jobs: CellJobs
    folder: Path

    async def run(self, flags: dict[str, Any]) -> int:
        """Run the cells, and print the matrix however that ends."""
        from mlxrun.evals.suites.suite_manifest import (
            SuiteManifest,
            count_first_lines,
            list_failures,
            print_matrix,
        )
        from mlxrun.evals.suites.suite_run import SuiteRun, SuiteSetup, count_states
        from mlxrun.jobs.run.job_run import JobOptions
        from mlxrun.jobs.run.stop_signals import StopSignals

        manifest = SuiteManifest(self.folder, self.jobs.file, self.cells)
        setup = SuiteSetup(_load_model_info, _start_engine, _describe_device, share_memory_limit)
        options, stop = JobOptions(**flags), StopSignals(say)
        run = SuiteRun(self.folder, self.chosen, self.jobs, manifest, setup, options, say, stop)
        code = await run.run()
        records = list(manifest.records.values())
        print_matrix(records, sys.stdout, manifest.pools)
        print_line(f"{count_states(records)}: {self.folder}")
        for line in list_first([*list_failures(self.folder, records)]):
            print_line(line)
        if any(map(count_first_lines, records)):
            print_line("a start without --limit continues the cells that have their first lines only")
        return code

    async def check_cost(self, limit: int | None) -> int:
        """Print what the cells cost; nothing is written."""
        from mlxrun.evals.suites.suite_cost import CostCheck, print_costs
        from mlxrun.evals.suites.suite_manifest import read_suite_manifest

        weights: dict[str, int] = {}

        def load(config: Config) -> LoadedModelInfo:
            from mlxrun.jobs.agents.agent_settings import make_user_config
            from mlxrun.model.load.model_files import count_file_bytes

            info = read_model(config.model, weights=False)
            weights[config.model.path] = count_file_bytes(info.folder)
            if (user_config := make_user_config(config)) is not None:
                load(user_config)
            return info

        earlier = read_suite_manifest(self.folder / "suite.json") or {"cells": []}
        records = {each["name"]: each for each in earlier["cells"]}
        costs = await CostCheck(self.folder, self.jobs, load, limit, records, say).check(self.chosen)
        print_costs(costs, weights, sys.stdout)
        return 1 if any(cost.found is None or cost.found.refused for cost in costs) else 0


def _load_model_info(config: Config) -> LoadedModelInfo:
    return read_model(config.model, weights=True, announce=False)


async def _start_engine(config: Config, info: Any, cache: Path) -> EngineClient:
    from mlxrun.engine.client import EngineClient
    from mlxrun.jobs.run.job_cache import choose_engine_config
    from mlxrun.model.load.model_info import log_weights

    log_weights(config.model, info.folder)
    cache.parent.mkdir(exist_ok=True)
    return await EngineClient.start(choose_engine_config(config, cache), info)


def _describe_device(config: Config) -> dict[str, Any]:
    from mlxrun.model.machine.device import describe_device

    return describe_device(config.engine)
