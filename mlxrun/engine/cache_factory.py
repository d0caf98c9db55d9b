"""The prefix cache that a config asks for, made for one loaded model.

Its fingerprint covers everything that an entry depends on besides the tokens: an entry of another model,
library, device or chunk size is never found.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict

from mlxrun.config.settings import Config
from mlxrun.core.errors import ConfigError
from mlxrun.core.memory_budget import MemoryBudget
from mlxrun.engine.prefix_cache.cache_folder import check_folder, resolve_cache_folder
from mlxrun.engine.prefix_cache.disk_tier import DiskTier
from mlxrun.engine.prefix_cache.entry import CacheCounters
from mlxrun.engine.prefix_cache.prefix_cache import PrefixCache
from mlxrun.engine.scheduler.prefix_cache_interface import NoPrefixCache, PrefixCacheInterface
from mlxrun.model.kv.snapshot.snapshots import SnapshotCodec
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.machine.device import get_backend
from mlxrun.model.machine.device_facts import describe_rounding
from mlxrun.model.machine.versions import list_library_versions

log = logging.getLogger(__name__)

FORMAT_VERSION = 1  # of entries: another number turns all old ones into misses
MEMORY_SHARE = 4  # default size of the cache: one in so many bytes of the memory beside the weights
FALLBACK_BYTES = 2_000_000_000  # default size if the amount of memory is unknown


def build_prefix_cache(
    config: Config, model_info: LoadedModelInfo, snapshots: SnapshotCodec, memory: MemoryBudget
) -> PrefixCacheInterface:
    """`config`: with the values of the device. ConfigError if the budget holds no chunk, or if the folder
    cannot be written."""
    settings, chunk = config.cache, config.scheduler.chunk
    assert chunk is not None
    if settings.backend == "none" or snapshots.problem is not None:
        return NoPrefixCache()  # SnapshotCodec has logged the reason
    size = _resolve_memory_bytes(config, snapshots, memory)
    if size is None:
        log.warning(
            "the prefix cache is off because the free memory is too small for one chunk of %d tokens", chunk
        )
        return NoPrefixCache()
    root, counters = compute_fingerprint(config, model_info, snapshots), CacheCounters()
    disk_tier: DiskTier | None = None
    if settings.backend == "disk":
        folder = resolve_cache_folder(settings.disk_path)
        check_folder(folder)
        disk_tier = DiskTier(folder, root, counters=counters)
    return PrefixCache(
        root,
        chunk,
        deltas=snapshots.has_deltas,
        states=snapshots.has_states,
        codec=snapshots,
        settings=settings,
        memory_bytes=size,
        disk_tier=disk_tier,
        grid_only=config.engine.reproducible,
        counters=counters,
    )


def compute_fingerprint(config: Config, model_info: LoadedModelInfo, snapshots: SnapshotCodec) -> bytes:
    """Return a digest (32 bytes) of all that decides what an entry holds for given tokens."""
    parts = {
        "format": FORMAT_VERSION,
        "model": model_info.digests["model"],
        "load": {key: asdict(config.model)[key] for key in ("kind", "dtype", "dequantize")},
        "layers": snapshots.describe(),
        "chunk": config.scheduler.chunk,
        "reproducible": config.engine.reproducible,
        "stored_bits": config.cache.stored_bits,
        "backend": get_backend(),
        "versions": {k: v for k, v in list_library_versions().items() if k.startswith("mlx")},
    }
    if config.engine.reproducible:  # a folder outlives processes, and may be copied to another machine
        parts["rounding"] = describe_rounding(config.engine)
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()


def _resolve_memory_bytes(config: Config, snapshots: SnapshotCodec, memory: MemoryBudget) -> int | None:
    """Bytes of the memory tier; None if the default size holds no chunk."""
    assert config.scheduler.chunk is not None
    least = snapshots.count_min_bytes(config.scheduler.chunk)
    given = config.cache.memory_bytes
    if given is not None:
        if given < least:
            raise ConfigError(
                f"cache.memory_bytes: {given} bytes hold less than one chunk of {config.scheduler.chunk} "
                f"tokens ({least} bytes): give more, or lower scheduler.chunk, or set cache.backend: none"
            )
        return given
    size = (memory.limit - memory.weights) // MEMORY_SHARE if memory.limit else FALLBACK_BYTES
    return size if size >= least else None
