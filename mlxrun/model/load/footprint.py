"""The memory that a model and its rows take on this device, for the scheduler's admission.

A model is refused before it is loaded if weights, load check and first rows cannot fit in memory. That sum is
an estimate from the headers of the weights. A shortage must be found here, because the libraries crash or
wait forever if memory ends while they compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxrun.config.media_settings import get_feature_bytes, get_image_bytes
from mlxrun.config.settings import CacheSettings, Config, SchedulerSettings
from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import ConfigError, ModelLoadError
from mlxrun.core.memory_budget import Footprint, MemoryBudget
from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.kv.ragged.layer_caches import LayerKind
from mlxrun.model.kv.ragged.quantized_buffer import GROUP_SIZES, KVQuantization
from mlxrun.model.kv.ragged.row_group import BUFFER_STEP
from mlxrun.model.load.load_progress import GROUP_BYTES
from mlxrun.model.load.loader import choose_dtype
from mlxrun.model.load.model_files import find_hidden_size, find_text_config
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

# Activations of one prompt token, in units of the hidden size: attention and MLP of one layer.
ACTIVATION_FACTOR = 24
# Padding to a group's longest row, and spare rows and tokens: measured 1.25 to 1.7 for rows of 300
# tokens and more, up to 3.6 where most are far shorter than 256.
PADDING_FACTOR = 1.5
CHECK_TOKENS = 1024  # whose activations the load check and a first prompt may need at a time
# Bytes of floats in safetensors; other numbers stay as they are.
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_FLOAT8 = {"F8_E4M3": 1}  # see _makes_floats
_EMBEDDINGS = (
    *("embed_tokens", "tok_embeddings", "token_embeddings", "word_embeddings", "wte", "embed_in"),
    *("embedding", "embeddings", "embed"),
)


def choose_quantization(settings: CacheSettings, cache: Sequence[Any]) -> KVQuantization | None:
    """The quantization that `cache.kv_bits` means for a model; None if it is not set. `cache`: caches [1,
    ...] that hold a few tokens. ConfigError if no layer keeps all tokens, or if no group size divides the
    head sizes."""
    bits, group_size = settings.kv_bits, settings.kv_group_size
    if bits is None:
        return None
    keyed = [x for x in layer_caches.flatten_caches(cache) if layer_caches.get_kind(x) is LayerKind.KV]
    heads = sorted({array.shape[-1] for layer in keyed for array in (layer.keys, layer.values)})
    problem = "no layer of it keeps the keys of all tokens"
    if heads:
        for size in (group_size,) if group_size else GROUP_SIZES:
            if all(head % size == 0 for head in heads):
                return KVQuantization(bits, size, settings.kv_start)
        found = " and ".join(map(str, heads))
        problem = f"its heads of {found} values do not divide into groups of {group_size or GROUP_SIZES[-1]}"
    raise ConfigError(f"cache.kv_bits: {bits} is not possible for this model: {problem}")


def measure_footprint(
    cache: Sequence[Any], quantization: KVQuantization | None = None, padding: float = PADDING_FACTOR
) -> Footprint:
    """Bytes of a row in the decode batch. `cache`: caches [1, ...] that hold a few tokens; `padding`: the
    factor of keys and values, 1: without what buffers have to spare."""
    per_token, packed, fixed, windows = 0, 0, 0, []
    for layer in layer_caches.flatten_caches(cache):
        if layer_caches.get_kind(layer) not in layer_caches.KEYED:
            fixed += sum(a.nbytes for a in layer_caches.list_arrays(layer))
            continue
        if layer.keys is None:  # the model never fills it
            continue
        window = layer_caches.get_window(layer)
        size = sum(a.shape[1] * a.shape[3] * a.itemsize for a in (layer.keys, layer.values))
        if window is None:
            per_token += size
            packed += sum(_count_packed_bytes(a, quantization) for a in (layer.keys, layer.values))
        else:
            windows.append((window, int(size * padding)))
    full = int(per_token * padding)
    if quantization is None:
        return Footprint(full, fixed, tuple(windows), BUFFER_STEP)
    packed = int(packed * padding)
    return Footprint(full, fixed, tuple(windows), BUFFER_STEP, packed, quantization.start)


def _count_packed_bytes(array: mx.array, quantization: KVQuantization | None) -> int:
    """Bytes of a token in [1, H, n, D], in packed form if there is one."""
    heads, values = array.shape[1], array.shape[1] * array.shape[3]
    if quantization is None:
        return int(values * array.itemsize)
    scales = 2 * array.itemsize * (array.shape[3] // quantization.group_size)
    return int(values * quantization.bits // 8 + heads * scales)


def read_hidden_size(config: Mapping[str, Any]) -> int:
    """The hidden size of the model with this config; 4096 if the config does not say."""
    found = find_hidden_size(config)
    return 4096 if found is None else found


def count_weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters of a model."""
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def make_encoder_budget(settings: SchedulerSettings, hidden: int, weights: int) -> MemoryBudget:
    """The memory budget of a model that only gives vectors, whose texts have no caches. `hidden`: width of
    the model; `weights`: its bytes."""
    return MemoryBudget(_get_limit(settings), weights, hidden * mx.float32.size * ACTIVATION_FACTOR)


def _get_limit(settings: SchedulerSettings) -> int:
    """Bytes that may be used, without the headroom; 0 if the device does not say."""
    given = settings.memory_limit or get_memory_limit()
    return max(1, int(given * (1 - settings.memory_headroom))) if given else 0


