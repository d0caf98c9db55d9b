"""`mlxrun cache`: what the prefix cache keeps on disk. Looks into files only: no model, no mlx."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mlxrun.cli.options import config_options

if TYPE_CHECKING:
    from mlxrun.cache.cache_folder import ModelFolder
    from mlxrun.cache.inspection import InspectedEntry, ModelInspection

FORMAT = 1
FINGERPRINT_SHOWN = 16

NOTE = """\b
The folder is, in this order: --path, cache.disk_path of the config, ~/.cache/mlxrun/prefixes (macOS:
~/Library/Caches); -c and --set as `mlxrun serve` has them lead to what it keeps, if its cache.backend is
disk. A batch job keeps its own in X.out.jsonl.run/cache.
"""


@click.group()
def command() -> None:
    """List, check and delete the prefixes that are kept on disk."""


def cache_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options of all three: `folder` and `as_json`, besides those of the config."""
    path = click.option(
        "--path",
        "folder",
        type=click.Path(path_type=Path, exists=True, file_okay=False),
        metavar="FOLDER",
        help="Look here, whatever the config says.",
    )
    as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    return path(as_json(config_options(function)))


@command.command(
    epilog=f"""\b
Examples:
  mlxrun cache ls                           one line a model
  mlxrun cache ls --records                 under it one line a record
  mlxrun cache ls -c prod.yaml              what `mlxrun serve -c prod.yaml` keeps
  mlxrun cache ls --set cache.disk_path=/data/prefixes
  mlxrun cache ls --path big.out.jsonl.run/cache

{NOTE}"""
)
@click.option("--records", "show_records", is_flag=True, help="One line a record too, oldest use first.")
@cache_options
def ls(
    show_records: bool, folder: Path | None, as_json: bool, config_path: Path | None, sets: tuple[str, ...]
) -> None:
    """Show what is kept, for which models, and when it was last used.

    The fingerprint is of the weights, the adapter, the libraries, and how prefixes are computed and stored.
    Tokens are those whose keys and values are kept, or that states cover if the model has no other.
    """
    from mlxrun.cache.inspection import inspect_models

    where = _folder(folder, config_path, sets)
    models = list(inspect_models(where))
    if as_json:
        _print_json(path=str(where), models=[_model_json(model, show_records) for model in models])
        return
    if not models:
        click.echo(f"{where}: nothing is kept here")
        click.echo("`mlxrun serve` keeps prefixes on disk only with cache.backend: disk", err=True)
        return
    click.echo(f"{where}:")
    for model in models:
        click.echo(_model_line(model))
        for seen in model.entries if show_records else ():
            click.echo(_record_line(seen))
    if any(model.unreadable for model in models):
        click.echo("`mlxrun cache verify` says what is wrong with the unreadable files", err=True)


@command.command(
    epilog=f"""\b
Examples:
  mlxrun cache verify                       every byte of every record
  mlxrun cache verify --delete              and remove those that are bad

{NOTE}
Exit code 0, or 1 if a file is bad, also if it was deleted. Bad files do no harm: they are not used, and
deleted when they are met.
"""
)
@click.option("--delete", is_flag=True, help="Delete the bad files.")
@cache_options
def verify(
    delete: bool, folder: Path | None, as_json: bool, config_path: Path | None, sets: tuple[str, ...]
) -> int:
    """Check every byte of what is kept.

    Each file's checksum, and whether its header says nothing wrong.
    """
    from mlxrun.cache import inspection

    where = _folder(folder, config_path, sets)
    good, bad = inspection.verify_files(where, delete)
    if as_json:
        rows = [{"path": str(path), "reason": reason} for path, reason in bad]
        _print_json(path=str(where), good=good, bad=rows, deleted=delete)
    else:
        for path, reason in bad:
            click.echo(f"{path}: {reason}")
        fate = "; --delete removes them" if bad and not delete else ""
        click.echo(f"{where}: {_count(good, 'good record')}, {len(bad)} bad{fate}")
    return 1 if bad else 0


