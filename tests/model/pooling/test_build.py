"""Models that give vectors, and whose files have values of which nothing can be made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from benchmarks.tiny.byte_tokenizer import write_json
from mlxrun.config.settings import Config, ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.model_info import load_model_info
from mlxrun.model.machine.device import resolve_config
from mlxrun.model.pooling.build import build_encoder_runner
from tests.helpers.pooling_models import build_pooling_model

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "no heads": ("config.json", {"num_attention_heads": 0}),
    "heads that do not divide": ("config.json", {"num_attention_heads": 3}),
    "no width": ("config.json", {"hidden_size": 0}),
    "a size below zero": ("config.json", {"intermediate_size": -1}),
    "sizes that are no list": ("config.json", {"matryoshka_dimensions": 5}),
    "prompts that are none": ("config_sentence_transformers.json", {"prompts": "x"}),
    "a limit that is text": ("sentence_bert_config.json", {"max_seq_length": "64"}),
    "a limit below zero": ("sentence_bert_config.json", {"max_seq_length": -1}),
}


def load(folder: Path) -> None:
    config = resolve_config(Config(model=ModelSettings(path=str(folder))))
    build_encoder_runner(config, load_model_info(config.model, weights=True))


@pytest.mark.parametrize("case", CASES)
def test_a_value_that_nothing_can_be_made_of_names_the_folder(tmp_path: Path, case: str) -> None:
    folder, (file, change) = build_pooling_model("bert", tmp_path / "bert"), CASES[case]
    load(folder)
    path = folder / file
    write_json(path, (json.loads(path.read_text()) if path.exists() else {}) | change)
    with pytest.raises(ModelLoadError, match=f"^{folder}: the model cannot be loaded: "):
        load(folder)


def test_a_module_that_does_not_fit_the_one_before(tmp_path: Path) -> None:
    folder = build_pooling_model("bert", tmp_path / "bert")
    file = folder / "2_Dense" / "model.safetensors"
    weights = dict(mx.load(str(file)))
    mx.save_safetensors(str(file), weights | {"linear.weight": weights["linear.weight"][:, 1:]})
    with pytest.raises(ModelLoadError, match=f"^{folder}: the model cannot be loaded: ValueError: .matmul"):
        load(folder)