def make_memory_budget(
    config: Config,
    info: LoadedModelInfo,
    model: nn.Module,
    cache: Sequence[Any],
    vocab: int,
    beside: int = 0,
    quantization: KVQuantization | None = None,
) -> MemoryBudget:
    """The memory budget that admission checks, with space for decoded images and their features if the model
    takes them. `vocab`: width of its logits; `beside`: bytes that count as weights, such as a draft model."""
    scheduler = config.scheduler
    images = features = 0
    if info.vision:
        images = get_image_bytes(config.media.memory_bytes, scheduler.memory_limit)
        features = get_feature_bytes(config.cache.image_bytes, scheduler.memory_limit)
    itemsize = max((a.itemsize for a in layer_caches.list_all_arrays(cache)), default=4)
    logits = scheduler.max_running * vocab * 4 * 4
    return MemoryBudget(
        limit=_get_limit(scheduler),
        weights=count_weight_bytes(model) + logits + beside + images + features,
        images=images,
        features=features,
        transient=read_hidden_size(info.config) * itemsize * ACTIVATION_FACTOR,
        footprint=measure_footprint(cache, quantization),
    )


def count_token_embeddings(model: nn.Module, logits: int = 0) -> int:
    """The number of rows of the largest table of token embeddings, at least `logits`, the width of the
    logits. 0 if unknown.

    A tokenizer may have more tokens, such as added special ones. MLX reads beyond the end of an array without
    an error, so such a token would get an arbitrary embedding.
    """
    tables = {
        name: array.shape[0]
        for name, array in tree_flatten(model.parameters())
        if array.ndim == 2 and name.endswith(".weight") and name.split(".")[-2] in _EMBEDDINGS
    }
    return max(logits, *tables.values(), 0) if tables else 0


def check_memory(config: Config, *models: LoadedModelInfo) -> None:
    """ModelLoadError, with the sum, if these models (a target and its draft) cannot be loaded together.
    ConfigError if the weights alone exceed `scheduler.memory_limit`."""
    itemsize = None if (dtype := choose_dtype(config.model)) is None else dtype.size
    weights = copied = work = rows = 0
    for info in models:
        sizes = list(list_tensor_bytes(info, itemsize))
        weights += sum(loaded for _, loaded in sizes)
        # Those that are converted are in memory twice, a group at a time.
        converted = [own for own, loaded in sizes if own != loaded]
        copied = max(copied, min(sum(converted), max([GROUP_BYTES, *converted])))
        work += CHECK_TOKENS * read_hidden_size(info.config) * mx.float32.size * ACTIVATION_FACTOR
        rows += config.scheduler.max_running * _read_vocab_size(info) * mx.float32.size * 4
    limit = config.scheduler.memory_limit
    # What else has to fit in that limit is known exactly once the model is loaded, and a draft's share too.
    if config.model.draft is None and limit is not None and weights > limit:
        text = f"weights {format_rounded(weights)} > limit {format_rounded(limit)}"
        raise ConfigError(f"scheduler.memory_limit: {text}: no request can ever run")
    parts = {"weights": weights + copied, "load check": work, "first rows": rows}
    reserved = count_reserved_bytes(loaded=False)
    problem = explain_shortage(sum(parts.values()), _list_limits(config), reserved)
    if problem is not None:
        total = " + ".join(f"{name} {format_rounded(size)}" for name, size in parts.items())
        raise ModelLoadError(f"{models[-1].folder}: too little memory to load it: {total}{problem}")


def _list_limits(config: Config) -> list[MemoryLimit]:
    """The limits of this process and of its machine; on a GPU, that of the device. A limit in the config
    replaces what the machine has free."""
    if uses_gpu():
        total = get_memory_limit()
        return [MemoryLimit("the device", total, total)] if total else []
    given = config.scheduler.memory_limit is not None
    return [limit for limit in list_limits() if not (given and limit.name == MACHINE)]


def list_tensor_bytes(info: LoadedModelInfo, itemsize: int | None) -> Iterator[tuple[int, int]]:
    """Bytes of each tensor as MLX loads it from the model's files, and in memory as numbers of `itemsize`
    bytes; None: as they are loaded."""
    if info.gguf is not None:
        for tensor in info.gguf.tensors.values():
            yield tensor.count_loaded_bytes(None), tensor.count_loaded_bytes(itemsize)
        return
    floats = _FLOATS | (_FLOAT8 if _makes_floats(info) else {})
    for entry in read_folder_entries(info.folder).values():
        own, size = entry.stop - entry.start, floats.get(entry.dtype)
        yield own, own if size is None else own // size * (itemsize or max(size, 2))


def _makes_floats(info: LoadedModelInfo) -> bool:
    """Whether the library surely makes bfloat16 of a checkpoint's numbers of 8 bits. Some families make MLX's
    own blocks of those whose scales are powers of 2, or of few numbers."""
    found = info.config.get("quantization_config")
    if not isinstance(found, Mapping) or found.get("quant_method") != "fp8":
        return False
    has_blocks = "quantization" in info.config or found.get("scale_fmt") == "ue8m0"
    return not has_blocks and found.get("weight_block_size") in (None, [128, 128])


def _read_vocab_size(info: LoadedModelInfo) -> int:
    """The width of the logits; that of the tokenizer, if the config does not say."""
    parts = (info.config, find_text_config(info.config))
    found = [part["vocab_size"] for part in parts if isinstance(part.get("vocab_size"), int)]
    return max([*found, 0 if info.tokenizer is None else len(info.tokenizer)])
