"""LoRA and DoRA adapters: their configs and weights, read by the libraries' own functions.

`apply_adapter` leaves the library's layers in the model, for one adapter that all answers use.
`read_adapters` takes the weights out of them again, for adapters that differ by row. A fault in an adapter's
files is a ConfigError that names the setting and the folder or file. Values that would make libraries fail
later are refused.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from mlxrun.core.errors import ConfigError, ModelLoadError, is_out_of_memory
from mlxrun.core.field_errors import shorten
from mlxrun.core.limited_json import load_json
from mlxrun.core.text_files import read_text_file
from mlxrun.model.hooks.adapted_layers import LayerWeights
from mlxrun.model.load.tensor_files import read_entries
from mlxrun.model.load.weight_check import is_float

log = logging.getLogger(__name__)

SHOWN = 3  # names in a message
MOST_REASON = 300  # characters of a library's error
_LIBRARY_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError, OverflowError)
# The libraries' layers: where the base layer is, and the names of the two matrices.
_LAYERS = {
    "LoRALinear": ("linear", "lora_a", "lora_b"),
    "DoRALinear": ("linear", "lora_a", "lora_b"),
    "LoRASwitchLinear": ("linear", "lora_a", "lora_b"),
    "LoRAEmbedding": ("embedding", "lora_a", "lora_b"),
    "DoRAEmbedding": ("embedding", "lora_a", "lora_b"),
    "LoRaLayer": ("original_layer", "A", "B"),  # of mlx-vlm's older training
}
CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
OTHER_WEIGHTS = "weights.safetensors"  # mlx-vlm reads such a file too
_KINDS = ("lora", "dora", "full")  # what mlx-lm trains; it takes any other word for `lora`
_MOST = 2**31 - 1  # of a dimension of an array
_LARGEST = 3.4e38  # in float32


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) <= _MOST


def _is_finite(value: Any) -> bool:
    """Whether it is a number that a float can have."""
    return type(value) in (int, float) and abs(value) < _LARGEST


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_NEEDED = ("rank", "scale")  # null leaves others out
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("rank", lambda value: _is_integer(value) and value > 0, f"a whole number from 1 to {_MOST}"),
    ("scale", _is_finite, "a finite number"),
    ("alpha", _is_finite, "a finite number"),
    ("dropout", lambda value: _is_finite(value) and 0 <= value < 1, "a number from 0 to less than 1"),
    ("keys", _is_strings, "a list of strings"),
)


def apply_adapter(model: Any, path: str, *, vision: bool) -> Any:
    """The model with the adapter in the folder `path` (`model.adapter`), in the library's own layers.
    ConfigError if it cannot be loaded, or if a tensor fits no parameter, is missing, or is not finite."""
    with _name_errors("model.adapter", path):
        return _apply_adapter(model, path, vision=vision)


def check_adapter_files(setting: str, path: str) -> None:
    """ConfigError, which names the setting, if this folder has no readable adapter."""
    with _name_errors(setting, path):
        read_adapter_config(Path(path))


@contextlib.contextmanager
def _name_errors(setting: str, path: str) -> Iterator[None]:
    """Errors about the adapter in this folder become ConfigErrors that name the setting."""
    try:
        yield
    except (ConfigError, ModelLoadError) as error:
        raise ConfigError(f"{setting}: {error}") from error
    except _LIBRARY_ERRORS as error:
        if is_out_of_memory(error):  # which is no fault of the adapter
            raise
        reason = shorten(" ".join(str(error).split()), MOST_REASON)
        text = f"{path}: the adapter cannot be loaded: {type(error).__name__}: {reason}"
        raise ConfigError(f"{setting}: {text}") from error


def _apply_adapter(model: Any, path: str, *, vision: bool) -> Any:
    load_weights = model.load_weights
    config = read_adapter_config(Path(path))
    _check_needed(config, Path(path, CONFIG), vision=vision)
    rank = config.get("lora_parameters", config).get("rank")

    def load_checked(source: Any, strict: bool = True) -> Any:
        weights = list(mx.load(source).items()) if isinstance(source, str) else source
        _check_weights(model, dict(weights), path, rank)
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
    except ValueError:
        if not vision:  # mlx-lm lists all tensors that do not fit
            _check_weights(model, dict(mx.load(str(Path(path, WEIGHTS)))), path, rank)
        raise
    finally:
        del model.load_weights
    for line in output.getvalue().splitlines():
        log.info("%s: %s", path, line)
    return model


def _check_weights(model: nn.Module, tensors: Mapping[str, mx.array], path: str, rank: int | None) -> None:
    """ConfigError unless each tensor fits a parameter, and those of adapted layers are there and finite.
    `rank`: that of the config, which is named if it is all that is wrong."""
    parameters = dict(tree_flatten(model.parameters()))
    wrong = _list_wrong_rank(tensors, parameters, rank) or [
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
        f"{path}.{name}"
        for path, layer in _find_layers(model).items()
        for name in (*_LAYERS[type(layer).__name__][1:], "m")
        if name in layer
    }
    wrong += [f"{name}: missing in the file" for name in sorted(expected - tensors.keys())]
    wrong = wrong or [
        f"{name}: it has numbers that are not finite" for name in _list_infinite(tensors, expected)
    ]
    if wrong:
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ConfigError(f"{path}: the adapter does not fit the model: {'; '.join(wrong[:SHOWN])}{more}")


def _list_wrong_rank(
    tensors: Mapping[str, mx.array], parameters: Mapping[str, mx.array], rank: int | None
) -> list[str]:
    """The fault of all tensors, if they have another rank than the config; else none."""
    found: dict[int, str] = {}  # an example of each rank
    for name, tensor in sorted(tensors.items()):
        if name not in parameters:
            return []
        shape = parameters[name].shape
        others = [sizes for sizes in zip(tensor.shape, shape, strict=False) if sizes[0] != sizes[1]]
        if not others and tensor.ndim == len(shape):
            continue
        if len(others) != 1 or others[0][1] != rank or tensor.ndim != len(shape):
            return []
        found.setdefault(others[0][0], f"{name} of shape {tensor.shape}")
    if len(found) != 1:
        return []
    [(size, example)] = found.items()
    return [f"rank is {rank} in {CONFIG}, the tensors have {size}, such as {example}"]


def _list_infinite(tensors: Mapping[str, mx.array], names: Iterable[str]) -> list[str]:
    return [name for name in sorted(names) if not mx.all(mx.isfinite(tensors[name])).item()]


def _find_layers(model: nn.Module) -> dict[str, Any]:
    """The adapted layers of a library by path."""
    return {path: module for path, module in model.named_modules() if type(module).__name__ in _LAYERS}


def read_adapters(model: Any, paths: Mapping[str, str], *, vision: bool) -> list[dict[str, LayerWeights]]:
    """The weights of each adapter by the path of the adapted layer. The model is unchanged. `paths`: the
    folders by name. ConfigError names the adapter."""
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
        found = {}
        for name, layer in layers.items():
            _, a, b = _LAYERS[type(layer).__name__]
            found[name] = LayerWeights(layer[a], layer[b] * layer.scale, layer.get("m"))
        return found
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


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The config of the adapter in a folder. ConfigError if it has no adapter of MLX, or if a file or a
    number cannot be used; ModelLoadError if the weights' header cannot."""
    if not (folder / CONFIG).exists():
        raise ConfigError(f"{folder} has no {CONFIG}, so it is not the folder of an adapter")
    try:
        config = load_json(read_text_file(folder / CONFIG))
    except OSError as error:
        raise ConfigError(f"{folder / CONFIG}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{folder / CONFIG}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder / CONFIG}: not a JSON object")
    if "peft_type" in config:
        raise ConfigError(f"{folder} is an adapter of PEFT, which mlx-lm does not read")
    weights = next((folder / name for name in (WEIGHTS, OTHER_WEIGHTS) if (folder / name).is_file()), None)
    if weights is None:
        raise ConfigError(f"{folder} has no {WEIGHTS}")
    read_entries(weights)
    _check_values(config, folder / CONFIG)
    return config


