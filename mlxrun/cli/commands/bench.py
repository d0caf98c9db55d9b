"""`mlxrun bench`: tables go to standard output, progress to standard error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mlxrun.cli.bench.engine.workloads import DEFAULT_WORKLOADS, WORKLOADS
from mlxrun.cli.bench_options import add_measure_options, write_report
from mlxrun.cli.commands.bench_serve import command as serve
from mlxrun.cli.commands.bench_serve import model_command, report_command
from mlxrun.cli.options import load_command_config, say

MOVED = {"cache": "prefix-cache", "masks": "structured-output", "parsers": "parsers"}


class BenchGroup(click.Group):
    """Refuses the old names of benchmarks that have moved."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; one that has moved is an error with its new name."""
        if args[0] in MOVED:
            new = f"python -m benchmarks {MOVED[args[0]]}"
            ctx.fail(f"`mlxrun bench {args[0]}` is now called `{new}`, in a checkout")
        return super().resolve_command(ctx, args)


@click.group(name="bench", cls=BenchGroup)
def command() -> None:
    """Measure the engine and running servers, beside their peers.

    Benchmarks of single parts (the prefix cache, structured output, the parsers) are in the repository:
    `python -m benchmarks --help` in a checkout.
    """


command.add_command(serve)
command.add_command(model_command)
command.add_command(report_command)


@command.command(name="engine")
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=click.Choice(list(WORKLOADS)),
    help="May be given several times; default: all but shared and interactive.",
)
@click.option(
    "--peer/--no-peer",
    default=True,
    show_default=True,
    help="Measure mlx-lm's BatchGenerator too, alternately.",
)
@add_measure_options
def engine(
    model: str,
    workloads: tuple[str, ...],
    json_path: Path | None,
    config_path: Path | None,
    sets: tuple[str, ...],
    **options: Any,
) -> int:
    """Measure mlxrun's engine and mlx-lm's BatchGenerator with the same model and prompts.

    \b
    uniform      32 prompts of 512 tokens
    ragged       1 prompt of 16384 tokens and 31 of 256
    mixed        4 prompts of 8192 tokens, 8 of 2048 and 20 of 512
    staggered    a prompt of 256 tokens every 4 steps, and one of 16384 once 16 requests decode
    few          8 prompts of 512 tokens
    single       1 prompt of 512 tokens
    shared       32 prompts that begin with the same 16384 tokens
    interactive  a prompt of 256 tokens alone, behind one of 16384, and as one of 16384 is abandoned

    Each answer has 128 tokens (256 in staggered, 8 at most in interactive). "times better" is above 1 where
    mlxrun is better. Where a side fails, the table and the JSON say so, and all else is measured; the exit
    code is 1 if it was mlxrun's side. Ctrl-C ends it with the table of what was measured until then (exit
    code 130).
    """
    config = load_command_config(config_path, sets).config
    from mlxrun.cli.bench.engine.benchmark import EnginePlan, run_engine_bench
    from mlxrun.cli.bench.engine.side_runs import OURS
    from mlxrun.cli.bench.report import print_report
    from mlxrun.cli.main import INTERRUPTED_EXIT

    plan = EnginePlan(model, workloads or DEFAULT_WORKLOADS, config, **options)
    report = run_engine_bench(plan, say)
    code = write_report(report, json_path, print_report)
    if report.get("incomplete"):
        say("mlxrun: interrupted; the table has what was measured until then")
        return INTERRUPTED_EXIT
    failed = any("error" in part["sides"].get(OURS, {}) for part in report["workloads"].values())
    return 1 if failed else code
