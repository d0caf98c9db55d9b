"""`mlxrun bench`: tables go to standard output, progress to standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from mlxrun.bench.cache_workloads import SCENARIOS
from mlxrun.bench.workloads import WORKLOADS
from mlxrun.cli.bench_serve import command as serve
from mlxrun.cli.bench_serve import model_command
from mlxrun.cli.options import config_options, json_option, load, repeat_option
from mlxrun.errors import JobError

F = TypeVar("F", bound=Callable[..., Any])

FAMILIES = ("plain", "windowed", "hybrid", "vision")


@click.group(name="bench")
def command() -> None:
    """Measure the engine, its prefix cache and running servers, against their peers too."""


command.add_command(serve)
command.add_command(model_command)


def _measure_options(function: F) -> F:
    """What all benchmarks take."""
    model = click.option(
        "--model",
        default="tiny",
        show_default=True,
        metavar="PRESET|PATH",
        help="tiny or qwen3-0.6b (random weights), embedded (the built-in model), or a local model folder.",
    )
    scale = click.option(
        "--scale",
        default=1.0,
        show_default=True,
        type=click.FloatRange(0, 16, min_open=True),
        help="Times prompt and answer lengths.",
    )
    repeat = repeat_option("Runs of each side; medians are shown.")
    return model(scale(repeat(json_option(config_options(function)))))


@command.command(name="engine")
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=click.Choice(list(WORKLOADS)),
    help="May be given several times; default: all.",
)
@click.option(
    "--peer/--no-peer", default=True, show_default=True, help="Measure mlx-lm's BatchGenerator too, in turn."
)
@_measure_options
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
    return put_out(report, json_path, print_report)


@command.command(name="cache")
@click.option(
    "--family",
    "families",
    multiple=True,
    type=click.Choice(FAMILIES),
    help="Kind of model; may be given several times; default: all that --model has.",
)
@click.option(
    "--scenario",
    "scenarios",
    multiple=True,
    type=click.Choice(SCENARIOS),
    help="May be given several times; default: all.",
)
@click.option(
    "--peer/--no-peer",
    default=True,
    show_default=True,
    help="Measure mlx-lm's LRUPromptCache too, as its server uses it, in turn.",
)
@_measure_options
def cache(
    model: str,
    families: tuple[str, ...],
    scenarios: tuple[str, ...],
    json_path: Path | None,
    config_path: Path | None,
    sets: tuple[str, ...],
    **options: Any,
) -> int:
    """Requests that meet the prefix cache cold and warm, and mlx-lm's prompt cache beside it.

    \b
    repeat        a prompt of 16384 tokens, and the same again
    shared-2k     2048 shared tokens and 256 others
    shared-16k    16384 shared tokens and 256 others
    conversation  10 turns of an agent on a system prompt of 4096
    alternating   two system prompts of 4096 in turn
    image         another question about the same image (vision)
    nothing       32 distinct prompts of 512, with the cache and without
    lookup        the search alone, among 10 and 5000 records
    """
    config = load(config_path, sets).config
    from mlxrun.bench.cache import CachePlan, run_cache_bench
    from mlxrun.bench.cache_report import print_cache_report
    from mlxrun.bench.models import families as families_of

    has = families_of(model)
    unknown = [family for family in families if family not in has]
    if unknown:
        raise click.UsageError(f"--family {unknown[0]}: --model {model} is {', '.join(has)}")
    plan = CachePlan(model, families or has, scenarios or SCENARIOS, config, **options)
    report = run_cache_bench(plan, lambda line: print(line, file=sys.stderr))
    return put_out(report, json_path, print_cache_report)


@command.command(name="masks")
@_measure_options
def masks(
    model: str, json_path: Path | None, config_path: Path | None, sets: tuple[str, ...], **options: Any
) -> int:
    """Decode speed of 16 rows that each follow a JSON schema of their own, and of the same rows without.

    256 sampled tokens are answered to prompts of 32.
    """
    config = load(config_path, sets).config
    from mlxrun.bench.masks import MasksPlan, print_masks_report, run_masks_bench

    report = run_masks_bench(MasksPlan(model, config, **options), lambda line: print(line, file=sys.stderr))
    return put_out(report, json_path, print_masks_report)


@command.command(name="parsers")
@click.option(
    "--parser",
    "parsers",
    multiple=True,
    metavar="NAME",
    help="Of tool calls or of reasoning; may be given several times; default: all.",
)
@click.option(
    "--length",
    default=100_000,
    show_default=True,
    type=click.IntRange(1, 10_000_000),
    help="Characters of an answer.",
)
@repeat_option("Runs; medians are shown.")
@json_option
def parsers(parsers: tuple[str, ...], length: int, repeat: int, json_path: Path | None) -> int:
    """Characters a second of the parsers of tool calls and of reasoning, by characters a piece.

    No model takes part. A token of a model is about 4 characters.
    """
    from mlxrun.bench.parsers import ParsersPlan, print_parsers_report, run_parsers_bench
    from mlxrun.bench.parsers_samples import names

    known = sorted({name for _, name in names()})
    unknown = [name for name in parsers if name not in known]
    if unknown:
        raise click.UsageError(f"--parser {unknown[0]}: there are {', '.join(known)}")
    plan = ParsersPlan(parsers, length, repeat)
    report = run_parsers_bench(plan, lambda line: print(line, file=sys.stderr))
    return put_out(report, json_path, print_parsers_report)


def put_out(report: Any, json_path: Path | None, show: Callable[[Any], None]) -> int:
    """The report as a table, or as JSON, or both."""
    text = json.dumps(report, indent=2) + "\n"
    if str(json_path) == "-":
        click.echo(text, nl=False)
        return 0
    show(report)
    if json_path is not None:
        _write(json_path, text)
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise JobError(f"--json {path}: cannot be written: {error.strerror}") from error
