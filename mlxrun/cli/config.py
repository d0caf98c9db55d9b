"""`mlxrun config`: check files, show the values in force, print the schema, start a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from mlxrun.cli.options import config_options
from mlxrun.errors import ConfigError


@click.group()
def command() -> None:
    """Check, show and start config files."""


@command.command(
    epilog="""\b
Examples:
  mlxrun config check                       the config that a run here would use
  mlxrun config check configs/*.yaml        several files
  mlxrun config check prod.yaml --set scheduler.policy=fair

\b
Every mistake is printed as  file:line:column: section.key: what is wrong (did you mean ...?)
and the exit code is 2. No model is loaded.
"""
)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="[FILE]...")
@config_options
def check(files: tuple[Path, ...], config_path: Path | None, sets: tuple[str, ...]) -> None:
    """Find every mistake in config files."""
    from mlxrun.cli.config_checks import parser_problems, template_problems
    from mlxrun.config.loading import load_config

    paths: list[Path | None] = [*files] or [config_path]
    if files and config_path:
        paths.append(config_path)
    problems: list[str] = []
    for path in paths:
        try:
            loaded = load_config(path, sets, os.environ, (parser_problems, template_problems))
        except ConfigError as error:
            problems += str(error).splitlines()
        else:
            click.echo(f"{loaded.path or 'built-in defaults'}: ok")
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


@command.command(
    epilog="""\b
Examples:
  mlxrun config show -c prod.yaml           every value, with file:line:column, variable or flag
  mlxrun config show --json | jq .config.scheduler

\b
The text is itself a valid config. Secrets are shown as ***.
"""
)
@config_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object: config, origins, config_hash.")
def show(config_path: Path | None, sets: tuple[str, ...], as_json: bool) -> None:
    """Print every value in force and where it came from."""
    from mlxrun.config.annotate import with_origins
    from mlxrun.config.conversion import to_plain
    from mlxrun.config.loading import load_config

    loaded = load_config(config_path, sets, os.environ)
    if not as_json:
        click.echo(with_origins(loaded), nl=False)
        return
    origins = {key: str(origin) for key, origin in loaded.origins.items()}
    found = {"config": to_plain(loaded.config), "origins": origins, "config_hash": loaded.digest}
    click.echo(json.dumps(found, indent=2, ensure_ascii=False))


@command.command(
    epilog="""\b
Example:
  mlxrun config schema > mlxrun.schema.json

\b
An editor uses it when the first line of the YAML file is
  # yaml-language-server: $schema=mlxrun.schema.json
"""
)
def schema() -> None:
    """Print the JSON Schema of config files."""
    from mlxrun.config.schema import schema_text

    click.echo(schema_text(), nl=False)


@command.command(
    epilog="""\b
Examples:
  mlxrun config init                        writes ./mlxrun.yaml, which every command finds by itself
  mlxrun config init configs/mine.yaml
"""
)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("mlxrun.yaml"))
@click.option("--force", is_flag=True, help="Write over a file that is there.")
def init(file: Path, force: bool) -> None:
    """Write a config with every key, its default and its meaning."""
    from mlxrun.config.annotate import annotated
    from mlxrun.config.schema import SCHEMA_FILE

    near = SCHEMA_FILE.is_relative_to(Path.cwd())
    where = os.path.relpath(SCHEMA_FILE, file.absolute().parent) if near else str(SCHEMA_FILE)
    try:
        with file.open("w" if force else "x", encoding="utf-8") as out:
            out.write(annotated(where))
    except FileExistsError:
        raise ConfigError(f"{file} is there already; --force writes over it") from None
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
    click.echo(f"{file}: written; next: mlxrun config check {file}")
