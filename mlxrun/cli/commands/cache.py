"""`mlxrun cache`: the entries of the prefix cache on disk. It reads files only, without a model or mlx. The
commands for a running server are in cache_warming.py."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxrun.cli.commands.cache_warming import pinned, unpin, warm
from mlxrun.cli.options import add_config_options, confirm, load_command_config
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import ConfigError
from mlxrun.core.terminal import print_error, print_json, print_line

if TYPE_CHECKING:
    from mlxrun.engine.prefix_cache.cache_folder import InspectedEntry, ModelFolder, ModelInspection

FORMAT = 2
FINGERPRINT_DIGITS = 16

NOTE = """\b
The folder is that of --path, else cache.disk_path of the config, else ~/.cache/mlxrun/prefixes (macOS:
~/Library/Caches). With the -c and --set of `mlxrun serve` it is the folder of that server. A batch job
stores its entries in X.out.jsonl.run/cache.
"""


@click.group()
def command() -> None:
    """List, verify and delete the entries of the prefix cache on disk, and warm that of a server."""


for each in (warm, pinned, unpin):
    command.add_command(each)


def add_cache_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of all commands here. The command gets the resolved `folder`, and `as_json`."""

    @add_config_options
    @click.option(
        "--path",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        metavar="FOLDER",
        help="Use this folder, and not that of the config.",
    )
    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    @functools.wraps(function)
    def call(path: Path | None, config_path: Path | None, sets: tuple[str, ...], **options: Any) -> Any:
        from mlxrun.engine.prefix_cache.cache_folder import resolve_cache_folder

        # The backend of the config does not matter: another run may have written to the folder.
        config = load_command_config(config_path, ("cache.backend=disk", *sets)).config
        return function(folder=path or resolve_cache_folder(config.cache.disk_path), **options)

    return call


def _refuse_records(context: click.Context, parameter: click.Parameter, given: bool) -> None:
    if given:
        raise click.UsageError("--records is now called --entries")


@command.command(
    epilog=f"""\b
Examples:
  mlxrun cache ls                           one line for each model
  mlxrun cache ls --entries                 and one line for each of its entries
  mlxrun cache ls -c prod.yaml              the folder of `mlxrun serve -c prod.yaml`
  mlxrun cache ls --set cache.disk_path=/data/prefixes
  mlxrun cache ls --path big.out.jsonl.run/cache

{NOTE}"""
)
@click.option("--entries", is_flag=True, help="List the entries too, least recently used first.")
@click.option("--records", is_flag=True, hidden=True, expose_value=False, callback=_refuse_records)
@add_cache_options
def ls(folder: Path, entries: bool, as_json: bool) -> None:
    """List the models that have entries.

    Each has its size, and when it was last used.
    The fingerprint covers the weights, the adapter, the libraries, and how entries are computed and stored.
    The token count is the number of tokens whose keys and values are stored. For a model that has only
    recurrent states, it is the number of tokens that the stored states cover.
    """
    from mlxrun.engine.prefix_cache.cache_folder import inspect_models

    models = list(inspect_models(folder))
    if as_json:
        _print_json(path=str(folder), models=[_describe_model(model, entries) for model in models])
        return
    if not models:
        print_line(f"{folder}: there are no entries here")
        print_error("`mlxrun serve` stores entries on disk only with cache.backend: disk")
        return
    print_line(f"{folder}:")
    for model in models:
        print_line(_format_model(model))
        for inspected in model.entries if entries else ():
            print_line(_format_entry(inspected))
    if any(model.unreadable for model in models):
        print_error("`mlxrun cache verify` says what is wrong with the unreadable files")


@command.command(
    epilog=f"""\b
Examples:
  mlxrun cache verify                       verify every byte of every entry
  mlxrun cache verify --delete              and delete the bad files

{NOTE}
The exit code is 0, or 1 if a file is bad, even if it was deleted. Bad files do no harm: a run that finds one
deletes it and computes the entry again. Files with names that mlxrun does not give are counted, and never
read or deleted.
"""
)
@click.option("--delete", is_flag=True, help="Delete the bad files.")
@add_cache_options
def verify(folder: Path, delete: bool, as_json: bool) -> int:
    """Verify the checksum and the header of every file."""
    from mlxrun.engine.prefix_cache.cache_folder import list_foreign_files, verify_files

    good, bad = verify_files(folder, delete)
    foreign = sum(1 for _ in list_foreign_files(folder))
    if as_json:
        rows = [{"path": str(path), "reason": reason} for path, reason in bad]
        _print_json(path=str(folder), good=good, bad=rows, foreign=foreign, deleted=delete)
    else:
        for path, reason in bad:
            print_line(f"{path}: {reason}")
        hint = "; --delete removes them" if bad and not delete else ""
        others = f", {_count(foreign, 'other file', 'other files')} not read" if foreign else ""
        print_line(f"{folder}: {good:,} good, {len(bad):,} bad{others}{hint}")
    return 1 if bad else 0


