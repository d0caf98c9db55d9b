"""A job's own prefix cache: a folder beside its journal while it runs, and what the manifest says of it."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxrun.batch.run_paths import Paths
from mlxrun.config.settings import Config
from mlxrun.scheduler.request import HitKind

log = logging.getLogger(__name__)
_SUMS = ("tokens", "evicted", "evicted_disk", "refused")
_LEVELS = ("memory_bytes", "disk_bytes")


def engine_config(config: Config, paths: Paths) -> Config:
    """`config` for the engine of a job: what it computes is kept on disk in the run folder, unless the user
    wants no cache or names a folder. In memory, if that folder cannot be written: a full disk stops no job.
    """
    cache = config.cache
    if cache.backend == "none" or (cache.backend == "disk" and cache.disk_path is not None):
        return config
    folder = paths.cache.absolute()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        log.warning("%s: cannot be written (%s); prefixes are kept in memory", folder, error.strerror)
        return replace(config, cache=replace(cache, backend="memory", disk_path=None))
    return replace(config, cache=replace(cache, backend="disk", disk_path=str(folder)))


def remove(folder: Path) -> None:
    """Delete a job's cache. What cannot be deleted does no harm: chunks are found by content."""
    if not folder.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        log.warning("%s: cannot be deleted; nothing needs it any more", folder)


def summary(counters: Mapping[str, int]) -> dict[str, Any]:
    """Counters of the engine's cache (cache/entry.py) as manifest.json and status.json hold them."""
    hits = {kind.value: counters.get(kind.value, 0) for kind in HitKind}
    return {"hits": hits, **{name: counters.get(name, 0) for name in (*_SUMS, *_LEVELS)}}


def flat(value: Any) -> dict[str, int]:
    """The counters in a summary; what is none counts as nothing."""
    found = value if isinstance(value, dict) else {}
    hits = found.get("hits")
    both = {**found, **(hits if isinstance(hits, dict) else {})}
    return {name: number for name, number in both.items() if isinstance(number, int)}


def total(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs together; of bytes the most that one had."""
    counters: dict[str, int] = {}
    for each in summaries:
        for name, number in flat(each).items():
            so_far = counters.get(name, 0)
            counters[name] = max(so_far, number) if name in _LEVELS else so_far + number
    return summary(counters)
