"""`mlxrun fit`: whether models fit in memory, by their files' headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxrun.cli.options import add_config_options, find_model, load_command_config, write_new_file
from mlxrun.cli.run_setup import judge_fit, name_model_errors
from mlxrun.core.byte_sizes import format_bytes, format_rounded, parse_bytes
from mlxrun.core.errors import ConfigError
from mlxrun.core.terminal import make_columns, print_json, print_line, print_table

if TYPE_CHECKING:
    from mlxrun.config.settings import Config
    from mlxrun.model.fit.verdict import FitReport

FORMAT = 1
EPILOG = """\b
Examples:
  mlxrun fit qwen3-8b-4bit                       a model of the hub; its weights are not downloaded
  mlxrun fit qwen3-8b-4bit qwen3-14b-4bit        one beside the other
  mlxrun fit ./my-model --rows 8 --tokens 32768  eight requests of 32,768 tokens (prompt and answer) at a time
  mlxrun fit qwen3-8b-4bit --memory 16GB         a machine like this one that has so much free
  mlxrun fit ./my-model --write mlxrun.yaml      a config that fits; then `mlxrun serve` uses it
  mlxrun fit -c prod.yaml --json | jq '.models[0].needed'

\b
What is shown:
  weights      on disk, and as they are in memory: a CPU converts them to float32, and may dequantize them
  load         the most while the model is loaded and checked
  1,000 tokens their keys and values in one row; `state` is what a row takes besides
  rows         the caches of all rows of that length
  peak         the most while these rows run and nothing else; within some 10 % (docs/loading.md)
  encoding     the most beside weights and rows while an image of 1,024 x 1,024 pixels is encoded
  needed       what the scheduler reserves for them, as rows of other lengths need padding
  limit        what may be used: scheduler.memory_limit, else 80 % of what is free

\b
Without --rows one row is enough, and as many are counted as fit, up to scheduler.max_running. Without
--tokens a row has the whole context, or what fits of it. The prefix cache takes what is left, and gives way.

\b
Exit codes: 0 all models fit; 1 one does not; 2 config; 3 the model's files, or the hub.
"""


@click.command(epilog=EPILOG)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@add_config_options
@click.option("--rows", type=click.IntRange(1, 4096), metavar="N", help="Requests that run at a time.")
@click.option(
    "--tokens",
    type=click.IntRange(16, 10**12),
    metavar="L",
    help="Tokens of each, prompt and answer together.",
)
@click.option("--memory", metavar="SIZE", help="What is free on another machine, such as 16GB.")
@click.option(
    "--write",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a config that fits, of one model.",
)
@click.option("--force", is_flag=True, help="With --write: overwrite an existing file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with sizes in bytes.")
def command(
    models: tuple[str, ...],
    config_path: Path | None,
    sets: tuple[str, ...],
    rows: int | None,
    tokens: int | None,
    memory: str | None,
    write: Path | None,
    force: bool,
    as_json: bool,
) -> int:
    """Tell whether models fit in memory, before their weights are read or downloaded.

    Without MODEL it is that of the config.
    """
    if write is not None and len(models) > 1:
        raise click.UsageError("--write takes one MODEL")
    import mlxrun.model  # noqa: F401  its limits of memory are checked before more is imported
    from mlxrun.model.fit.verdict import WantedRows, limit_memory

    config = load_command_config(config_path, sets).config
    if memory is not None:
        config = limit_memory(config, _parse_size(memory))
    names = [find_model(model) for model in models] or [config.model.path]
    with name_model_errors("MODEL") if models else nullcontext():
        reports = [
            judge_fit(replace(config, model=replace(config.model, path=name)), WantedRows(rows, tokens))
            for name in names
        ]
    if as_json:
        print_json({"format": FORMAT, "models": [asdict(report) for report in reports]})
    else:
        _print_reports(reports)
        for report in reports:
            print_line(f"{report.model}: {report.verdict}")
    if write is not None:
        _write_config(write, force, reports[0], config if memory is not None else None)
    return 0 if all(report.fits for report in reports) else 1


def _parse_size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"--memory: {error}") from error


def _print_reports(reports: Sequence[FitReport]) -> None:
    columns = make_columns(("", *(report.model for report in reports)), 1)
    print_table(columns, ((name, *values) for name, values in _list_lines(reports)))
    for report in reports:
        if report.form:
            print_line(f"{report.model}: {report.form}")


def _list_lines(reports: Sequence[FitReport]) -> list[tuple[str, list[str]]]:
    """The name of each line of the table, and its value for each model."""
    sizes: dict[str, list[int | None]] = {
        "weights on disk": [report.files for report in reports],
        "load, at most": [report.load for report in reports],
        "1,000 tokens of a row": [1000 * report.token for report in reports],
        "state of a row": [report.state for report in reports],
        "rows x tokens": [report.rows_bytes for report in reports],
        "peak of these": [report.run for report in reports],
        "decoded images": [report.images for report in reports],
        "image features": [report.features for report in reports],
        "encoding an image": [report.encoding for report in reports],
        "needed": [report.needed for report in reports],
        "limit": [report.limit for report in reports],
    }
    lines = [(name, [format_rounded(v) if v else "-" for v in values]) for name, values in sizes.items()]
    shapes = [f"{report.rows} x {report.tokens:,}" for report in reports]
    weights = [_format_range(report.least, report.weights) for report in reports]
    return [lines[0], ("weights in memory", weights), *lines[1:4], ("rows and tokens", shapes), *lines[4:]]


def _format_range(least: int, most: int) -> str:
    return format_rounded(most) if least == most else f"{format_rounded(least)} to {format_rounded(most)}"


def _write_config(path: Path, force: bool, report: FitReport, limited: Config | None) -> None:
    """Write the config that fits. ConfigError if none does, or if the file exists. `limited`: has the memory
    limit of another machine."""
    from mlxrun.config.annotate import render_short_file

    if not report.fitting_rows or not report.fitting_tokens:
        raise ConfigError(f"--write: {report.model}: no config fits: {report.verdict}")
    scheduler: dict[str, Any] = {"max_running": report.fitting_rows}
    if limited is not None and limited.scheduler.memory_limit:
        scheduler["memory_limit"] = format_bytes(limited.scheduler.memory_limit)
    model = {"path": report.model, "context_length": report.fitting_tokens}
    comment = f"Fits in {format_rounded(report.limit)}, by `mlxrun fit`: {report.fitting_rows} rows of "
    text = render_short_file(
        f"{comment}{report.fitting_tokens:,} tokens at a time.", {"model": model, "scheduler": scheduler}
    )
    write_new_file(path, text, force)
    print_line(f"{path}: written")
