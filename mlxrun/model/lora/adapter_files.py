"""Reads LoRA and DoRA adapters with the libraries' own functions, and checks that they fit the model.

`apply_adapter` leaves the library's layers in the model, for one adapter that all answers use.
`read_adapters` takes the weights out of them again, for adapters of which each row of a forward has its own.
Whatever is wrong with an adapter is a ConfigError, which names the setting, and the folder or the file.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxrun.core.errors import ConfigError, is_out_of_memory
from mlxrun.model.hooks.adapted_layers import LayerWeights
from mlxrun.model.load.weight_check import is_float
from mlxrun.model.lora.adapter_config import read_adapter_config

log = logging.getLogger(__name__)

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
    """The model with the adapter of `model.adapter`, a folder, in the library's own layers. ConfigError if it
    cannot be loaded, if a tensor fits no parameter, is missing, or is not finite."""
    with _name_errors("model.adapter", path):
        return _apply_adapter(model, path, vision=vision)


def check_adapter_files(setting: str, path: str) -> None:
    """ConfigError, which names the setting, if this folder has no adapter that can be read."""
    with _name_errors(setting, path):
        read_adapter_config(Path(path))


@contextlib.contextmanager
def _name_errors(setting: str, path: str) -> Iterator[None]:
    """Errors about the adapter in this folder become ConfigErrors that name the setting."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RuntimeError,
        AttributeError,
        OverflowError,
    ) as error:
        if is_out_of_memory(error):  # which is no fault of the adapter
            raise
        text = f"{path}: the adapter cannot be loaded: {type(error).__name__}: {error}"
        raise ConfigError(f"{setting}: {text}") from error


def _apply_adapter(model: Any, path: str, *, vision: bool) -> Any:
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
    """ConfigError unless each tensor fits a parameter, and those of adapted layers are there and finite."""
    parameters = dict(tree_flatten(model.parameters()))
    wrong = [
        f"{name}: the model has no such parameter"
        if name not in parameters
        else f"{name}: {tensor.dtype} of shape {tensor.shape}, where the model has "
        f"{parameters[name].dtype} of shape {parameters[name].shape}"
        for name, tensor in sorted(tensors.items())
        if name not in parameters
        or tensor.shape != parameters[name].shape
        or is_float(tensor) != is_float(parameters[name])
    ]
    expected = {
        name for layer, module in _find_layers(model).items() for name in _name_tensors(layer, module)
    }
    wrong += [f"{name}: missing in the file" for name in sorted(expected - tensors.keys())]
    wrong = wrong or [
        f"{name}: it has numbers that are not finite" for name in _list_infinite(tensors, expected)
    ]
    if wrong:
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ConfigError(f"{path}: the adapter does not fit the model: {'; '.join(wrong[:SHOWN])}{more}")


def _list_infinite(tensors: Mapping[str, mx.array], names: Iterable[str]) -> list[str]:
    """Those of these tensors in which a number is NaN or infinite, sorted; their values are read."""
    return [name for name in sorted(names) if not mx.all(mx.isfinite(tensors[name])).item()]


def _find_layers(model: nn.Module) -> dict[str, Any]:
    """The adapted layers of a library by path."""
    return {path: module for path, module in model.named_modules() if type(module).__name__ in _LAYERS}


def _name_tensors(path: str, layer: Any) -> list[str]:
    _, a, b = _LAYERS[type(layer).__name__]
    return [f"{path}.{name}" for name in (a, b, "m") if name in layer]


def read_adapters(model: Any, paths: Mapping[str, str], *, vision: bool) -> list[dict[str, LayerWeights]]:
    """The weights of each adapter by the path of the layer that it adapts; the model stays as it is. `paths`:
    the folders by name. ConfigError names the adapter."""
    found = []
    for name, path in paths.items():
        with _name_errors(f"model.adapters: {name}", path):
            found.append(_read_adapter(model, path, vision=vision))
    return found


def _read_adapter(model: Any, path: str, *, vision: bool) -> dict[str, LayerWeights]:
    config = read_adapter_config(Path(path))
    if config.get("fine_tune_type") == "full":
        raise ConfigError(f"{path}: it replaces all weights; set model.adapter to use it alone")
    before = dict(model.named_modules())
    try:
        _apply_adapter(model, path, vision=vision)
        layers = _find_layers(model)
        _check_layers(model, before, layers, path, vision=vision)
        return {name: _take_weights(layer) for name, layer in layers.items()}
    finally:
        changed = [(p, before[p]) for p, m in model.named_modules() if p in before and before[p] is not m]
        model.update_modules(tree_unflatten(changed))


def _check_layers(
    model: Any, before: Mapping[str, Any], layers: Mapping[str, Any], path: str, *, vision: bool
) -> None:
    """ConfigError for what cannot be chosen row by row: other layers than the libraries' adapted ones, and
    layers of a vision model that are computed once for an image."""
    after = dict(model.named_modules())
    inside = tuple(f"{name}." for name in layers)
    for name, module in after.items():
        if before.get(name) is not module and name not in layers and not name.startswith(inside):
            raise ConfigError(
                f"{path}: {name} is a {type(module).__name__}, which only model.adapter can adapt"
            )
    for name, layer in layers.items():
        base, _, _ = _LAYERS[type(layer).__name__]
        if getattr(layer, base) is not before[name]:
            raise ConfigError(f"{path}: it changes the base layer {name}, which only model.adapter can do")
        if vision and (base == "embedding" or not name.startswith("language_model.")):
            raise ConfigError(
                f"{path}: it adapts {name}, which is computed for images too: of several adapters, each can "
                "adapt the layers of the language model only"
            )


def _take_weights(layer: Any) -> LayerWeights:
    _, a, b = _LAYERS[type(layer).__name__]
    return LayerWeights(layer[a], layer[b] * layer.scale, layer.get("m"))
