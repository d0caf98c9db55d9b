"""Options and output of all benchmark commands, including those of `python -m benchmarks`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from mlxrun.cli.bench.provenance import add_provenance
from mlxrun.cli.options import add_config_options, add_json_option, make_repeat_option
from mlxrun.core.errors import JobError
from mlxrun.core.terminal import print_text

F = TypeVar("F", bound=Callable[..., Any])


def add_measure_options(function: F) -> F:
    """Add the options of all benchmarks."""
    model = click.option(
        "--model",
        default="tiny",
        show_default=True,
        metavar="PRESET|PATH",
        help="tiny, qwen3-0.6b, qwen3-8b or qwen3-30b-a3b, each also with -4bit or -8bit behind it (random "
        "weights), embedded (the built-in model), or a local model folder.",
    )
    scale = click.option(
        "--scale",
        default=1.0,
        show_default=True,
        type=click.FloatRange(0, 16, min_open=True),
        help="Factor of all prompt and answer lengths.",
    )
    repeat = make_repeat_option("Runs of each side; medians are shown.")
    return model(scale(repeat(add_json_option(add_config_options(function)))))


def write_report(report: Any, json_path: Path | None, show: Callable[[Any], None]) -> int:
    """Show the report as a table, write it as JSON, or both; the JSON says where and how it was measured."""
    text = json.dumps(add_provenance(report), indent=2) + "\n"
    if str(json_path) == "-":
        print_text(text)
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