@command.command(
    epilog=f"""\b
Examples:
  mlxrun cache clear                        asks, then deletes what is kept for all models
  mlxrun cache clear --model 3fa9 --yes     one model's, by the first digits that `mlxrun cache ls` shows

{NOTE}
Only record files are deleted. It may be done while mlxrun runs: what is gone is computed again.
"""
)
@click.option(
    "--model", "prefix", metavar="FINGERPRINT", help="Only this model's; its first digits are enough."
)
@click.option("--yes", is_flag=True, help="Do not ask.")
@cache_options
def clear(
    prefix: str | None,
    yes: bool,
    folder: Path | None,
    as_json: bool,
    config_path: Path | None,
    sets: tuple[str, ...],
) -> int:
    """Delete what is kept, for all models or for one."""
    from mlxrun.cache import inspection

    where = _folder(folder, config_path, sets)
    models = _chosen(where, prefix)
    files = [(path, size) for model in models for path, size in inspection.list_file_sizes(model)]
    total = sum(size for _, size in files)
    what = f"{_count(len(files), 'record')} ({_size(total)}) of {_count(len(models), 'model')} in {where}"
    if files and not yes and not _agreed(what):
        click.echo("nothing was deleted", err=True)
        return 1
    deleted, freed, stuck = inspection.delete_files(files)
    for model in models:
        model.remove_if_empty()
    if as_json:
        _print_json(path=str(where), deleted=deleted, freed_bytes=freed, failed=stuck)
    else:
        click.echo(f"{where}: {_count(deleted, 'record')} deleted, {_size(freed)} freed")
    for line in stuck:
        click.echo(f"not deleted: {line}", err=True)
    return 1 if stuck else 0


def _folder(given: Path | None, config_path: Path | None, sets: Sequence[str]) -> Path:
    from mlxrun.cache.cache_folder import resolve_cache_folder
    from mlxrun.cli.options import load

    # Whether a run with this config would write there does not matter: a folder may be left from another.
    config = load(config_path, ("cache.backend=disk", *sets)).config
    return given if given is not None else resolve_cache_folder(config.cache.disk_path)


def _chosen(folder: Path, prefix: str | None) -> list[ModelFolder]:
    from mlxrun.cache.cache_folder import list_models
    from mlxrun.errors import ConfigError

    found = list_models(folder)
    if prefix is None:
        return found
    found = [model for model in found if model.fingerprint.hex().startswith(prefix.lower())]
    if len(found) == 1 and prefix:
        return found
    if not found:
        raise ConfigError(f"--model {prefix}: {folder} has no such model; see `mlxrun cache ls`")
    names = ", ".join(model.fingerprint.hex()[:FINGERPRINT_SHOWN] for model in found)
    raise ConfigError(f"--model {prefix}: give more digits, several models begin so: {names}")


def _agreed(what: str) -> bool:
    if not _can_ask():
        raise click.UsageError(f"would delete {what}; give --yes, there is no terminal to ask on")
    return click.confirm(f"Delete {what}?", err=True)


def _can_ask() -> bool:
    return sys.stdin.isatty()


def _model_line(model: ModelInspection) -> str:
    name = model.folder.fingerprint.hex()[:FINGERPRINT_SHOWN]
    counts = f"{_count(len(model.entries), 'record')}, {_count(model.tokens, 'token')}, {_size(model.nbytes)}"
    ages = (
        f", used {_time(model.entries[0].used)} to {_time(model.entries[-1].used)}" if model.entries else ""
    )
    bad = f", {model.unreadable} unreadable" if model.unreadable else ""
    return f"  {name}  {counts}{ages}{bad}"


def _record_line(seen: InspectedEntry) -> str:
    record = seen.entry
    span = f"{record.start}-{record.stop}"
    kept = "  kept longest" if record.boundary else ""
    return (
        f"    {record.key.hex()}  {record.kind:<5}  tokens {span:<15}  "
        f"{_size(seen.nbytes):>9}  {_time(seen.used)}{kept}"
    )


def _model_json(model: ModelInspection, records: bool) -> dict[str, Any]:
    found = {
        "fingerprint": model.folder.fingerprint.hex(),
        "records": len(model.entries),
        "tokens": model.tokens,
        "bytes": model.nbytes,
        "unreadable": model.unreadable,
        "oldest_use": model.entries[0].used if model.entries else None,
        "newest_use": model.entries[-1].used if model.entries else None,
    }
    return found | ({"record_list": [_record_json(seen) for seen in model.entries]} if records else {})


def _record_json(seen: InspectedEntry) -> dict[str, Any]:
    record = seen.entry
    return {
        "key": record.key.hex(),
        "parent": record.parent.hex(),
        "part": record.kind.value,
        "start": record.start,
        "stop": record.stop,
        "boundary": record.boundary,
        "bytes": seen.nbytes,
        "used": seen.used,
    }


def _print_json(**found: Any) -> None:
    click.echo(json.dumps({"format": FORMAT, **found}, indent=2, ensure_ascii=False))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _size(nbytes: int) -> str:
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if nbytes >= 1000**power:
            return f"{nbytes / 1000**power:.1f} {unit}"
    return f"{nbytes} B"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
