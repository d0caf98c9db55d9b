"""`mlxrun ps`: the servers that run on this machine."""

from __future__ import annotations

import http.client
import json
import os
import time
from contextlib import closing

import click

from mlxrun.cli.server_client import connect
from mlxrun.core.terminal import print_json, print_line, print_table

FORMAT = 1
_SECONDS = 2.0  # that a server may take to say its state


@click.command(
    epilog="""\b
Examples:
  mlxrun ps                                 a line for each server: process, URL, model, state, start
  mlxrun ps --json | jq -r '.servers[].url'

\b
Only servers of the same user are listed. The state is ok, loading, stopping or dead, or that the server does
not answer. `mlxrun stop` stops one.
"""
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """List the servers that run on this machine."""
    from mlxrun.server.running_servers import find_notes_folder, list_servers

    rows = [
        {
            "pid": note.pid,
            "url": note.url,
            "model": note.model,
            "state": read_state(note.url, note.certificate),
            "started": int(note.started),
        }
        for note in list_servers(find_notes_folder(os.environ))
    ]
    if as_json:
        print_json({"format": FORMAT, "servers": rows})
    elif not rows:
        print_line("no servers run; `mlxrun serve` starts one")
    else:
        _print_rows([(*map(str, row.values()),) for row in rows])


def read_state(url: str, certificate: str | None = None) -> str:
    """What a server says of its state, or that it does not answer. `certificate`: see `connect`."""
    try:
        with closing(connect(url, _SECONDS, certificate)) as connection:
            connection.request("GET", "/health")
            found = json.loads(connection.getresponse().read(10_000))
    except (OSError, http.client.HTTPException, ValueError):
        return "no answer"
    return str(found.get("status", "unknown")) if isinstance(found, dict) else "unknown"


def _print_rows(rows: list[tuple[str, ...]]) -> None:
    from rich.table import Column

    names = ("process", "url", "model", "state", "since")
    columns = [Column(name, overflow="fold", no_wrap=name in ("process", "since")) for name in names]
    starts = (time.strftime("%Y-%m-%d %H:%M", time.localtime(int(started))) for *_, started in rows)
    print_table(columns, ((*cells, start) for (*cells, _), start in zip(rows, starts, strict=True)))
