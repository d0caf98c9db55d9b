"""Benchmark models: presets are written as the library writes such a model, and load there."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from mlxrun.cli.bench.models import PRESETS, describe_model, find_folder, open_model, write_model
from mlxrun.core.errors import ConfigError


@pytest.mark.parametrize("name", ["tiny", "tiny-4bit", "tiny-8bit"])
def test_a_preset_loads_with_the_weights_that_were_written(name: str) -> None:
    with open_model(name) as made:
        model, config = load_model(made.folder)
        assert made.vocab == config["vocab_size"] == 1024
        assert made.dtype == ("float32" if name == "tiny" else None)
        logits = model(mx.array([[1, 2, 3]]))
        assert logits.shape == (1, 3, 1024) and mx.isfinite(logits).all().item()
    assert not made.folder.exists()


def test_quantized_weights_stand_for_the_plain_ones() -> None:
    """The same seed gives the same weights, but for rounding."""
    with open_model("tiny") as plain, open_model("tiny-8bit") as quantized:
        a, b = load_model(plain.folder)[0], load_model(quantized.folder)[0]
        one, two = a(mx.array([[1, 2, 3]])), b(mx.array([[1, 2, 3]]))
    assert 0 < mx.abs(one - two).max().item() < 0.5 * mx.std(one).item()


def test_experts_are_quantized_and_their_routers_are_not(tmp_path: Path) -> None:
    small = PRESETS["qwen3-30b-a3b-4bit"] | {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "vocab_size": 128,
        "dtype": "float32",
    }
    write_model(tmp_path, small, seed=0)
    model, _ = load_model(tmp_path)
    layer = model.model.layers[0].mlp
    assert type(layer.switch_mlp.gate_proj).__name__ == "QuantizedSwitchLinear"
    assert type(layer.gate).__name__ == "Linear"
    assert mx.isfinite(model(mx.array([[1, 2]]))).all().item()


def test_folders_that_are_no_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither embedded nor a preset .* nor a local folder"):
        find_folder(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x"}))
    with pytest.raises(ConfigError, match="has no vocab_size"):
        describe_model("x", find_folder(str(tmp_path)))
