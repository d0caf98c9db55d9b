"""Summarizes a model's files: sizes, number of parameters, quantization."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlxrun.core.model_summary import ModelSummary
from mlxrun.model.load.gguf.header import GgufHeader
from mlxrun.model.load.model_files import list_weight_files
from mlxrun.model.load.tensor_files import TensorEntry, read_folder_entries

SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size"),
)


def summarize_model(folder: Path, config: Mapping[str, Any], gguf: GgufHeader | None) -> ModelSummary:
    """Summarize a model of which `config` was read. The headers of its weights are read at the first call.
    ModelLoadError if they are damaged."""
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else {}
    sizes = {name: text.get(name, config.get(name)) for name in SIZES}
    quantization = config.get("quantization")
    packed = quantization if gguf is None and isinstance(quantization, Mapping) else {}
    if gguf is None:
        counts = _count_folder(folder, tuple(sorted(_read_group_sizes(packed).items())))
    else:
        counts = _count_values((each.type, math.prod(each.shape)) for each in gguf.tensors.values())
    stats = [file.stat() for file in list_weight_files(folder)]
    usual = max(counts, key=counts.__getitem__, default="")
    return ModelSummary(
        format="safetensors" if gguf is None else "gguf",
        family=str(config.get("model_type") or ""),
        quantization=f"{packed['bits']}bit" if "bits" in packed else usual,
        weight_bytes=sum(each.st_size for each in stats),
        num_parameters=counts.total(),
        modified=max((each.st_mtime for each in stats), default=0.0),
        sizes={name: value for name, value in sizes.items() if type(value) is int},
    )


def _read_group_sizes(quantization: Mapping[str, Any]) -> dict[str, int]:
    """The group sizes of layers by name; that of all others is under the empty name."""
    found = {"": quantization.get("group_size", 64)}
    for name, value in quantization.items():
        if isinstance(value, Mapping):
            found[name] = value.get("group_size", found[""])
    return found


@functools.lru_cache(maxsize=16)
def _count_folder(folder: Path, groups: tuple[tuple[str, int], ...]) -> Counter[str]:
    entries, sizes = read_folder_entries(folder), dict(groups)
    return _count_values(
        (entry.dtype, _count_parameters(name, entry, entries, sizes)) for name, entry in entries.items()
    )


def _count_values(tensors: Iterable[tuple[str, int]]) -> Counter[str]:
    """The parameters of each type."""
    counts: Counter[str] = Counter()
    for kind, count in tensors:
        counts[kind] += count
    return counts


def _count_parameters(
    name: str, entry: TensorEntry, entries: Mapping[str, TensorEntry], groups: Mapping[str, int]
) -> int:
    """The parameters of a tensor. Those of a quantized layer are counted at its scales."""
    layer, _, part = name.rpartition(".")
    if f"{layer}.scales" in entries and part in ("weight", "scales", "biases"):
        group = groups.get(layer, groups[""])
        return math.prod(entry.shape) * group if part == "scales" else 0
    return math.prod(entry.shape)
