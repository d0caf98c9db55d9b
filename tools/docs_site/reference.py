"""Reference pages that are made from the code each time the site is built: commands, fields, errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import click

from mlxrun.cli.main import cli
from mlxrun.core import errors
from mlxrun.core.errors import MlxrunError
from mlxrun.server.app import list_surfaces
from mlxrun.server.http.surface import Endpoint

_ERRORS_INTRO = """\
# Errors

Every error says what is wrong, where, and what was expected. `code` is for programs. It is in the body of an
HTTP error, and in the error lines of a job. This page is made from the classes of errors.

| code | HTTP status | exit code | meaning |
|---|---|---|---|"""
_ERRORS_END = """
[The server](../server.md#errors) says when a request gets which status, and how a stream ends.
"""


def render_commands() -> str:
    """Every command with its options and examples, as `--help` prints them."""
    parts = [
        "# Command line",
        "This page is what `mlxrun COMMAND --help` prints. It is made from the commands themselves.",
        _render_help("mlxrun", cli),
    ]
    for path, command in list_commands(cli):
        parts += [f"## {path}", _render_help(path, command)]
    return "\n\n".join(parts) + "\n"


def list_commands(group: click.Group, path: str = "mlxrun") -> Iterator[tuple[str, click.Command]]:
    """Every command below a group with its whole name, depth first."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from list_commands(command, f"{path} {name}")


def _render_help(path: str, command: click.Command) -> str:
    context = click.Context(command, info_name=path, terminal_width=110, max_content_width=110)
    return f"```text\n{command.get_help(context).rstrip()}\n```"


def render_api() -> str:
    """Every endpoint with the fields of its body."""
    parts = [
        "# Endpoints and fields",
        "This page is made from the schemas that validate bodies. A server has them at `/openapi.json`.",
        "[Fields](../server.md#fields) lists, with reasons, what has no effect and what is refused.",
    ]
    surfaces = [surface for surface in list_surfaces() if surface.is_api]
    rows = ["| endpoint | what it does | config key |", "|---|---|---|"]
    for surface in surfaces:
        keys = " and ".join(f"`apis.{key}`" for key in surface.switches)
        rows += [f"| `{end.method} {end.path}` | {end.summary} | {keys} |" for end in surface.endpoints]
    parts.append("\n".join(rows))
    for surface in surfaces:
        for end in surface.endpoints:
            parts += _render_fields(end)
    return "\n\n".join(parts) + "\n"


def _render_fields(endpoint: Endpoint) -> list[str]:
    properties = (endpoint.body or {}).get("properties")
    if not properties:
        return []
    rows = [f"| `{name}` | {describe_schema(schema)} |" for name, schema in sorted(properties.items())]
    head = "| field | values |\n|---|---|"
    return [f"## {endpoint.method} {endpoint.path}", f"{endpoint.summary}.", "\n".join([head, *rows])]


def describe_schema(schema: Mapping[str, Any]) -> str:
    """The values that a field takes, in a few words: type, constants and range."""
    if "const" in schema:
        return f"only `{_spell(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{_spell(value)}`" for value in schema["enum"])
    kinds = schema.get("type", "any value")
    words = [kinds if isinstance(kinds, str) else " or ".join(kinds)]
    low, high = schema.get("minimum"), schema.get("maximum")
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    words += [f"from {low}"] if low is not None else [f"above {above}"] if above is not None else []
    words += [f"to {high}"] if high is not None else [f"below {below}"] if below is not None else []
    if "maxItems" in schema:
        words.append(f"of at most {schema['maxItems']}")
    return " ".join(words)


def _spell(value: object) -> str:
    """A constant as it stands in JSON, without the quotes of texts."""
    return value if isinstance(value, str) else json.dumps(value)


def render_errors() -> str:
    """Every error that mlxrun raises on purpose: its code, HTTP status, exit code and meaning."""
    rows = [
        f"| `{found.code}` | {found.http_status} | {found.exit_code} | {_read_meaning(found)} |"
        for found in list_errors()
    ]
    return "\n".join([_ERRORS_INTRO, *rows, _ERRORS_END])


def list_errors() -> list[type[MlxrunError]]:
    """The classes of errors in the order of their module, without the base class."""
    found = [value for value in vars(errors).values() if isinstance(value, type)]
    return [kind for kind in found if issubclass(kind, MlxrunError) and kind is not MlxrunError]


def _read_meaning(found: type[MlxrunError]) -> str:
    """The first sentence of a class's docstring."""
    text = " ".join((found.__doc__ or "").split())
    return re.split(r"(?<=[.])\s", text, maxsplit=1)[0].replace("|", r"\|")


PAGES: dict[str, Callable[[], str]] = {
    "reference/cli.md": render_commands,
    "reference/api.md": render_api,
    "reference/errors.md": render_errors,
}
