"""Entries of the prefix cache as files, for tests."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

from mlxrun.core.step_plan import SerializedPayload, SerializedTensor, SnapshotKind
from mlxrun.engine.prefix_cache.cache_folder import ModelFolder
from mlxrun.engine.prefix_cache.entry import CacheEntry, compute_entry_key
from mlxrun.engine.prefix_cache.entry_file import encode_entry

ROOT, OTHER = bytes(range(16)), bytes(range(1, 17))


def make_entry(
    number: int, size: int = 64, kind: SnapshotKind = SnapshotKind.DELTA
) -> tuple[CacheEntry, SerializedPayload]:
    """Return an entry of four tokens and its payload; another number gives another content."""
    entry = CacheEntry(
        b"",
        ROOT,
        kind,
        8,
        12,
        array("q", [number, -1, 2**62, 0]),
        at_cache_position=kind is SnapshotKind.STATE,
    )
    entry.key = compute_entry_key(entry)
    data = random.Random(number).randbytes(size)
    tensors = {
        "0.keys": SerializedTensor("BF16", (1, 2, size // 4), data),
        "ids": SerializedTensor("U8", (3,), b"abc"),  # a codec may use any name
        "none": SerializedTensor("F32", (0, 4), b""),
    }
    return entry, SerializedPayload(tensors, {"kind": "kv", "digest": "ä"})


def write_entry(
    folder: Path, number: int = 1, root: bytes = ROOT, **options: Any
) -> tuple[CacheEntry, SerializedPayload, Path]:
    """Write an entry to disk; return it, its payload and its file."""
    entry, payload = make_entry(number, **options)
    model = ModelFolder(folder, root)
    model.write_file(entry.key, encode_entry(entry, payload, root))
    return entry, payload, model.locate_file(entry.key)
