"""`mlxrun bench engine`: the table goes to standard output, progress to standard error."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from mlxrun.bench.workloads import WORKLOADS
from mlxrun.cli.options import config_options, load
from mlxrun.errors import JobError


@click.group(name="bench")
def command() -> None:
    """Measure the engine, against its peers too."""


@command.command(name="engine")
@click.option(
    "--model",
    default="tiny",
    show_default=True,
    metavar="PRESET|PATH",
    help="tiny or qwen3-0.6b (random weights), or a local model folder.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=click.Choice(list(WORKLOADS)),
    help="May be given several times; default: all.",
)
@click.option(
    "--scale",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 16, min_open=True),
    help="Times prompt and answer lengths.",
)
@click.option(
    "--repeat",
    default=3,
    show_default=True,
    type=click.IntRange(1, 100),
    help="Runs of each side; medians are shown.",
)
@click.option(
    "--peer/--no-peer", default=True, show_default=True, help="Measure mlx-lm's BatchGenerator too, in turn."
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, allow_dash=True, dir_okay=False),
    metavar="FILE",
    help="Write every run as JSON; - is standard output, instead of the table.",
)
@config_options
def engine(
    model: str,
    workloads: tuple[str, ...],
    json_path: Path | None,
    config_path: Path | None,
    sets: tuple[str, ...],
    **options: Any,
) -> int:
    """Our engine and mlx-lm's BatchGenerator on the same model and prompts.

    \b
    uniform    32 prompts of 512 tokens
    ragged     1 of 16384 and 31 of 256
    mixed      4 of 8192, 8 of 2048 and 20 of 512
    staggered  a prompt of 256 every 4 steps; one of 16384 once 16 rows decode

    128 tokens are answered to each (256 in staggered). "times better" is above 1 where mlxrun is better.
    """
    config = load(config_path, sets).config
    from mlxrun.bench.engine import BenchPlan, run_bench
    from mlxrun.bench.report import print_report

    plan = BenchPlan(model, workloads or tuple(WORKLOADS), config, **options)
    report = run_bench(plan, lambda line: print(line, file=sys.stderr))
    text = json.dumps(report, indent=2) + "\n"
    if str(json_path) == "-":
        click.echo(text, nl=False)
        return 0
    print_report(report)
    if json_path is not None:
        _write(json_path, text)
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise JobError(f"--json {path}: cannot be written: {error.strerror}") from error
