"""`mlxrun ps`: the servers that run on this machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from mlxrun.cli.server_client import list_running_servers, read_modalities, read_state
from mlxrun.core.terminal import print_json, print_line, print_table

if TYPE_CHECKING:
    from mlxrun.server.running_servers import ServerNote

FORMAT = 1


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
    rows = [_describe(note) for note in list_running_servers()]
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


def _print_rows(rows: list[tuple[str, ...]]) -> None:
    from rich.table import Column

    names = ("process", "url", "model", "takes", "state", "since")
    columns = [Column(name, overflow="fold", no_wrap=name in ("process", "since")) for name in names]
    starts = (time.strftime("%Y-%m-%d %H:%M", time.localtime(int(started))) for *_, started in rows)
    print_table(columns, ((*cells, start) for (*cells, _), start in zip(rows, starts, strict=True)))
