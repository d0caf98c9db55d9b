"""Compares config.json with the headers of the weights, before a library builds the model that it describes.

A library makes as many layers as the config says, and takes `quantization` as it is: numbers that the weights
cannot have would take all memory, or would have no effect without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.tensor_files import read_folder_entries

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


def check_config(config: Mapping[str, Any], folder: Path) -> None:
    """ModelLoadError if config.json says what the weights in `folder` cannot have, or if their headers are
    damaged."""
    shapes = {name: entry.shape for name, entry in read_folder_entries(folder).items()}
    path = folder / "config.json"
    check_sizes(config, shapes, path)
    check_quantization(config, path)


def check_sizes(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """ModelLoadError if the config in `path` has more layers than there are tensors, or a size far beyond
    those of all tensors. `shapes`: theirs, by name."""
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
    """ModelLoadError unless `quantization` in `path` is what MLX can compute, where config.json has it."""
    for key in ("quantization", "quantization_config"):
        found = config.get(key)
        if found is None or (key == "quantization_config" and _names_method(found)):
            continue  # formats of others, which have their own numbers
        if not isinstance(found, Mapping):
            raise ModelLoadError(f"{path}: {key} is {found!r:.60}, which is not an object")
        _check_numbers(found, path, key)
        for name, own in found.items():
            if isinstance(own, Mapping):
                _check_numbers(own, path, f"{key}: {name!s:.100}")


def _names_method(found: Any) -> bool:
    return isinstance(found, Mapping) and "quant_method" in found


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
