"""Reads the config of a LoRA adapter, and refuses values with which libraries fail later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mlxrun.core.errors import ConfigError, ModelLoadError
from mlxrun.core.limited_json import load_json
from mlxrun.core.text_files import read_text_file
from mlxrun.model.load.tensor_files import read_entries

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
OTHER_WEIGHTS = "weights.safetensors"  # mlx-vlm reads such a file too
_KINDS = ("lora", "dora", "full")  # what mlx-lm trains; it takes any other word for `lora`
_MOST = 2**31 - 1  # of a dimension of an array
_LARGEST = 3.4e38  # in float32


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """The config of the adapter in a folder. ConfigError if it has no adapter of MLX, if one of the files
    cannot be read, or if a number of the config cannot be."""
    if not (folder / CONFIG).exists():
        raise ConfigError(f"{folder} has no {CONFIG}, so it is not the folder of an adapter")
    try:
        config = load_json(read_text_file(folder / CONFIG))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / CONFIG}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{folder / CONFIG}: not a JSON object")
    if "peft_type" in config:
        raise ConfigError(f"{folder} is an adapter of PEFT, which mlx-lm does not read")
    weights = next((folder / name for name in (WEIGHTS, OTHER_WEIGHTS) if (folder / name).is_file()), None)
    if weights is None:
        raise ConfigError(f"{folder} has no {WEIGHTS}")
    try:
        read_entries(weights)
    except ModelLoadError as error:
        raise ConfigError(str(error)) from error
    _check_values(config, folder / CONFIG)
    return config


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


def _is_integer(value: Any) -> bool:
    return type(value) is int and abs(value) <= _MOST


def _is_finite(value: Any) -> bool:
    """Whether it is a number that a float can have."""
    return type(value) in (int, float) and abs(value) < _LARGEST


def _is_rank(value: Any) -> bool:
    return _is_integer(value) and value > 0


def _is_share(value: Any) -> bool:
    return _is_finite(value) and 0 <= value < 1


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


_NEEDED = ("rank", "scale")  # null leaves others out
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("rank", _is_rank, f"a whole number from 1 to {_MOST}"),
    ("scale", _is_finite, "a finite number"),
    ("alpha", _is_finite, "a finite number"),
    ("dropout", _is_share, "a number from 0 to less than 1"),
    ("keys", _is_strings, "a list of strings"),
)
