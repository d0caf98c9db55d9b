"""The prefix cache that a config asks for, made for one loaded model.

Its fingerprint is everything that a record depends on besides the tokens: a record of another model, another
library, another device or other cuts is never found.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict

from mlxrun.cache.cache_folder import cache_folder, check_folder
from mlxrun.cache.disk_tier import DiskTier
from mlxrun.cache.entry import CacheCounters, DiskTierInterface
from mlxrun.cache.prefix_cache import PrefixCache
from mlxrun.config.settings import Config
from mlxrun.errors import ConfigError
from mlxrun.model.doctor import backend
from mlxrun.model.machine.versions import library_versions
from mlxrun.model.model_info import LoadedModelInfo
from mlxrun.model.snapshot.snapshots import SnapshotCodec
from mlxrun.scheduler.memory_budget import MemoryBudget
from mlxrun.scheduler.prefix_cache_interface import NoPrefixCache, PrefixCacheInterface

log = logging.getLogger(__name__)

FORMAT = 1  # of records: another number makes all old ones misses
SHARE = 4  # of what weights leave of the memory, the default for the cache
UNKNOWN = 2_000_000_000  # bytes, where nobody says how much memory there is


def make_prefixes(
    config: Config, host: LoadedModelInfo, snapshots: SnapshotCodec, memory: MemoryBudget
) -> PrefixCacheInterface:
    """`config`: with the device's values filled in. ConfigError if the budget holds no chunk, or for a folder
    that cannot be written."""
    settings, chunk = config.cache, config.scheduler.chunk
    assert chunk is not None
    if settings.backend == "none":
        return NoPrefixCache()
    if not snapshots.supported:
        return NoPrefixCache()  # which Snapshots has said, with the reason
    size = _memory_bytes(config, snapshots, memory)
    if size is None:
        log.warning("the prefix cache is off: the memory that is left holds no chunk of %d tokens", chunk)
        return NoPrefixCache()
    root, counters = fingerprint(config, host, snapshots), CacheCounters()
    files: DiskTierInterface | None = None
    if settings.backend == "disk":
        folder = cache_folder(settings.disk_path)
        check_folder(folder)
        files = DiskTier(folder, root, counters=counters)
    return PrefixCache(
        root,
        chunk,
        deltas=snapshots.deltas,
        states=snapshots.states,
        codec=snapshots,
        settings=settings,
        memory_bytes=size,
        files=files,
        grid_only=config.engine.reproducible,
        counters=counters,
    )


def fingerprint(config: Config, host: LoadedModelInfo, snapshots: SnapshotCodec) -> bytes:
    """32 bytes: digest of all that decides what a record holds for given tokens."""
    parts = {
        "format": FORMAT,
        "model": host.digests["model"],
        "load": {key: asdict(config.model)[key] for key in ("kind", "dtype")},
        "layers": snapshots.describe(),
        "chunk": config.scheduler.chunk,
        "reproducible": config.engine.reproducible,
        "stored_bits": config.cache.stored_bits,
        "backend": backend(),
        "versions": {k: v for k, v in library_versions().items() if k.startswith("mlx")},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def _memory_bytes(config: Config, snapshots: SnapshotCodec, memory: MemoryBudget) -> int | None:
    """Bytes of the memory tier; None if by default there is no room for a single chunk."""
    assert config.scheduler.chunk is not None
    least = snapshots.least(config.scheduler.chunk)
    given = config.cache.memory_bytes
    if given is not None:
        if given < least:
            raise ConfigError(
                f"cache.memory_bytes: {given} bytes hold less than one chunk of {config.scheduler.chunk} "
                f"tokens ({least} bytes): give more, or lower scheduler.chunk, or set cache.backend: none"
            )
        return given
    size = (memory.limit - memory.weights) // SHARE if memory.limit else UNKNOWN
    return size if size >= least else None
