"""Compares the weights of a checkpoint with the parameters of the model that takes them.

Missing weights, and ones of another shape, are refused by name: the library would leave random numbers. So
are integers in place of floats. Weights without a parameter are left out if they cannot matter, such as a
drafting head, another tower or a computed buffer. They are refused if the model might need them: a bias or a
norm inside its layers means another architecture.

Before a library builds the model, config.json is compared with the headers of the weights. A library makes as
many layers as the config says, and uses `quantization` unchecked. Wrong numbers would take all memory, or
silently have no effect.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.tensor_files import read_folder_entries

log = logging.getLogger(__name__)

SHOWN = 3  # names in a message
# Buffers that libraries compute anew, and scales of caches that are not quantized here.
_BUFFERS = re.compile(
    r"(^|\.)(rotary_emb|rotary_pos_emb|rope)\.|(^|\.)(inv_freq|freqs_cis|masked_bias|position_ids|k_scale"
    r"|v_scale|num_batches_tracked|_extra_state)$"
)
# Parts beside the language model, and heads for other tasks; of these the model has no module at all.
_OTHER_PARTS = re.compile(
    r"mtp|nextn|eagle|medusa|draft|vision|visual|image|img|video|vit$|vpm|audio|speech|whisper|talker|token2wav"
    r"|tts|projector|connector|resampler|aligner|merger|score|classifier|value_head|v_head|reward"
)
# In the layer behind the last one of models that draft with it; without these, the config has too few layers.
_DRAFTING_LAYER = re.compile(r"(.*\.\d+)\.(eh_proj|enorm|hnorm|shared_head|nextn)\.")
_WRAPPERS = {"model", "language_model", "transformer", "backbone", "text_model", "llm", "thinker"}
# Of each layer there is at least one tensor. Parts that a checkpoint was left without may have more.
_LAYERS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers"}
_USUAL_LAYERS = 1000
# Others are the size of some tensor, or of a part of it, or count tensors. Packed tensors have up to 32
# values in a number, and some are stored in pieces.
_SIZES = {
    *("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim", "d_model"),
    *("n_embd", "n_head", "num_attention_heads", "num_key_value_heads", "num_experts", "n_routed_experts"),
    *("num_local_experts", "shared_expert_intermediate_size", "kv_lora_rank", "q_lora_rank"),
}
_MOST_TIMES = 64
_DEPTH = 4  # of configs of parts within each other
_BITS, _GROUPS = (1, 2, 3, 4, 5, 6, 8), (16, 32, 64, 128)
_MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
_LOADING = threading.Lock()  # a class is changed for all threads


def load_checked_weights(
    model: nn.Module, weights: Mapping[str, mx.array], path: Path, tied: bool = False
) -> tuple[str, ...]:
    """Give the model its weights. Returns the names of unused ones, sorted, and logs them. `tied`: the
    embedding is also the head, so a separate head is not used. ModelLoadError if a weight is missing, has
    another shape, or might be needed."""
    parameters = dict(tree_flatten(model.parameters()))
    unused = sorted(weights.keys() - parameters.keys())
    drafting = {found[1] for name in unused if (found := _DRAFTING_LAYER.match(name))}
    harmful = [name for name in unused if not _is_harmless(model, name, tied, drafting)]
    if harmful:
        raise ModelLoadError(
            f"{path}: the checkpoint has weights that are not in model {type(model).__module__}, "
            f"so its answers might be wrong: {_list_names(harmful)}"
        )
    missing = sorted(parameters.keys() - weights.keys())
    if missing:
        raise ModelLoadError(f"{path}: missing weights: {_list_names(missing)}")
    for name, parameter in parameters.items():
        if weights[name].shape != parameter.shape:
            raise ModelLoadError(
                f"{path}: {name} has the shape {weights[name].shape}, where the model has {parameter.shape}"
            )
        if is_float(parameter) != is_float(weights[name]):
            raise ModelLoadError(
                f"{path}: {name} is of type {weights[name].dtype}, where the model has {parameter.dtype}"
            )
    nn.Module.load_weights(model, [(name, weights[name]) for name in parameters])
    if unused:
        log.warning("%s: the model does not use %s", path, _list_names(unused))
    return tuple(unused)


def is_float(array: mx.array) -> bool:
    """Whether the array has floating-point numbers. Quantized weights and counts are integers."""
    return bool(mx.issubdtype(array.dtype, mx.floating))


@contextmanager
def check_loading(model_class: type[nn.Module], path: Path, tied: bool) -> Iterator[list[str]]:
    """Within the block, a model of this class takes its weights through `load_checked_weights`; the list gets
    the names of unused ones. The libraries build the model inside their load function, and either refuse all
    unknown weights or check none. One thread loads at a time."""
    unused: list[str] = []
    changed: Any = model_class

    def load(model: nn.Module, weights: Sequence[tuple[str, mx.array]], strict: bool = True) -> nn.Module:
        unused.extend(load_checked_weights(model, dict(weights), path, tied))
        return model

    with _LOADING:
        own = model_class.__dict__.get("load_weights")
        changed.load_weights = load
        try:
            yield unused
        finally:
            if own is None:
                del changed.load_weights
            else:
                changed.load_weights = own


def _is_harmless(model: nn.Module, name: str, tied: bool, drafting: set[str]) -> bool:
    """Whether the model computes the same without this weight."""
    if _BUFFERS.search(name):
        return True
    place: Any = model
    parts = name.split(".")
    for depth, part in enumerate(parts):
        if isinstance(place, list):
            if not part.isdigit() or int(part) >= len(place):
                return ".".join(parts[: depth + 1]) in drafting
            place = place[int(part)]
        elif isinstance(place, nn.Module) and part in place:
            place = place[part]
        else:
            is_outside = set(parts[:depth]) <= _WRAPPERS
            is_head = tied and part == "lm_head"
            return is_outside and (is_head or _OTHER_PARTS.search(part) is not None)
    return False


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{len(names)} ({', '.join(names[:SHOWN])}{more})" if len(names) > 1 else names[0]


def check_config(config: Mapping[str, Any], folder: Path) -> None:
    """ModelLoadError if config.json contradicts the weights in `folder`, or if their headers are damaged."""
    shapes = {name: entry.shape for name, entry in read_folder_entries(folder).items()}
    path = folder / "config.json"
    check_sizes(config, shapes, path)
    check_quantization(config, path)


def check_sizes(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """ModelLoadError if the config in `path` has more layers than there are tensors, or a size far beyond
    those of all tensors. `shapes`: of the tensors, by name."""
    count = len(shapes)
    largest = max([count, *(size for shape in shapes.values() for size in shape)])
    for key, name, value in _list_numbers(config):
        reason = ""
        if name in _LAYERS and value > max(count, _USUAL_LAYERS):
            reason = f"the weights are {count} tensors"
        if name in _SIZES and value > max(largest, _USUAL_LAYERS) * _MOST_TIMES:
            reason = f"no tensor of the weights has a dimension beyond {largest}"
        if reason:
            raise ModelLoadError(f"{path}: {key} is {_show(value)}, but {reason}")


def check_quantization(config: Mapping[str, Any], path: Path) -> None:
    """ModelLoadError if `quantization` in the config at `path` is one that MLX cannot compute."""
    for key in ("quantization", "quantization_config"):
        found = config.get(key)
        is_other = key == "quantization_config" and isinstance(found, Mapping) and "quant_method" in found
        if found is None or is_other:
            continue  # formats of others, which have their own numbers
        if not isinstance(found, Mapping):
            raise ModelLoadError(f"{path}: {key} is {found!r:.60}, which is not an object")
        _check_numbers(found, path, key)
        for name, own in found.items():
            if isinstance(own, Mapping):
                _check_numbers(own, path, f"{key}: {name!s:.100}")


def _check_numbers(found: Mapping[str, Any], path: Path, key: str) -> None:
    for name, allowed in (("bits", _BITS), ("group_size", _GROUPS), ("mode", _MODES)):
        value = found.get(name, allowed[0])
        if type(value) is not type(allowed[0]) or value not in allowed:
            expected = ", ".join(map(str, allowed))
            raise ModelLoadError(f"{path}: {key}: {name} is {_show(value)}, where MLX has {expected}")


def _list_numbers(
    config: Mapping[str, Any], place: str = "", depth: int = _DEPTH
) -> Iterator[tuple[str, str, int]]:
    """The path, the name and the value of each integer of the config and of the configs of its parts."""
    for name, value in config.items():
        if type(value) is int:
            yield place + name, name, value
        elif isinstance(value, Mapping) and depth:
            yield from _list_numbers(value, f"{place}{name}.", depth - 1)


def _show(value: Any) -> str:
    """The value as a message has it: a number of a million digits cannot even be written."""
    is_huge = type(value) is int and abs(value) >= 1 << 64
    return f"a number of {value.bit_length()} bits" if is_huge else f"{value!r:.60}"
