"""A multi-token-prediction head: predicts a token from the hidden state and the token before it.

Libraries drop these weights (mlx-lm), or have the heads as models with their own loop (mlx-vlm). Here a head
is the format's module around a decoder layer of mlx-lm's own module of the family. It shares the target's
embedding and output layer.

All formats are the module of DeepSeek-V3's report (arXiv:2412.19437, section 2.2). Its parts are norms of a
token's embedding and of the target's last hidden state, their product, a decoder layer, and a norm. Formats
differ in names, in which half comes first, and in what a further prediction starts from. They follow vLLM's
deepseek_mtp, glm4_moe_mtp, qwen3_next_mtp, exaone_moe_mtp, mimo_mtp and ernie_mtp, and mlx-vlm's qwen3_5_mtp
and nemotron_h_mtp.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.footprint import count_weight_bytes
from mlxrun.model.load.model_files import list_weight_files
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.load.tensor_files import name_file_errors
from mlxrun.model.load.weight_check import load_checked_weights

log = logging.getLogger(__name__)
# A model of one layer, which is as one behind the target's last one would be.
_ONE_LAYER = {"num_hidden_layers": 1, "full_attention_interval": 1, "mlp_only_layers": []}
_BLOCKS = {"attention": "*", "moe": "E", "mlp": "-"}  # of nemotron_h, by their names in its config
_SHARED = ("embed_tokens", "shared_head.head", "rotary_emb")  # parts that are copies of the target's
_KEPT_TYPE = "e_score_correction_bias"  # in float32 whatever the model's type is

_EXPERT = re.compile(r"(.*\.)experts\.(\d+)\.(\w+)\.(\w+)")


@dataclass(frozen=True, slots=True)
class HeadFormat:
    """The names and the order of a head's parts in a checkpoint.

    `prefix`: of all names; {layers} is the number of the target's layers. After it, `parts` gives the names
    of a head's parts, and `layer` is the prefix of the decoder layer. `hidden_first`: the product takes the
    hidden state before the embedding. `chains_normed`: a further prediction starts from the normed output of
    the one before, like the first one from the target's. `centred`: norms are stored less one.

    `config`: of the decoder layer, where it differs from the target's. `split`: the prefix if mlx-vlm has
    split a head off; None: the names are unknown then. `place`: of the layer in a model of the family that
    has no other layer. Without a number, the target's config names several layers.
    """

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


class LayerStack(nn.Module):
    """Several layers that act as one. At most one of them uses the cache."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = list(layers)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        for layer in self.layers:
            x = layer(x, mask=mask, cache=cache)
        return x


class MTPHead(nn.Module):
    """The module of a head. `layer`: a decoder layer. `width`: of hidden states. `window`: tokens that it
    sees; None: all."""

    def __init__(self, layer: nn.Module, width: int, eps: float, form: HeadFormat) -> None:
        super().__init__()
        self.width = width
        self.window: int | None = None
        self.embed_norm = nn.RMSNorm(width, eps)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.project = nn.Linear(2 * width, width, bias=False)
        self.layer = layer
        if "norm" in form.parts.values():
            self.norm = nn.RMSNorm(width, eps)
        self._form = form

    def __call__(
        self, embeds: mx.array, hidden: mx.array, mask: Any, cache: Any
    ) -> tuple[mx.array, mx.array]:
        """Hidden states [B, n, D] that predict the token after the embedded ones, and those from which the
        next prediction starts. `hidden` [B, n, D]: of the tokens before."""
        parts = [self.embed_norm(embeds), self.hidden_norm(hidden)]
        joined = mx.concatenate(parts[::-1] if self._form.hidden_first else parts, axis=-1)
        output = self.layer(self.project(joined), mask, cache=cache)
        normed = self.norm(output) if "norm" in self else output
        return normed, normed if self._form.chains_normed else output


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Lazy weights: `parts` by their names in a head, `layer` by the checkpoint's names in the decoder layer.
    `converted`: by mlx-lm or mlx-vlm, so that norms are stored as they are used."""

    parts: Mapping[str, mx.array]
    layer: Mapping[str, mx.array]
    converted: bool


@dataclass(frozen=True, slots=True)
class FoundHead:
    """A head of the checkpoint in `folder`. `family`: the module of mlx-lm with its decoder layer."""

    folder: Path
    family: str
    form: HeadFormat
    weights: HeadWeights


def find_mtp_head(info: LoadedModelInfo, split: Path | None = None) -> FoundHead | str:
    """The first head of a checkpoint, or why there is none. No weights are read. `split`: a folder with the
    head alone, as mlx-vlm splits it off."""
    config = info.config
    inner = (config.get("text_config") or {}).get("model_type", "")
    types = str(config.get("model_type")), str(inner).removesuffix("_text")
    family = next((each for each in types if each in FORMATS), None)
    if family is None:
        return f"no format of MTP heads is known for model type {config.get('model_type')}"
    form, text = FORMATS[family], config.get("text_config") or config
    if split is not None:
        if form.split is None:
            return f"heads of {family} are read from its checkpoint only: remove model.draft"
        form = replace(form, prefix=form.split)
    folder = split or info.folder
    weights = read_head_weights(folder, form, text.get("num_hidden_layers", 0))
    if weights is None:
        return f"the checkpoint has no weights of MTP heads ({form.prefix.format(layers='N')}*)"
    return FoundHead(folder, family, form, weights)


def load_mtp_head(info: LoadedModelInfo, found: FoundHead, dtype: mx.Dtype) -> MTPHead:
    """The head with its weights evaluated, in this dtype. ModelLoadError if they are incomplete."""
    form, text = found.form, info.config.get("text_config") or info.config
    with name_file_errors(found.folder):
        model = _make_model(found.family, info.config, form)
        first, layer = model.layers[0], model.layers[0]
        if len(model.layers) > 1:
            layer = LayerStack(model.layers)
        eps = first["input_layernorm" if "input_layernorm" in first else "norm"].eps
        head = MTPHead(layer, text["hidden_size"], eps, form)
        if getattr(layer, "is_sliding_window", False):
            head.window = int(text["sliding_window"])
        arrays = _name_weights(model, found.weights, form)
        _quantize(head, arrays)
        load_checked_weights(head, {name: _cast(name, a, dtype) for name, a in arrays.items()}, found.folder)
        head.eval()
        mx.eval(head.parameters())
    log.info("loaded a head that predicts further tokens, %s", format_rounded(count_weight_bytes(head)))
    return head


def _make_model(family: str, config: Mapping[str, Any], form: HeadFormat) -> Any:
    """A model of the family with the head's layer only; its random weights are never evaluated."""
    module = importlib.import_module(f"mlx_lm.models.{family}")
    text = config.get("text_config") or config
    is_dense = text.get("first_k_dense_replace", 0) > text.get("num_hidden_layers", 0)
    change = {**_ONE_LAYER, "first_k_dense_replace": int(is_dense), **form.config}
    if types := text.get("layer_types"):  # those behind the first say whether such layers turn their keys
        change["layer_types"] = [*text.get("mtp_layer_types", types)[:1], *types]
    if family == "nemotron_h":
        blocks = [_BLOCKS.get(name, "M") for name in text.get("mtp_layers_block_type", ("attention", "moe"))]
        pattern = list(text.get("mtp_hybrid_override_pattern") or blocks)
        if pattern.count("*") != 1 or "M" in pattern:
            raise ModelLoadError(
                f"a head of the layers {''.join(pattern)} is not known; one attends, in others"
            )
        change["hybrid_override_pattern"] = pattern
    own = {**text, **change} if text is config else {**config, "text_config": {**text, **change}}
    return module.Model(module.ModelArgs.from_dict(own))


