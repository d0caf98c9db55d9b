"""The weights of multi-token-prediction heads, as checkpoints name them.

All formats are the module of DeepSeek-V3's report (arXiv:2412.19437, section 2.2): norms of a token's
embedding and of the target's last hidden state, a product of both, a decoder layer of the target's kind, and
a norm. They differ in names, in which half comes first, and in what a further prediction starts from; vLLM's
deepseek_mtp, glm4_moe_mtp, qwen3_next_mtp, exaone_moe_mtp, mimo_mtp and ernie_mtp, and mlx-vlm's
qwen3_5_mtp and nemotron_h_mtp, have them so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxrun.model.load.model_files import list_weight_files

_EXPERT = re.compile(r"(.*\.)experts\.(\d+)\.(\w+)\.(\w+)")


@dataclass(frozen=True, slots=True)
class HeadFormat:
    """`prefix` of all names, where {layers} is the number of the target's layers; behind it, `parts` gives
    the names of a head's parts, and `layer` is the prefix of the decoder layer. `hidden_first`: the product
    takes the hidden state before the embedding. `chains_normed`: a further prediction starts from the normed
    output of the one before, as the first one does from the target's. `centred`: norms are stored less one.
    `config`: of the decoder layer, where it is not the target's. `split`: the prefix where mlx-vlm has split
    a head off; None: it has other names then. `place`: of the layer in a model of the family that has no
    other; without a number, the head has several layers, which the target's config names."""

    prefix: str
    parts: Mapping[str, str]
    layer: str = ""
    hidden_first: bool = False
    chains_normed: bool = True
    centred: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    split: str | None = None
    place: str = "model.layers.0."


_NEXTN = HeadFormat(
    "model.layers.{layers}.",
    {"enorm": "embed_norm", "hnorm": "hidden_norm", "eh_proj": "project", "shared_head.norm": "norm"},
    chains_normed=False,
)
_FC_PARTS = {
    "pre_fc_norm_embedding": "embed_norm",
    "pre_fc_norm_hidden": "hidden_norm",
    "fc": "project",
    "norm": "norm",
}
_QWEN = HeadFormat("mtp.", _FC_PARTS, layer="layers.0.", centred=True, split="")
FORMATS: Mapping[str, HeadFormat] = {
    "deepseek_v3": _NEXTN,
    "glm4_moe": _NEXTN,
    "glm4_moe_lite": _NEXTN,
    "qwen3_next": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "exaone_moe": HeadFormat("mtp.", _FC_PARTS, layer="layers.0.", config={"is_moe_layer": [False]}),
    "mimo": HeadFormat(
        "model.mtp_layers.0.",
        {
            "token_layernorm": "embed_norm",
            "hidden_layernorm": "hidden_norm",
            "input_proj": "project",
            "final_layernorm": "norm",
        },
        hidden_first=True,
    ),
    "nemotron_h": HeadFormat(
        "mtp.",
        {
            "layers.0.enorm": "embed_norm",
            "layers.0.hnorm": "hidden_norm",
            "layers.0.eh_proj": "project",
            "layers.1.final_layernorm": "norm",
        },
        split="",
        place="backbone.",
    ),
    "ernie4_5_moe": HeadFormat(
        "model.mtp_",
        {"emb_norm.0": "embed_norm", "hidden_norm.0": "hidden_norm", "linear_proj.0": "project"},
        layer="block.0.",
        config={"moe_layer_start_index": 1},
    ),
}


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Lazy weights: `parts` by their names in a head, `layer` by the checkpoint's names in the decoder layer.
    `converted`: by mlx-lm or mlx-vlm, so that norms are stored as they are used."""

    parts: Mapping[str, mx.array]
    layer: Mapping[str, mx.array]
    converted: bool


def read_head_weights(folder: Path, form: HeadFormat, layers: int) -> HeadWeights | None:
    """The weights of the first head in a checkpoint; None if it has none. `layers`: of the target."""
    prefix = form.prefix.format(layers=layers)
    parts: dict[str, mx.array] = {}
    layer: dict[str, mx.array] = {}
    converted = False
    for file in list_weight_files(folder):
        weights, metadata = mx.load(str(file), return_metadata=True)
        for name in [name for name in weights if name.startswith(prefix)]:
            converted = converted or metadata.get("format") == "mlx"
            part, _, kind = name.removeprefix(prefix).rpartition(".")
            if part in form.parts:
                parts[f"{form.parts[part]}.{kind}"] = weights[name]
            elif f"{part}.".startswith(form.layer) and not _is_shared(part):
                layer[f"{part}.{kind}".removeprefix(form.layer)] = weights[name]
    return HeadWeights(parts, layer, converted) if parts else None


def _is_shared(part: str) -> bool:
    """Whether it is a copy of the target's embedding or output layer."""
    return part in ("embed_tokens", "shared_head.head") or part.endswith("rotary_emb")


def stack_experts(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The weights with each expert's matrices, where they are apart, as one array [experts, ...]."""
    stacked = {name: array for name, array in weights.items() if not _EXPERT.fullmatch(name)}
    found: dict[str, dict[int, mx.array]] = {}
    for name, array in weights.items():
        if (match := _EXPERT.fullmatch(name)) is not None:
            place, expert, product, kind = match.groups()
            found.setdefault(f"{place}switch_mlp.{product}.{kind}", {})[int(expert)] = array
    for name, experts in found.items():
        stacked[name] = mx.stack([experts[number] for number in sorted(experts)])
    return stacked
