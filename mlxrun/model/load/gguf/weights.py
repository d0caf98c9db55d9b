"""Loads the weights of a GGUF file into the model of mlx-lm that its config describes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.gguf.architectures import ROPE_FACTORS, rename_tensor
from mlxrun.model.load.weight_check import load_checked_weights

GROUP_SIZE = 32  # of every quantised type that MLX reads


def load_gguf_model(path: Path, config: Mapping[str, Any]) -> tuple[nn.Module, tuple[str, ...]]:
    """The model, quantised where the file is, and the names of tensors that it does not use. ModelLoadError
    if weights are missing."""
    from mlx_lm.utils import _get_classes

    model_class, args_class = _get_classes(dict(config))
    model = model_class(args_class.from_dict(dict(config)))
    try:
        tensors = mx.load(str(path))
    except RuntimeError as error:
        raise ModelLoadError(f"{path}: the tensors cannot be read: {error}") from error
    factors = tensors.pop(ROPE_FACTORS, None)
    weights = {rename_tensor(name): tensor for name, tensor in tensors.items()}
    if factors is not None:
        _scale_rope(model, factors, config)
    _quantize(model, weights)
    return model, load_checked_weights(model, weights, path)


def _quantize(model: nn.Module, weights: Mapping[str, mx.array]) -> None:
    """Make quantised layers of those whose weights are; a file has several numbers of bits."""

    def choose(name: str, module: nn.Module) -> bool | dict[str, int]:
        scales = weights.get(f"{name}.scales")
        if scales is None or not hasattr(module, "to_quantized"):
            return False
        bits = weights[f"{name}.weight"].shape[-1] * 32 // (scales.shape[-1] * GROUP_SIZE)
        return {"group_size": GROUP_SIZE, "bits": bits}

    nn.quantize(model, group_size=GROUP_SIZE, bits=4, class_predicate=choose)


def _scale_rope(model: nn.Module, factors: mx.array, config: Mapping[str, Any]) -> None:
    """Give each layer the factors of its rotary periods that the file has, as Llama 3.1 does."""
    from mlx_lm.models.rope_utils import Llama3RoPE

    dims, base = config["head_dim"], config["rope_theta"]
    if factors.shape != (dims // 2,):
        raise ModelLoadError(f"{ROPE_FACTORS} has the shape {factors.shape}, where {dims // 2} are needed")
    rope = Llama3RoPE(
        dims, config["max_position_embeddings"], config["rope_traditional"], base, {"factor": 1.0}
    )
    rope._freqs = base ** (mx.arange(0, dims, 2) / dims) * factors.astype(mx.float32)
    for layer in model.layers:
        if isinstance(layer.self_attn.rope, nn.RoPE):
            layer.self_attn.rope = rope