def _name_weights(model: Any, weights: HeadWeights, form: HeadFormat) -> dict[str, mx.array]:
    """The weights by the names of a head's parameters, in the form that the family's `sanitize` gives them.
    Norms pass it by, because whether it changes them depends on weights of other layers."""
    raised = 1.0 if form.centred and not weights.converted else 0.0
    named = {f"{form.place}{name}": array for name, array in weights.layer.items()}
    named |= {f"{form.place}mtp_{name}": array for name, array in weights.parts.items()}
    norms = {name for name, array in named.items() if array.ndim == 1 and name.endswith("norm.weight")}
    made = model.sanitize({name: array for name, array in named.items() if name not in norms})
    made |= {name: named[name] + raised for name in norms}
    found = {}
    for name, array in stack_experts(made).items():
        own = name.partition(form.place)[2]
        found[own.removeprefix("mtp_") if own.startswith("mtp_") else f"layer.{own}"] = array
    return found


def _quantize(head: MTPHead, weights: Mapping[str, mx.array]) -> None:
    """Quantize the layers whose weights are, in the form that these have."""
    from mlx_lm.utils import infer_quant_config

    def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        found: dict[str, Any] = infer_quant_config(path, module, dict(weights))
        return found

    if any(name.endswith(".scales") for name in weights):
        nn.quantize(head, class_predicate=choose)


def _cast(name: str, array: mx.array, dtype: mx.Dtype) -> mx.array:
    is_kept = name.endswith(_KEPT_TYPE) or not mx.issubdtype(array.dtype, mx.floating)
    return array if is_kept else array.astype(dtype)


def read_head_weights(folder: Path, form: HeadFormat, layers: int) -> HeadWeights | None:
    """The weights of the first head in a checkpoint; None if it has none. `layers`: number of the target's
    layers."""
    prefix = form.prefix.format(layers=layers)
    parts: dict[str, mx.array] = {}
    layer: dict[str, mx.array] = {}
    converted = False
    for file in list_weight_files(folder):
        with name_file_errors(folder):
            weights, metadata = mx.load(str(file), return_metadata=True)
        for name in [name for name in weights if name.startswith(prefix)]:
            converted = converted or metadata.get("format") == "mlx"
            part, _, kind = name.removeprefix(prefix).rpartition(".")
            if part in form.parts:
                parts[f"{form.parts[part]}.{kind}"] = weights[name]
            elif f"{part}.".startswith(form.layer) and not part.endswith(_SHARED):
                layer[f"{part}.{kind}".removeprefix(form.layer)] = weights[name]
    return HeadWeights(parts, layer, converted) if parts else None


def stack_experts(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """The weights, with separate matrices of experts stacked as one array [experts, ...]."""
    stacked = {name: array for name, array in weights.items() if not _EXPERT.fullmatch(name)}
    found: dict[str, dict[int, mx.array]] = {}
    for name, array in weights.items():
        if (match := _EXPERT.fullmatch(name)) is not None:
            place, expert, product, kind = match.groups()
            found.setdefault(f"{place}switch_mlp.{product}.{kind}", {})[int(expert)] = array
    for name, experts in found.items():
        stacked[name] = mx.stack([experts[number] for number in sorted(experts)])
    return stacked
