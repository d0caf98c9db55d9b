"""`mlxrun rm`: removes a model from the local cache of the hub."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from mlxrun.cli.options import confirm
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import ConfigError
from mlxrun.core.field_errors import suggest
from mlxrun.core.terminal import print_error, print_line

if TYPE_CHECKING:
    from mlxrun.model.load.hub import CachedModel


@click.command(
    epilog="""\b
Examples:
  mlxrun rm qwen3-8b-4bit                   ask, then remove all its revisions
  mlxrun rm mlx-community/Qwen3-8B-4bit --yes

\b
Only the cache of the hub is touched. Runs and entries of the prefix cache stay: `mlxrun cache clear`.
"""
)
@click.argument("model", metavar="MODEL")
@click.option("--yes", is_flag=True, help="Do not ask.")
def command(model: str, yes: bool) -> int:
    """Remove a model from the local cache of the hub."""
    from mlxrun.model.load.hub import list_cached_models, remove_cached_model

    chosen = _choose(model, list_cached_models())
    what = f"{chosen.id} ({format_rounded(chosen.size)})"
    if not yes and not confirm("remove", what):
        print_error("nothing was removed")
        return 1
    print_line(f"{chosen.id} is removed, {format_rounded(remove_cached_model(chosen.id))} freed")
    return 0


def _choose(name: str, models: Sequence[CachedModel]) -> CachedModel:
    """The model with an id or a short name. ConfigError if there is none, or more than one."""
    short = name.casefold()
    found = [m for m in models if name == m.id or short == m.id.rpartition("/")[2].casefold()]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"several models are called {name}: {', '.join(m.id for m in found)}")
    names = [part for m in models for part in (m.id, m.id.rpartition("/")[2].casefold())]
    raise ConfigError(f"there is no model {name} in the cache{suggest(name, names)}; see `mlxrun list`")
