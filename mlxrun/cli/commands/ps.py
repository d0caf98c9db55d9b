"""`mlxrun ps`: the servers that run on this machine."""

from __future__ import annotations

import http.client
import os
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from mlxrun.cli.server_client import ClientError, connect, read_json
from mlxrun.core.terminal import print_json, print_line, print_table

if TYPE_CHECKING:
    from mlxrun.server.running_servers import ServerNote

FORMAT = 1
_SECONDS = 2.0  # that a server may take to say its state
_MOST_BYTES = 1_000_000  # of its answer


@click.command(
    epilog="""\b
Examples:
  mlxrun ps                                 each server: its URL, its model, what that takes, its state
  mlxrun ps --json | jq -r '.servers[].url'

\b
Only servers of the same user are listed. The state is ok, loading, stopping or dead, or that the server does
not answer. One that loads, or needs an API key, does not say what its model takes. `mlxrun stop` stops one.
"""
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """List the servers that run on this machine."""
    from mlxrun.server.running_servers import find_notes_folder, list_servers

    rows = [_describe(note) for note in list_servers(find_notes_folder(os.environ))]
    if as_json:
        print_json({"format": FORMAT, "servers": rows})
    elif not rows:
        print_line("no servers run; `mlxrun serve` starts one")
    else:
        _print_rows([(*map(str, (row | {"takes": ", ".join(row["takes"])}).values()),) for row in rows])


def _describe(note: ServerNote) -> dict[str, Any]:
    state = read_state(note.url, note.certificate)
    takes = read_modalities(note.url, note.certificate) if state == "ok" else []
    own = {"pid": note.pid, "url": note.url, "model": note.model}
    return {**own, "takes": takes, "state": state, "started": int(note.started)}


def read_state(url: str, certificate: str | None = None) -> str:
    """What a server says of its state, or that it does not answer. `certificate`: see `connect`."""
    found = _read(f"{url}/health", certificate)
    return "no answer" if found is None else str(found.get("status", "unknown"))


def read_modalities(url: str, certificate: str | None = None) -> list[str]:
    """The kinds of input that a server's models take. Empty if it does not say."""
    models = (_read(f"{url}/v1/models", certificate) or {}).get("data", ())
    return list(dict.fromkeys(kind for model in models for kind in model.get("input_modalities", ())))


def _read(url: str, certificate: str | None) -> dict[str, Any] | None:
    """The JSON object at a URL, empty if it is another value. None without an answer, or if it is no JSON."""
    try:
        with closing(connect(url, _SECONDS, certificate)) as connection:
            connection.request("GET", urlsplit(url).path)
            return read_json(connection.getresponse().read(_MOST_BYTES))
    except (OSError, http.client.HTTPException, ClientError):
        return None


def _print_rows(rows: list[tuple[str, ...]]) -> None:
    from rich.table import Column

    names = ("process", "url", "model", "takes", "state", "since")
    columns = [Column(name, overflow="fold", no_wrap=name in ("process", "since")) for name in names]
    starts = (time.strftime("%Y-%m-%d %H:%M", time.localtime(int(started))) for *_, started in rows)
    print_table(columns, ((*cells, start) for (*cells, _), start in zip(rows, starts, strict=True)))
