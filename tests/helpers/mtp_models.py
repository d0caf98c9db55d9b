"""Multi-token-prediction heads for tiny models, in a file of their own beside the model's weights.

The names are those of the checkpoints that have such heads: experts apart, and norms of qwen3_next and
qwen3_5 stored less one.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlxrun.model.load.model_files import read_json

NEXTN = {"embed_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"}
QWEN = {
    "embed_norm": "pre_fc_norm_embedding",
    "hidden_norm": "pre_fc_norm_hidden",
    "project": "fc",
    "norm": "norm",
}
MIMO = {
    "embed_norm": "token_layernorm",
    "hidden_norm": "hidden_layernorm",
    "project": "input_proj",
    "norm": "final_layernorm",
}
NEMOTRON = {
    "embed_norm": "layers.0.enorm",
    "hidden_norm": "layers.0.hnorm",
    "project": "layers.0.eh_proj",
    "norm": "layers.1.final_layernorm",
}
ERNIE = {
    "embed_norm": "mtp_emb_norm.0",
    "hidden_norm": "mtp_hidden_norm.0",
    "project": "mtp_linear_proj.0",
}
# Prefix of all names and of the layer's, and the names of the parts.
NAMES: dict[str, tuple[str, str, dict[str, str]]] = {
    "glm4_moe": ("model.layers.{layers}.", "", NEXTN),
    "glm4_moe_lite": ("model.layers.{layers}.", "", NEXTN),
    "deepseek_v3": ("model.layers.{layers}.", "", NEXTN),
    "qwen3_next": ("mtp.", "layers.0.", QWEN),
    "qwen3_5": ("mtp.", "layers.0.", QWEN),
    "exaone_moe": ("mtp.", "layers.0.", QWEN),
    "mimo": ("model.mtp_layers.0.", "", MIMO),
    "nemotron_h": ("mtp.", "", NEMOTRON),
    "ernie4_5_moe": ("model.", "mtp_block.0.", ERNIE),
}
QWEN_FAMILIES = ("qwen3_next", "qwen3_5")


class TwoBlocks(nn.Module):  # type: ignore[misc]
    """The layers of nemotron_h's head: attention, and experts."""

    def __init__(self, blocks: Any) -> None:
        super().__init__()
        self.layers = list(blocks)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        attention, experts = self.layers
        return experts(attention(x, mask=mask, cache=cache))


def make_layer(family: str, config: dict[str, Any]) -> Any:
    """The last decoder layer of a model of the family with one more layer, which is the head's."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    if family == "nemotron_h":
        own = {**config, "hybrid_override_pattern": ["*", "E"]}
        return TwoBlocks(module.Model(module.ModelArgs.from_dict(own)).layers)
    text = config.get("text_config", config)
    more = {"num_hidden_layers": text["num_hidden_layers"] + 1, "full_attention_interval": 1}
    if family == "ernie4_5_moe":
        more["moe_layer_start_index"] = 99
    if family == "exaone_moe":
        more["layer_types"] = [*text["layer_types"], text["layer_types"][0]]
        more["is_moe_layer"] = [*text["is_moe_layer"], False]
    own = {**config, **more}
    if text is not config:
        own["text_config"] = {**text, **more}
    return module.Model(module.ModelArgs.from_dict(own)).layers[-1]


def draw_head(family: str, folder: Path, seed: int = 0) -> dict[str, mx.array]:
    """Random weights, named after the parts of model.speculation.mtp_head, as they are used."""
    config = read_json(folder / "config.json")
    width = config.get("text_config", config)["hidden_size"]
    rng = np.random.default_rng(seed)
    shapes = {f"layer.{name}": a.shape for name, a in tree_flatten(make_layer(family, config).parameters())}
    shapes |= {f"{part}.weight": (width,) for part in NAMES[family][2] if part != "project"}
    shapes["project.weight"] = (width, 2 * width)
    return {
        name: mx.array(
            (1 + 0.1 * rng.standard_normal(shape))
            if len(shape) == 1 and not name.endswith("bias")
            else rng.standard_normal(shape) / shape[-1] ** 0.5,
            mx.float32,
        )
        for name, shape in shapes.items()
    }


def save_head(family: str, folder: Path, head: dict[str, mx.array]) -> None:
    """Write a head into a tiny model's folder, as its checkpoints have it."""
    config = read_json(folder / "config.json")
    prefix, layer, parts = NAMES[family]
    prefix = prefix.format(layers=config.get("text_config", config)["num_hidden_layers"])
    saved: dict[str, mx.array] = {}
    for name, array in head.items():
        part, _, kind = name.rpartition(".")
        if part in parts:
            saved[f"{prefix}{parts[part]}.{kind}"] = array
        elif "switch_mlp." in part:
            apart = part.removeprefix("layer.").replace(".fc1", ".up_proj").replace(".fc2", ".down_proj")
            for expert in range(array.shape[0]):
                split = apart.replace("switch_mlp.", f"experts.{expert}.")
                saved[f"{prefix}{layer}{split}.{kind}"] = array[expert]
        else:
            saved[f"{prefix}{layer}{name.removeprefix('layer.')}"] = array
    if family in QWEN_FAMILIES:
        saved = {name: array - 1 if "norm" in name else array for name, array in saved.items()}
    mx.save_safetensors(str(folder / "model-mtp.safetensors"), saved)
