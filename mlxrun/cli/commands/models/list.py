"""`mlxrun list`: the models in the local cache of the hub."""

from __future__ import annotations

import time

import click

from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.terminal import print_json, print_line, print_table

FORMAT = 1


@click.command(
    epilog="""\b
Examples:
  mlxrun list                               one line for each model: its id, its size, when it was last used
  mlxrun list --json | jq -r '.models[].id'

\b
The cache is that of the hub's own programs: $HF_HUB_CACHE, else ~/.cache/huggingface/hub. Models in other
folders are not listed; every command takes the path of such a folder.
"""
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """List the models in the local cache of the hub."""
    from rich.table import Column

    from mlxrun.model.load.hub import list_cached_models

    models = list_cached_models()
    if as_json:
        rows = [{"id": m.id, "folder": str(m.folder), "bytes": m.size, "used": m.used} for m in models]
        print_json({"format": FORMAT, "models": rows})
    elif not models:
        print_line("only `embedded`, the built-in model; `mlxrun pull qwen3-0.6b-4bit` downloads another")
    else:
        names = Column("model", overflow="fold")
        others = Column("size", justify="right", no_wrap=True), Column("last used", no_wrap=True)
        days = (time.strftime("%Y-%m-%d", time.localtime(m.used)) for m in models)
        sizes = (format_rounded(m.size) for m in models)
        print_table((names, *others), zip((m.id for m in models), sizes, days, strict=True))
        print_line("and `embedded`, the built-in one")
