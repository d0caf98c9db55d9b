"""Random LoRA and DoRA adapters for tiny text models, as mlx-lm's training saves them, and the answers of
mlx-lm with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.helpers import oracle
from tests.helpers.oracle import Answer


def make_adapter(
    model_folder: Path, folder: Path, seed: int = 1, *, kind: str = "lora", rank: int = 4, **lora: Any
) -> Path:
    """Writes an adapter into `folder`. `lora`: further parameters, such as `keys`; by default, all layers of
    the last two blocks are adapted."""
    from mlx_lm import load
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model, _ = load(str(model_folder))
    model.freeze()
    parameters = {"rank": rank, "scale": 8.0, "dropout": 0.0, **lora}
    linear_to_lora_layers(model, 2, parameters, use_dora=kind == "dora")
    mx.random.seed(seed)
    weights = {
        name: value * (1 + 0.3 * mx.random.normal(value.shape))
        if name.endswith(".m")
        else mx.random.normal(value.shape) * 0.1
        for name, value in tree_flatten(model.trainable_parameters())
    }
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def compute_answer(model_folder: Path, adapter: str | None, ids: Sequence[int], count: int = 24) -> Answer:
    """The ORACLE: what mlx-lm answers with the adapter in this folder alone."""
    return oracle.text_answer(model_folder, ids, count, adapter=adapter)
