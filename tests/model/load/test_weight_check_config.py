"""Numbers of config.json that the weights cannot have are refused before a library builds a model of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlxrun.config.settings import Config, ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.engine.build import build_engine
from mlxrun.model.load import model_info
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.load.weight_check import check_quantization, check_sizes
from tests.helpers.model_fixtures import Zoo

SHAPES = {"a": (100, 32), "b": (32,)}
PATH = Path("config.json")


def change(zoo: Zoo, folder: Path, **more: Any) -> Path:
    """A copy of a tiny llama with these keys in its config.json."""
    shutil.copytree(zoo.text("llama"), folder)
    config = json.loads((folder / "config.json").read_text()) | more
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def retype(file: Path, name: str, dtype: str) -> None:
    """Let the header say that this tensor has another type."""
    data = file.read_bytes()
    place = data.index(b'"dtype":"F32"', data.index(f'"{name}"'.encode()))
    file.write_bytes(data[:place] + f'"dtype":"{dtype}"'.encode() + data[place + 13 :])


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"]
)
def test_an_absurd_number_is_named_before_anything_is_built(zoo: Zoo, tmp_path: Path, key: str) -> None:
    folder = change(zoo, tmp_path / "m", **{key: 10**9})
    with pytest.raises(ModelLoadError, match=rf"m/config\.json: {key} is 1000000000, but"):
        load_model_info(ModelSettings(path=str(folder)), weights=True)


def test_a_number_that_nobody_could_read_is_not_written() -> None:
    with pytest.raises(ModelLoadError, match="hidden_size is a number of 40001 bits, but no tensor"):
        check_sizes({"hidden_size": 1 << 40000}, SHAPES, PATH)


def test_configs_of_parts_are_compared_too() -> None:
    config = {"thinker_config": {"text_config": {"num_hidden_layers": 10**7}}}
    with pytest.raises(ModelLoadError, match=r"thinker_config\.text_config\.num_hidden_layers is 10000000"):
        check_sizes(config, SHAPES, PATH)


def test_usual_numbers_pass() -> None:
    """Sizes of packed tensors, parts that the checkpoint was left without, and what is no size."""
    check_sizes({"vocab_size": 3200, "audio_config": {"num_hidden_layers": 32}}, SHAPES, PATH)
    check_sizes({"max_position_embeddings": 10**9, "num_hidden_layers": True, "x": "y"}, SHAPES, PATH)


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"bits": 0, "group_size": 64}, "quantization: bits is 0, where MLX has 1, 2, 3, 4, 5, 6, 8"),
        ({"bits": 99, "group_size": 64}, "quantization: bits is 99"),
        ({"bits": "4", "group_size": 64}, "quantization: bits is '4'"),
        ({"bits": 4.0, "group_size": 64}, "quantization: bits is 4.0"),
        ({"bits": True, "group_size": 64}, "quantization: bits is True"),
        ({"bits": 4, "group_size": 0}, "quantization: group_size is 0"),
        ({"bits": 4, "group_size": -64}, "quantization: group_size is -64"),
        ({"bits": 4, "group_size": 64, "mode": "affin"}, "quantization: mode is 'affin'"),
        (
            {"bits": 4, "group_size": 64, "model.layers.0": {"bits": 7}},
            r"quantization: model\.layers\.0: bits",
        ),
        ([4, 64], r"quantization is \[4, 64\], which is not an object"),
    ],
)
def test_quantization_that_does_not_exist_is_refused(
    zoo: Zoo, tmp_path: Path, quantization: Any, said: str
) -> None:
    """Where no weight is quantized it would have no effect, and nobody would know."""
    folder = change(zoo, tmp_path / "m", quantization=quantization)
    with pytest.raises(ModelLoadError, match=rf"m/config\.json: {said}"):
        load_model_info(ModelSettings(path=str(folder)), weights=True)


def test_quantization_of_others_is_left_to_the_libraries() -> None:
    check_quantization({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": -1}}, PATH)
    check_quantization({"quantization": {"bits": 4, "group_size": 32, "lm_head": False}}, PATH)
    with pytest.raises(ModelLoadError, match="quantization_config: bits is 99"):
        check_quantization({"quantization_config": {"bits": 99}}, PATH)


def test_the_twin_without_the_check_computes(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """99 bits, and a head of whole numbers: each loads if its check is switched off."""
    folder = change(zoo, tmp_path / "m", quantization={"bits": 99, "group_size": 64})
    monkeypatch.setattr(model_info, "check_config", lambda *_: None)
    build_engine(Config(model=ModelSettings(path=str(folder))))


def test_whole_numbers_in_place_of_fractions_are_refused(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = change(zoo, tmp_path / "m")
    name = "model.layers.0.mlp.up_proj.weight"
    retype(folder / "model.safetensors", name, "I32")
    with pytest.raises(ModelLoadError, match=rf"{name} is of type .*int32, where the model has .*float32"):
        build_engine(Config(model=ModelSettings(path=str(folder))))
    monkeypatch.setattr("mlxrun.model.load.weight_check.is_float", lambda array: True)
    build_engine(Config(model=ModelSettings(path=str(folder))))
