"""The prefix cache of a job: a folder beside its journal while it runs, and counters for the manifest."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxrun.config.settings import Config
from mlxrun.core.request import HitKind

log = logging.getLogger(__name__)
_SUMS = ("tokens", "evicted", "evicted_disk", "refused")
_LEVELS = ("memory_bytes", "disk_bytes")


def lift_step_limit(config: Config) -> Config:
    """Return `config` for an engine without live users: a step may take any time, unless the user has limited
    it."""
    if config.scheduler.step_ms is not None:
        return config
    return replace(config, scheduler=replace(config.scheduler, step_ms=0))


def choose_engine_config(config: Config, folder: Path) -> Config:
    """Return `config` for the engine of a job. Its prefix cache is on disk in `folder`, unless the user wants
    no cache or names a folder. There it has checkpoints of long prompts: a short one is computed again in
    less time than its file takes. If `folder` cannot be written, the cache is in memory only. Steps may take
    any time."""
    config = lift_step_limit(config)
    cache = config.cache
    if cache.backend == "none" or (cache.backend == "disk" and cache.disk_path is not None):
        return config
    folder = folder.absolute()
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        log.warning("%s: cannot be written (%s); the prefix cache is in memory only", folder, error.strerror)
        return replace(config, cache=replace(cache, backend="memory", disk_path=None))
    cache = replace(cache, backend="disk", disk_path=str(folder), intervals_only=True)
    return replace(config, cache=cache)


def delete_cache(folder: Path) -> None:
    """Delete a job's cache. A cache that cannot be deleted does no harm, as entries are found by content."""
    if not folder.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        log.warning("%s: cannot be deleted; it is not needed any more", folder)


def summarize_counters(counters: Mapping[str, int]) -> dict[str, Any]:
    """Arrange the counters of the engine's cache (prefix_cache/entry.py) as manifest.json and status.json
    have them."""
    hits = {kind.value: counters.get(kind.value, 0) for kind in HitKind}
    return {"hits": hits, **{name: counters.get(name, 0) for name in (*_SUMS, *_LEVELS)}}


def flatten_summary(value: Any) -> dict[str, int]:
    """Return the counters in a summary. Values of other types are ignored."""
    found = value if isinstance(value, dict) else {}
    hits = found.get("hits")
    merged = {**found, **(hits if isinstance(hits, dict) else {})}
    return {name: number for name, number in merged.items() if isinstance(number, int)}


def add_summaries(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Add the summaries of several runs: sums of counts, the maximum of bytes."""
    counters: dict[str, int] = {}
    for each in summaries:
        for name, number in flatten_summary(each).items():
            so_far = counters.get(name, 0)
            counters[name] = max(so_far, number) if name in _LEVELS else so_far + number
    return summarize_counters(counters)