@command.command(
    epilog=f"""\b
Examples:
  mlxrun cache clear                        ask, then delete the entries of all models
  mlxrun cache clear --model 3fa9 --yes     one model, by the first digits that `mlxrun cache ls` shows

{NOTE}
Only files of entries are deleted. mlxrun may be running meanwhile: it computes deleted entries again.
"""
)
@click.option(
    "--model", "prefix", metavar="FINGERPRINT", help="Only this model; the first digits are enough."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@add_cache_options
def clear(folder: Path, prefix: str | None, yes: bool, as_json: bool) -> int:
    """Delete the entries of all models, or of one."""
    from mlxrun.engine.prefix_cache.cache_folder import delete_files, list_file_sizes

    models = _choose_models(folder, prefix)
    files = [(path, size) for model in models for path, size in list_file_sizes(model)]
    size = format_rounded(sum(size for _, size in files))
    entries, owners = _count(len(files), "entry", "entries"), _count(len(models), "model", "models")
    what = f"{entries} ({size}) of {owners} in {folder}"
    if files and not yes and not confirm("delete", what):
        print_error("nothing was deleted")
        return 1
    deleted, freed, failed = delete_files(files)
    for model in models:
        model.remove_if_empty()
    if as_json:
        _print_json(path=str(folder), deleted=deleted, freed_bytes=freed, failed=failed)
    else:
        print_line(f"{folder}: {_count(deleted, 'entry', 'entries')} deleted, {format_rounded(freed)} freed")
    for line in failed:
        print_error(f"not deleted: {line}")
    return 1 if failed else 0


def _choose_models(folder: Path, prefix: str | None) -> list[ModelFolder]:
    from mlxrun.engine.prefix_cache.cache_folder import list_models

    found = list_models(folder)
    if prefix is None:
        return found
    found = [model for model in found if model.fingerprint.hex().startswith(prefix.lower())]
    if len(found) == 1 and prefix:
        return found
    if not found:
        raise ConfigError(f"--model {prefix}: {folder} has no such model; see `mlxrun cache ls`")
    names = ", ".join(model.fingerprint.hex()[:FINGERPRINT_DIGITS] for model in found)
    raise ConfigError(f"--model {prefix}: give more digits, as several models begin with these: {names}")


def _format_model(model: ModelInspection) -> str:
    name = model.folder.fingerprint.hex()[:FINGERPRINT_DIGITS]
    entries, tokens = _count(len(model.entries), "entry", "entries"), _count(model.tokens, "token", "tokens")
    used = [_format_time(inspected.used) for inspected in model.entries]
    ages = f", used {used[0]} to {used[-1]}" if used else ""
    bad = f", {model.unreadable} unreadable" if model.unreadable else ""
    return f"  {name}  {entries}, {tokens}, {format_rounded(model.nbytes)}{ages}{bad}"


def _format_entry(inspected: InspectedEntry) -> str:
    entry = inspected.entry
    span = f"{entry.start}-{entry.stop}"
    note = "  evicted last" if entry.at_cache_position else ""
    return (
        f"    {entry.key.hex()}  {entry.kind:<5}  tokens {span:<15}  "
        f"{format_rounded(inspected.nbytes):>9}  {_format_time(inspected.used)}{note}"
    )


def _describe_model(model: ModelInspection, with_entries: bool) -> dict[str, Any]:
    described = {
        "fingerprint": model.folder.fingerprint.hex(),
        "entries": len(model.entries),
        "tokens": model.tokens,
        "bytes": model.nbytes,
        "unreadable": model.unreadable,
        "oldest_use": model.entries[0].used if model.entries else None,
        "newest_use": model.entries[-1].used if model.entries else None,
    }
    if with_entries:
        described["entry_list"] = [_describe_entry(inspected) for inspected in model.entries]
    return described


def _describe_entry(inspected: InspectedEntry) -> dict[str, Any]:
    entry = inspected.entry
    return {
        "key": entry.key.hex(),
        "parent": entry.parent.hex(),
        "kind": entry.kind.value,
        "start": entry.start,
        "stop": entry.stop,
        "boundary": entry.at_cache_position,
        "bytes": inspected.nbytes,
        "used": inspected.used,
    }


def _print_json(**report: Any) -> None:
    print_json({"format": FORMAT, **report})


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _format_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
