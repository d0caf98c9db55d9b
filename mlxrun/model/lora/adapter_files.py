"""Reads LoRA and DoRA adapters with the libraries' own functions, and checks that they fit the model.

`apply_adapter` leaves the library's layers in the model, for one adapter that all answers use.
`read_adapters` takes the weights out of them again, for adapters of which each row of a forward has its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxrun.errors import ModelLoadError
from mlxrun.model.lora.adapted_layers import LayerWeights

log = logging.getLogger(__name__)

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
SHOWN = 3  # names in a message
# The libraries' layers: where the base layer is, and the names of the two matrices.
_LAYERS = {
    "LoRALinear": ("linear", "lora_a", "lora_b"),
    "DoRALinear": ("linear", "lora_a", "lora_b"),
    "LoRASwitchLinear": ("linear", "lora_a", "lora_b"),
    "LoRAEmbedding": ("embedding", "lora_a", "lora_b"),
    "DoRAEmbedding": ("embedding", "lora_a", "lora_b"),
    "LoRaLayer": ("original_layer", "A", "B"),  # of mlx-vlm's older training
}


def apply_adapter(model: Any, path: str, *, vision: bool) -> Any:
    """The model with the adapter in this folder, in the library's own layers. ModelLoadError if a tensor fits
    no parameter or is missing; the library's own errors else."""
    load_weights = model.load_weights

    def load_checked(source: Any, strict: bool = True) -> Any:
        weights = list(mx.load(source).items()) if isinstance(source, str) else source
        _check_weights(model, dict(weights), path)
        return load_weights(weights, strict=strict)

    model.load_weights = load_checked
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:  # the library prints what it did
            if vision:
                from mlx_vlm.utils import apply_lora_layers

                apply_lora_layers(model, path)
            else:
                from mlx_lm.utils import load_adapters

                load_adapters(model, path)
    finally:
        del model.load_weights
    for line in output.getvalue().splitlines():
        log.info("%s: %s", path, line)
    return model


def _check_weights(model: nn.Module, tensors: Mapping[str, mx.array], path: str) -> None:
    """ModelLoadError unless each tensor fits a parameter and none of an adapted layer is missing."""
    parameters = dict(tree_flatten(model.parameters()))
    wrong = [
        f"{name}: the model has no such parameter"
        if name not in parameters
        else f"{name}: of shape {tensor.shape}, where the model has {parameters[name].shape}"
        for name, tensor in sorted(tensors.items())
        if name not in parameters or tensor.shape != parameters[name].shape
    ]
    expected = {
        name for layer, module in _find_layers(model).items() for name in _name_tensors(layer, module)
    }
    wrong += [f"{name}: missing in the file" for name in sorted(expected - tensors.keys())]
    if wrong:
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ModelLoadError(f"{path}: the adapter does not fit the model: {'; '.join(wrong[:SHOWN])}{more}")


def _find_layers(model: nn.Module) -> dict[str, Any]:
    """The adapted layers of a library by path."""
    return {path: module for path, module in model.named_modules() if type(module).__name__ in _LAYERS}


def _name_tensors(path: str, layer: Any) -> list[str]:
    _, a, b = _LAYERS[type(layer).__name__]
    return [f"{path}.{name}" for name in (a, b, "m") if name in layer]


def read_adapters(model: Any, paths: Mapping[str, str], *, vision: bool) -> list[dict[str, LayerWeights]]:
    """The weights of each adapter by the path of the layer that it adapts; the model stays as it is. `paths`:
    the folders by name. ModelLoadError names the adapter."""
    found = []
    for name, path in paths.items():
        try:
            found.append(_read_adapter(model, path, vision=vision))
        except ModelLoadError as error:
            raise ModelLoadError(f"model.adapters: {name}: {error}") from error
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
            text = f"the adapter cannot be loaded: {type(error).__name__}: {error}"
            raise ModelLoadError(f"model.adapters: {name}: {text}") from error
    return found


def _read_adapter(model: Any, path: str, *, vision: bool) -> dict[str, LayerWeights]:
    config = read_adapter_config(Path(path))
    if config.get("fine_tune_type") == "full":
        raise ModelLoadError(f"{path}: it replaces all weights; set model.adapter to use it alone")
    before = dict(model.named_modules())
    try:
        apply_adapter(model, path, vision=vision)
        layers = _find_layers(model)
        _check_layers(model, before, layers, path, vision=vision)
        return {name: _take_weights(layer) for name, layer in layers.items()}
    finally:
        changed = [(p, before[p]) for p, m in model.named_modules() if p in before and before[p] is not m]
        model.update_modules(tree_unflatten(changed))


def _check_layers(
    model: Any, before: Mapping[str, Any], layers: Mapping[str, Any], path: str, *, vision: bool
) -> None:
    """ModelLoadError for what cannot be chosen row by row: other layers than the libraries' adapted ones, and
    layers of a vision model that are computed once for an image."""
    after = dict(model.named_modules())
    inside = tuple(f"{name}." for name in layers)
    for name, module in after.items():
        if before.get(name) is not module and name not in layers and not name.startswith(inside):
            raise ModelLoadError(
                f"{path}: {name} is a {type(module).__name__}, which only model.adapter can adapt"
            )
    for name, layer in layers.items():
        base, _, _ = _LAYERS[type(layer).__name__]
        if getattr(layer, base) is not before[name]:
            raise ModelLoadError(f"{path}: it changes the base layer {name}, which only model.adapter can do")
        if vision and (base == "embedding" or not name.startswith("language_model.")):
            raise ModelLoadError(
                f"{path}: it adapts {name}, which is computed for images too: of several adapters, each can "
                "adapt the layers of the language model only"
            )


def _take_weights(layer: Any) -> LayerWeights:
    _, a, b = _LAYERS[type(layer).__name__]
    return LayerWeights(layer[a], layer[b] * layer.scale, layer.get("m"))


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The config of the adapter in a folder. ModelLoadError if the folder has no adapter of MLX."""
    if not (folder / CONFIG).is_file():
        raise ModelLoadError(f"{folder} has no {CONFIG}, so it is not the folder of an adapter")
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{folder / CONFIG}: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{folder / CONFIG}: not a JSON object")
    if not list(folder.glob("*.safetensors")):
        raise ModelLoadError(f"{folder} has no {WEIGHTS}")
    if "peft_type" in config:
        raise ModelLoadError(f"{folder} is an adapter of PEFT, which mlx-lm does not read")
    return config