def _check_needed(config: Mapping[str, Any], path: Path, *, vision: bool) -> None:
    """ConfigError if an entry is missing without which a library loads nothing."""
    if config.get("fine_tune_type") == "full":
        return
    if vision and "rank" in config and "lora_parameters" not in config:  # of mlx-vlm's older training
        return
    for key in ("lora_parameters",) if vision else ("lora_parameters", "num_layers"):
        if key not in config:
            raise ConfigError(f"{path}: {key} is missing")
    for key in (*_NEEDED, "dropout"):
        if key not in config["lora_parameters"]:
            raise ConfigError(f"{path}: lora_parameters.{key} is missing")


def _check_values(config: Mapping[str, Any], path: Path) -> None:
    """ConfigError for a value that a library would take as it is, and fail with later or compute NaN."""
    for key, value, is_right, wanted in _list_values(config):
        if not is_right(value):
            raise ConfigError(f"{path}: {key} is {value!r:.60}, which is not {wanted}")


def _list_values(
    config: Mapping[str, Any],
) -> Iterator[tuple[str, Any, Callable[[Any], bool], str]]:
    """The name and the value of each entry that a library reads, what is right there, and its description."""
    if config.get("fine_tune_type") is not None:
        kinds = ", ".join(_KINDS)
        yield "fine_tune_type", config["fine_tune_type"], lambda value: value in _KINDS, f"one of {kinds}"
    if "num_layers" in config:
        yield "num_layers", config["num_layers"], _is_integer, "a whole number"
    place, found = "", config  # of mlx-vlm's older training
    if "lora_parameters" in config and config.get("fine_tune_type") != "full":
        place, found = "lora_parameters.", config["lora_parameters"]
        yield "lora_parameters", found, lambda value: isinstance(value, dict), "an object"
    for key, is_right, wanted in _RULES:
        if found.get(key) is not None or (key in found and key in _NEEDED):
            yield place + key, found[key], is_right, wanted
