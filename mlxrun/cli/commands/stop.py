"""`mlxrun stop`: ends servers that run on this machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from mlxrun.cli.options import say
from mlxrun.cli.server_client import list_running_servers
from mlxrun.core.errors import ConfigError

if TYPE_CHECKING:
    from mlxrun.server.running_servers import ServerNote

_POLL_SECONDS = 0.1


@click.command(
    epilog="""\b
Examples:
  mlxrun stop                               the server, if one runs
  mlxrun stop qwen3-8b-4bit                 by its model, port, URL or process, as `mlxrun ps` has them
  mlxrun stop --all
  mlxrun stop 8000 --now                    cut its requests

\b
A server refuses new requests, and lets the running ones finish for server.drain_timeout seconds. The exit
code is 0 once it has ended, and 2 if no server, or more than one, is meant.
"""
)
@click.argument("name", metavar="[SERVER]", required=False)
@click.option("--all", "is_all", is_flag=True, help="Stop all servers of this user.")
@click.option("--now", is_flag=True, help="Do not wait for running requests.")
def command(name: str | None, is_all: bool, now: bool) -> None:
    """Stop a server that runs on this machine."""
    if is_all and name is not None:
        raise click.UsageError("--all stops every server: give no SERVER")
    chosen = choose_servers(list_running_servers(), name, is_all)
    for note in chosen:
        say(f"stopping {_describe(note)}")
        _signal(note)
    while left := [note for note in list_running_servers() if note in chosen]:
        time.sleep(_POLL_SECONDS)
        for note in left if now else ():  # a server takes signals that follow at once for the first one
            _signal(note)


def choose_servers(servers: Sequence[ServerNote], name: str | None, is_all: bool) -> list[ServerNote]:
    """The servers that are meant. ConfigError if that is none, or not clear."""
    found = [note for note in servers if name is None or _is_meant(note, name)]
    if not found:
        running = f"no server is {name}; these run: {_list_servers(servers)}"
        raise ConfigError(running if servers else "no server runs on this machine")
    if len(found) > 1 and not is_all:
        raise ConfigError(
            f"{len(found)} servers run; name one of them, or give --all: {_list_servers(found)}"
        )
    return found


def _list_servers(servers: Sequence[ServerNote]) -> str:
    return ", ".join(map(_describe, servers))


def _describe(note: ServerNote) -> str:
    return f"{note.url} (process {note.pid}, {note.model})"


def _is_meant(note: ServerNote, name: str) -> bool:
    """By process, port, URL, or the model's path or the last part of it."""
    port = note.url.rpartition(":")[2]
    known = {str(note.pid), port, note.model, note.model.rstrip("/").rpartition("/")[2].casefold()}
    return name in known or name.casefold() in known or name.rstrip("/") == note.url


def _signal(note: ServerNote) -> None:
    """End a server; at once, if it is ending already."""
    with suppress(ProcessLookupError):
        os.kill(note.pid, signal.SIGTERM)
