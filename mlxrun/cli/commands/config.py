"""`mlxrun config`: checks files, shows the values in effect, prints the schema, writes a first file."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mlxrun.cli.options import add_config_options, check_chat_template, check_parsers, write_new_file
from mlxrun.core.errors import ConfigError
from mlxrun.core.field_errors import suggest
from mlxrun.core.terminal import print_json, print_line, print_text


@click.group()
def command() -> None:
    """Check, show and create config files."""


@command.command(
    epilog="""\b
Examples:
  mlxrun config check                       the config that a command would use here
  mlxrun config check configs/*.yaml        several files
  mlxrun config check prod.yaml --set scheduler.policy=fair

\b
Every error is printed as  file:line:column: section.key: what is wrong (did you mean ...?)
and the exit code is then 2. No model is loaded.
"""
)
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="[FILE]...")
@add_config_options
def check(files: tuple[Path, ...], config_path: Path | None, sets: tuple[str, ...]) -> None:
    """Find all errors in config files."""
    import asyncio

    from mlxrun.cli.models_setup import check_memory, check_memory_limit, load_model_configs
    from mlxrun.config.loading import load_config
    from mlxrun.config.server_settings import find_weak_keys

    paths: list[Path | None] = [*files] or [config_path]
    if files and config_path:
        paths.append(config_path)
    problems: list[str] = []
    for path in paths:
        try:
            loaded = load_config(path, sets, os.environ, (check_parsers, check_chat_template))
            if loaded.config.server.tls:
                from mlxrun.server.certificate import read_certificate  # imports aiohttp

                read_certificate(loaded.config.server)
            if loaded.config.models:
                asyncio.run(check_memory(loaded, load_model_configs(loaded)))
            else:
                asyncio.run(check_memory_limit(loaded))
        except ConfigError as error:
            problems += error.problems or [str(error)]
        else:
            name = loaded.path or "built-in defaults"
            for warning in find_weak_keys(loaded.config.server):
                print_line(f"{name}: warning: {warning}")
            print_line(f"{name}: ok")
    if problems:
        raise ConfigError.from_problems(problems)


@command.command(
    epilog="""\b
Examples:
  mlxrun config show -c prod.yaml           every value with its file:line:column, variable or option
  mlxrun config show --json | jq .config.scheduler

\b
The output is a valid config itself. Secrets are shown as ***.
"""
)
@add_config_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object: config, origins, config_hash.")
def show(config_path: Path | None, sets: tuple[str, ...], as_json: bool) -> None:
    """Print every value in effect and its origin."""
    from mlxrun.config.annotate import render_with_origins
    from mlxrun.config.loading import load_config
    from mlxrun.config.setting_fields import to_plain

    loaded = load_config(config_path, sets, os.environ)
    if not as_json:
        print_text(render_with_origins(loaded))
        return
    origins = {key: str(origin) for key, origin in loaded.origins.items()}
    found = {"config": to_plain(loaded.config), "origins": origins, "config_hash": loaded.digest}
    print_json(found)


@command.command(
    epilog="""\b
Example:
  mlxrun config schema > mlxrun.schema.json

\b
An editor uses it if the first line of the YAML file is
  # yaml-language-server: $schema=mlxrun.schema.json
"""
)
def schema() -> None:
    """Print the JSON Schema of config files."""
    from mlxrun.config.schema import render_schema

    print_text(render_schema())


@command.command(
    epilog="""\b
Examples:
  mlxrun config init                        write ./mlxrun.yaml, which every command uses by default
  mlxrun config init configs/mine.yaml
  mlxrun config init --preset agents        only what a server for agents changes

\b
Presets: laptop (one person, with other work beside it), agents (long prompts that grow), prod (many clients
with keys), batch (evaluations that can be repeated).
"""
)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("mlxrun.yaml"))
@click.option("--preset", metavar="NAME", help="Write a short file: laptop, agents, prod or batch.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def init(file: Path, preset: str | None, force: bool) -> None:
    """Write a config file: one with all keys explained, or a preset.

    Each key has its default and its description; a preset has what it changes, and why.
    """
    from mlxrun.config.annotate import PRESETS, render_preset, render_template_file
    from mlxrun.config.schema import SCHEMA_FILE

    is_below = SCHEMA_FILE.is_relative_to(Path.cwd())
    schema_path = os.path.relpath(SCHEMA_FILE, file.absolute().parent) if is_below else str(SCHEMA_FILE)
    if preset is not None and preset not in PRESETS:
        known = ", ".join(PRESETS)
        raise ConfigError(f"--preset: {preset!r} is none of {known}{suggest(preset, PRESETS)}")
    text = render_preset(preset, schema_path) if preset else render_template_file(schema_path)
    write_new_file(file, text, force)
    print_line(f"{file}: written; check it with: mlxrun config check {file}")
