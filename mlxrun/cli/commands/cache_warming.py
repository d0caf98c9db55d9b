"""`mlxrun cache warm`, `pinned` and `unpin`: prompts that a running server has computed ahead."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from mlxrun.cli.server_client import (
    KEY_VARIABLE,
    ServerClient,
    explain_refusal,
    find_server,
    make_client,
)
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import ConfigError
from mlxrun.core.limited_json import load_json
from mlxrun.core.terminal import print_json, print_line
from mlxrun.core.text_files import read_text_file

FORMAT = 1
MAX_BODY = 64_000_000  # bytes
NOTE = f"""\b
Without --url, the server is that on http://127.0.0.1:8000, else the newest on this machine. If its keys have
roles, the key needs the role `admin`; `pinned` needs `metrics`. The key may be in ${KEY_VARIABLE}.
"""


def add_server_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of all commands here. The command gets the `client` of the server, and `as_json`."""

    @click.option("--url", metavar="URL", help="The server.")
    @click.option("--key", metavar="KEY", envvar=KEY_VARIABLE, help="Its API key.")
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    @functools.wraps(function)
    def call(url: str | None, key: str | None, **options: Any) -> Any:
        found = url or find_server(key)
        if found is None:
            none = "no server runs on this machine; `mlxrun serve` starts one, or give --url"
            raise ConfigError(explain_refusal(key) or none)
        return function(client=make_client(found, key), **options)

    return call


@click.command(
    epilog=f"""\b
Examples:
  mlxrun cache warm --body opencode.json              the body of a request that the agent sends
  mlxrun cache warm --body codex.json --name codex --url http://mac.local:8000
  mlxrun cache pinned                                 what is pinned
  mlxrun cache unpin 5f0c                             by the first digits of its id

\b
The file holds a body of /v1/chat/completions, /v1/responses or /v1/messages. Its system prompt and tools are
computed, up to where a prompt with another question differs. They stay in the prefix cache until they are
unpinned, the cache is cleared, or the server ends. docs/agents.md says how to get the body of an agent.

{NOTE}"""
)
@click.option(
    "--body",
    "path",
    required=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="A request body in JSON.",
)
@click.option(
    "--endpoint",
    metavar="PATH",
    help="The body's endpoint, such as /v1/messages; by default guessed by its form.",
)
@click.option("--name", metavar="TEXT", help="What it is listed as; by default the name of the file.")
@add_server_options
def warm(client: ServerClient, path: Path, endpoint: str | None, name: str | None, as_json: bool) -> None:
    """Compute and pin the beginning of an agent's prompt."""
    body = {"body": _read_body(path), "name": path.stem if name is None else name}
    answer = client.call("POST", "/v1/cache/warm", body | ({"url": endpoint} if endpoint else {}))
    if as_json:
        print_json({"format": FORMAT, "url": client.url, **answer})
        return
    for where, made in _list_workers(answer):
        pinned = made["pinned"]
        print_line(
            f"{where}{pinned['tokens']:,} tokens pinned as {pinned['id']} ({pinned['name']}), "
            f"{format_rounded(pinned['nbytes'])}; {made['cached_tokens']:,} were cached, "
            f"the others took {made['seconds']:.1f} s"
        )


@click.command(epilog=NOTE)
@add_server_options
def pinned(client: ServerClient, as_json: bool) -> None:
    """List the prompts that are pinned in a server's prefix cache."""
    answer = client.call("GET", "/v1/cache")
    if as_json:
        print_json({"format": FORMAT, "url": client.url, **answer})
        return
    found = _list_workers(answer)
    if not found:
        print_line(f"{client.url}: no model is loaded, so nothing is pinned")
    for where, cache in found:
        total = format_rounded(cache.get("pinned_bytes", 0))
        memory = format_rounded(cache.get("memory_bytes", 0))
        count = len(cache["pinned"])
        print_line(f"{where}{client.url}: {count} pinned, {total}; the cache has {memory} in memory")
        for each in cache["pinned"]:
            at = time.strftime("%Y-%m-%d %H:%M", time.localtime(each["pinned_at"]))
            size = format_rounded(each["nbytes"])
            print_line(f"  {each['id']}  {each['tokens']:>9,} tokens  {size:>9}  {at}  {each['name']}")


@click.command(
    epilog=f"""\b
Examples:
  mlxrun cache unpin 5f0c                   by the first digits that `mlxrun cache pinned` shows
  mlxrun cache unpin --all

{NOTE}
What is unpinned stays in the cache as other prompts do, and is evicted when it was not used for long.
"""
)
@click.argument("prefix", metavar="[ID]", required=False)
@click.option("--all", "is_all", is_flag=True, help="Unpin all prompts.")
@add_server_options
def unpin(client: ServerClient, prefix: str | None, is_all: bool, as_json: bool) -> None:
    """Make pinned prompts ordinary entries of the prefix cache."""
    if is_all == (prefix is not None):
        raise click.UsageError("give the ID of a prompt, or --all")
    known = {
        each["id"]: each["name"]
        for _, cache in _list_workers(client.call("GET", "/v1/cache"))
        for each in cache["pinned"]
    }
    chosen = _choose_ids(known, prefix)
    for prefix_id in chosen:
        client.call("DELETE", f"/v1/cache/pinned/{prefix_id}")
        if not as_json:
            print_line(f"unpinned {prefix_id} ({known[prefix_id]})")
    if as_json:
        print_json({"format": FORMAT, "url": client.url, "unpinned": chosen})
    elif not chosen:
        print_line("nothing is pinned")


def _choose_ids(known: Mapping[str, str], prefix: str | None) -> list[str]:
    """The ids that are meant: all, or the one with these first digits. ConfigError if that is not clear."""
    found = [prefix_id for prefix_id in known if prefix is None or prefix_id.startswith(prefix.lower())]
    if prefix is None or len(found) == 1 and prefix:
        return found
    names = ", ".join(f"{prefix_id} ({known[prefix_id]})" for prefix_id in found or known)
    if found:
        raise ConfigError(f"{prefix}: several prompts begin with these digits: {names}")
    raise ConfigError(f"{prefix}: no such prompt is pinned; there are: {names or 'none'}")


def _read_body(path: Path) -> Any:
    """The JSON of a file. ConfigError if it is none."""
    try:
        return load_json(read_text_file(path, MAX_BODY))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: this is no JSON body: {error}") from error


def _list_workers(answer: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The answers of all workers of a server on Ray, or of all its models, each with its name; else the only
    one."""
    for kind in ("worker", "model"):
        if f"{kind}s" in answer:
            return [(f"{kind} {each[kind]}: ", each) for each in answer[f"{kind}s"]]
    return [("", answer)]
