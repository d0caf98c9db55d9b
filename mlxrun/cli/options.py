"""Options that commands share: `-c FILE` and `--set section.key=value`; those of benchmarks.

`@config_options` adds the first two; the command gets `config_path` and `sets` and hands them to `load`,
which reads the config and sets up logging from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from mlxrun.config.loading import Loaded

F = TypeVar("F", bound=Callable[..., Any])


def config_options(function: F) -> F:
    """Add `-c/--config` (config_path: Path | None) and `--set` (sets: tuple[str, ...])."""
    config = click.option(
        "-c",
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Config file. Without it: $MLXRUN_CONFIG, then ./mlxrun.yaml, then the built-in defaults.",
    )
    sets = click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override one value, as section.key=value; the value is YAML. May be given several times.",
    )
    return config(sets(function))


def repeat_option(text: str) -> Callable[[F], F]:
    """`--repeat` (repeat: int) of a benchmark; `text` says of what."""
    return click.option("--repeat", default=3, show_default=True, type=click.IntRange(1, 100), help=text)


def json_option(function: F) -> F:
    """Add `--json FILE` (json_path: Path | None) of a benchmark."""
    return click.option(
        "--json",
        "json_path",
        type=click.Path(path_type=Path, allow_dash=True, dir_okay=False),
        metavar="FILE",
        help="Write every number as JSON; - is standard output, instead of the table.",
    )(function)


def load(config_path: Path | None, sets: Sequence[str]) -> Loaded:
    """The resolved config of this call, with logging set up as it says; what can be wrong with its parsers
    and its chat template is found here, before anything is loaded."""
    import os

    from mlxrun.cli.config_checks import parser_problems, template_problems
    from mlxrun.cli.logging_setup import set_up_logging
    from mlxrun.config.loading import load_config

    loaded = load_config(config_path, sets, os.environ, (parser_problems, template_problems))
    set_up_logging(loaded.config.log)
    return loaded
