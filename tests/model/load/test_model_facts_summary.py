"""What a model's files say of it: sizes, parameters before quantization, types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.model_facts import summarize_model
from mlxrun.model.load.model_info import load_model_info
from tests.helpers.gguf_files import build_folder, convert


def save(folder: Path, arrays: dict[str, mx.array]) -> Path:
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    return folder


def test_parameters_are_counted_as_before_quantization(tmp_path: Path) -> None:
    """Also where a layer has a group size of its own; the commonest type counts if nothing is quantized."""
    layers = {"a": (nn.Linear(128, 32, bias=False), 64), "b": (nn.Linear(256, 16, bias=False), 32)}
    rest = {"b.bias": mx.zeros(16)}
    config: dict[str, Any] = {"model_type": "llama", "text_config": {"hidden_size": 8}, "vocab_size": 5}
    plain = {f"{name}.weight": layer.weight for name, (layer, _) in layers.items()}
    found = summarize_model(save(tmp_path / "plain", plain | rest), config, None)
    count = 128 * 32 + 256 * 16 + 16
    assert (found.num_parameters, found.quantization, found.family) == (count, "F32", "llama")
    assert found.sizes == {"hidden_size": 8, "vocab_size": 5} and found.format == "safetensors"
    packed = dict(rest)
    for name, (layer, group) in layers.items():
        parts = mx.quantize(layer.weight, group_size=group, bits=4)
        names = [f"{name}.{part}" for part in ("weight", "scales", "biases")]
        packed |= dict(zip(names, parts, strict=True))
    config["quantization"] = {"group_size": 64, "bits": 4, "b": {"group_size": 32, "bits": 4}}
    folder = save(tmp_path / "packed", packed)
    found = summarize_model(folder, config, None)
    assert (found.num_parameters, found.quantization) == (count, "4bit")
    file = (folder / "model.safetensors").stat()
    assert (found.weight_bytes, found.modified) == (file.st_size, file.st_mtime)


def test_a_gguf_file(tmp_path: Path) -> None:
    folder = build_folder(tmp_path / "folder", "llama")
    file = convert(folder, tmp_path / "model.gguf")
    info = load_model_info(ModelSettings(path=str(file)), weights=True)
    of_file = info.summary
    of_folder = load_model_info(ModelSettings(path=str(folder)), weights=True).summary
    assert (of_file.format, of_file.family) == ("gguf", of_folder.family)
    assert of_file.num_parameters == of_folder.num_parameters > 0
    assert of_file.weight_bytes == file.stat().st_size


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match="model.safetensors"):
        summarize_model(tmp_path, {}, None)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    found = summarize_model(tmp_path, {}, None)
    assert (found.weight_bytes, found.num_parameters, found.quantization, found.modified) == (0, 0, "", 0.0)
