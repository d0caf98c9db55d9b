"""Options that commands share: `-c FILE`, `--set section.key=value` and those of benchmarks; and how commands
report.

`@add_config_options` adds the first two. The command gets `config_path` and `sets` and passes them to
`load_command_config`, which loads the config and sets up logging. Only this module sets handlers of logging;
libraries get a handler through the root logger. Checks of a config may need other packages (names of parsers,
the chat template's syntax). They import nothing heavy, and nothing at all if the config does not set the
value.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from mlxrun.config.nodes import ConfigProblem, Origin
from mlxrun.core.durable_writes import write_atomically
from mlxrun.core.errors import ConfigError
from mlxrun.core.terminal import print_error
from mlxrun.core.text_files import is_stream, read_text_file
from mlxrun.core.visible_text import JsonFormatter, TextFormatter

if TYPE_CHECKING:
    from mlxrun.config.loading import LoadedConfig
    from mlxrun.config.settings import Config, LogSettings

F = TypeVar("F", bound=Callable[..., Any])
Options = Sequence[tuple[str, str, str]]  # of `load_config`
SHOWN = 20  # lines of a list; the others are counted


class FiniteRange(click.FloatRange):
    """A range of numbers that neither `nan` nor `inf` is in."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no finite number", param, ctx)
        return found


def add_config_options(function: F) -> F:
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
        help="Override one value, as section.key=value with a YAML value. May be given several times.",
    )
    return config(sets(function))


def add_model_argument(function: F) -> F:
    """Add `[MODEL]` (model: str | None); the command passes it to `name_model`. `--model MODEL`, which other
    programs have, means the same."""
    key = "mlxrun.model"

    def note(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
        ctx.meta[key] = value

    def choose(ctx: click.Context, _: click.Parameter, value: str | None) -> str | None:
        named = ctx.meta[key]
        if None not in (value, named):
            raise click.UsageError(f"--model {named}: the model is {value} already")
        return value or named

    hidden: dict[str, Any] = {"hidden": True, "expose_value": False, "is_eager": True}
    option = click.option("--model", "other_model", callback=note, **hidden)
    return click.argument("model", required=False, metavar="[MODEL]", callback=choose)(option(function))


def add_model_option(function: F) -> F:
    """Add `--model MODEL` (model: str | None); the command passes it to `name_model`."""
    text = "The model: a folder, a hub id or its last part, such as qwen3-8b-4bit. As --set model.path=MODEL."
    return click.option("--model", metavar="MODEL", help=text)(function)


def name_model(model: str | None, given_as: str = "MODEL") -> Options:
    """Make the options of the model that a command was given. `given_as`: what errors call it. ModelLoadError
    for an unknown name."""
    return [] if model is None else [(given_as, "model.path", find_model(model))]


def find_model(model: str) -> str:
    """Return a model as the config names it. A short name becomes a full one, and the user is told.
    ModelLoadError for an unknown name."""
    from mlxrun.model.load.hub import find_hub_id, is_short_name

    if not is_short_name(model):
        return model
    found = find_hub_id(model)
    say(f"{model} is {found}")
    return found


def add_ray_option(function: F) -> F:
    """Add `--ray [ADDRESS]` (ray_address: str | None)."""
    return click.option(
        "--ray",
        "ray_address",
        is_flag=False,
        flag_value="local",
        metavar="[ADDRESS]",
        help="Run on workers of the Ray cluster at HOST:PORT, or of this machine's (auto); without an "
        "address on a Ray of its own with a worker for each GPU. Needs the extra: mlxrun[ray].",
    )(function)


def make_repeat_option(text: str) -> Callable[[F], F]:
    """Make the option `--repeat` (repeat: int) of a benchmark. `text`: its help."""
    return click.option("--repeat", default=3, show_default=True, type=click.IntRange(1, 100), help=text)


def add_json_option(function: F) -> F:
    """Add `--json FILE` (json_path: Path | None) to a benchmark."""
    return click.option(
        "--json",
        "json_path",
        type=click.Path(path_type=Path, allow_dash=True, dir_okay=False),
        metavar="FILE",
        help="Write every number as JSON; - prints it instead of the table.",
    )(function)


def add_measure_options(function: F) -> F:
    """Add the options of all benchmarks, also of those of `python -m benchmarks`."""
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
        type=FiniteRange(0, 16, min_open=True),
        help="Factor of all prompt and answer lengths.",
    )
    repeat = make_repeat_option("Runs of each side; medians are shown.")
    return model(scale(repeat(add_json_option(add_config_options(function)))))


