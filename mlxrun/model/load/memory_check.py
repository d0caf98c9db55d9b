"""Refuses a model before it is loaded, where weights, the load check and the first rows cannot fit in memory.

The sum is an estimate from the headers of the weights. What is too little is found here, because the
libraries crash or wait for good if memory ends while they compute.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from mlxrun.config.settings import Config
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import ConfigError, ModelLoadError
from mlxrun.model.load.footprint import ACTIVATION_FACTOR, read_hidden_size
from mlxrun.model.load.load_progress import GROUP_BYTES
from mlxrun.model.load.loader import choose_dtype
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.load.tensor_files import read_folder_entries
from mlxrun.model.machine.device import get_memory_limit, uses_gpu
from mlxrun.model.machine.memory_limits import (
    MACHINE,
    MemoryLimit,
    count_reserved_bytes,
    explain_shortage,
    list_limits,
)

CHECK_TOKENS = 1024  # whose activations the load check and a first prompt may need at a time
_FLOATS = ("F64", "F32", "F16", "BF16")  # in safetensors and GGUF; others stay as they are


def check_memory(config: Config, *models: LoadedModelInfo) -> None:
    """ModelLoadError, with the sum, if these models cannot be loaded together: the target and its draft.
    ConfigError if the weights alone are more than `scheduler.memory_limit`."""
    itemsize = None if (dtype := choose_dtype(config.model)) is None else dtype.size
    weights = copied = work = rows = 0
    for info in models:
        sizes = [_count_bytes(each, itemsize) for each in _list_tensors(info)]
        weights += sum(loaded for _, loaded in sizes)
        # Those that are converted are in memory twice, a group at a time.
        converted = [own for own, loaded in sizes if own != loaded]
        copied = max(copied, min(sum(converted), max([GROUP_BYTES, *converted])))
        work += CHECK_TOKENS * read_hidden_size(info.config) * mx.float32.size * ACTIVATION_FACTOR
        rows += config.scheduler.max_running * _read_vocab_size(info) * mx.float32.size * 4
    if config.model.draft is None:  # else the sum names the draft's share, once both are loaded
        _check_setting(config.scheduler.memory_limit, weights)
    parts = {"weights": weights + copied, "load check": work, "first rows": rows}
    reserved = count_reserved_bytes(loaded=False)
    problem = explain_shortage(sum(parts.values()), _list_limits(config), reserved)
    if problem is not None:
        total = " + ".join(f"{name} {format_rounded(size)}" for name, size in parts.items())
        raise ModelLoadError(f"{models[-1].folder}: too little memory to load it: {total}{problem}")


def _check_setting(limit: int | None, weights: int) -> None:
    """What else has to fit in that limit is known exactly once the model is loaded."""
    if limit is not None and weights > limit:
        sizes = f"weights {format_rounded(weights)} > limit {format_rounded(limit)}"
        raise ConfigError(f"scheduler.memory_limit: {sizes}: no request can ever run")


def _list_limits(config: Config) -> list[MemoryLimit]:
    """The limits of this process and of its machine; on a GPU, that of the device. A limit in the config
    replaces what the machine has free."""
    if uses_gpu():
        total = get_memory_limit()
        return [MemoryLimit("the device", total, total)] if total else []
    given = config.scheduler.memory_limit is not None
    return [limit for limit in list_limits() if not (given and limit.name == MACHINE)]


def _list_tensors(info: LoadedModelInfo) -> Iterator[tuple[str, int]]:
    """The type and the bytes of each tensor of the model's files."""
    if info.gguf is not None:
        yield from ((tensor.type, tensor.nbytes) for tensor in info.gguf.tensors.values())
        return
    entries = read_folder_entries(info.folder).values()
    yield from ((entry.dtype, entry.stop - entry.start) for entry in entries)


def _count_bytes(tensor: tuple[str, int], itemsize: int | None) -> tuple[int, int]:
    """Bytes of a tensor in its file, and in memory as numbers of `itemsize` bytes; None: as in the file."""
    dtype, own = tensor
    if itemsize is None or dtype not in _FLOATS:
        return own, own
    size = {"F64": 8, "F32": 4}.get(dtype, 2)
    return own, own // size * itemsize


def _read_vocab_size(info: LoadedModelInfo) -> int:
    """The width of the logits; that of the tokenizer, if the config does not say."""
    parts = (info.config, info.config.get("text_config") or {})
    found = [part["vocab_size"] for part in parts if isinstance(part.get("vocab_size"), int)]
    return max([*found, 0 if info.tokenizer is None else len(info.tokenizer)])