def load_command_config(
    config_path: Path | None,
    sets: Sequence[str],
    options: Options = (),
    *,
    several: bool = False,
    remedy: str = "give a config of one model",
) -> LoadedConfig:
    """Load the config of a command and set up logging. ConfigError also names wrong parsers and chat
    templates, before a model is loaded. `options`: see `load_config`; `several`: whether the command takes a
    config of several models; `remedy`: what the user can do if it does not."""
    from mlxrun.config.loading import load_config

    def check_models(loaded: LoadedConfig) -> list[ConfigProblem]:
        if several or not loaded.config.models:
            return []
        text = f"only `mlxrun serve` without --ray has several; {remedy}"
        return [ConfigProblem.at(loaded.origins["models"], "models", text)]

    checks = (check_parsers, check_chat_template, check_models)
    loaded = load_config(config_path, sets, os.environ, checks, options)
    set_up_logging(loaded.config.log)
    return loaded


def read_config_again(loaded: LoadedConfig) -> Config:
    """Read the config of a command again. ConfigError if it is wrong now, or came from a pipe."""
    from mlxrun.config.loading import load_config

    if loaded.path is not None and is_stream(loaded.path):
        raise ConfigError(f"{loaded.path} is a pipe, which cannot be read again")
    return load_config(loaded.path, loaded.sets, os.environ, options=loaded.options).config


def write_new_file(path: Path, text: str, force: bool) -> None:
    """Write a file for the user. ConfigError if it exists, unless `force`, or if it cannot be written."""
    if not force and os.path.lexists(path):
        raise ConfigError(f"{path} exists already; --force overwrites it")
    try:
        write_atomically(path, text.encode())  # a full disk leaves the file as it was
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def parse_field(flag: str, option: str = "--set") -> tuple[str, Any]:
    """Parse the name and the YAML value of an option such as `--set max_tokens=20`. UsageError or ConfigError
    if it is wrong."""
    from mlxrun.config.yaml_source import YamlError, parse_value

    name, equals, text = flag.partition("=")
    if not equals or not name:
        raise click.UsageError(f"{option} {flag}: it does not have the form field=value")
    problems: list[ConfigProblem] = []
    try:
        value = parse_value(text, name, Origin("set", name), problems).strip_origins()
    except YamlError as error:
        raise ConfigError(f"{option} {name}: {error}") from error
    if problems:
        raise ConfigError.from_problems(problem.text for problem in problems)
    return name, value


def confirm(verb: str, what: str) -> bool:
    """Ask the user whether to do this. UsageError if nobody can answer in the terminal."""
    if not can_ask():
        raise click.UsageError(f"this would {verb} {what}; give --yes, as there is no terminal to ask on")
    return click.confirm(f"{verb.capitalize()} {what}?", err=True)


def can_ask() -> bool:
    """Whether somebody can answer a question in the terminal."""
    return sys.stdin.isatty()


def say(text: str) -> None:
    """Print a line about what the command does to standard error."""
    print_error(text)


def list_first(texts: Sequence[object], most: int = SHOWN) -> Iterator[str]:
    """Yield the first `most` texts, and how many more there are."""
    yield from map(str, texts[:most])
    if len(texts) > most:
        yield f"... and {len(texts) - most} more"


def set_up_logging(settings: LogSettings) -> None:
    """Log mlxrun at `settings.level` and above, and warnings of other libraries, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.format == "json" else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("mlxrun").setLevel(settings.level.upper())
    logging.captureWarnings(True)


def check_parsers(loaded: LoadedConfig) -> list[ConfigProblem]:
    """Find names of parsers that do not exist."""
    given = loaded.config.parsers
    if given.tools in ("auto", "none") and given.reasoning in ("auto", "none"):
        return []
    from mlxrun.api.parsers.registry import choose_formats

    found = []
    for key, names in (("tools", (given.tools, "none")), ("reasoning", ("none", given.reasoning))):
        try:
            choose_formats(None, (), *names)
        except ConfigError as error:
            path = f"parsers.{key}"
            found.append(ConfigProblem.at(loaded.origins[path], path, str(error)))
    return found


def check_chat_template(loaded: LoadedConfig) -> list[ConfigProblem]:
    """Find a chat template that cannot be read, or is not valid Jinja."""
    key, given = "model.chat_template", loaded.config.model.chat_template
    if given is None:
        return []
    from mlxrun.api.text.templates.template import find_syntax_error

    try:
        broken = find_syntax_error(read_text_file(Path(given)))
    except OSError as error:
        return [ConfigProblem.at(loaded.origins[key], key, f"{given}: {error.strerror}")]
    except UnicodeDecodeError as error:
        return [ConfigProblem.at(loaded.origins[key], key, f"{given}: it is not UTF-8 text: {error.reason}")]
    if broken is None:
        return []
    line, reason = broken
    return [ConfigProblem.at(loaded.origins[key], key, f"{given}:{line}: {reason}")]
