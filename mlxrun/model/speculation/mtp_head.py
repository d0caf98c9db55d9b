"""A multi-token-prediction head: predicts a token from the hidden state and the token before it.

Libraries drop these weights (mlx-lm), or have the heads as models with a loop of their own (mlx-vlm). Here a
head is the formats' module (mtp_weights.py) around a decoder layer that is made by the family's own module of
mlx-lm; embedding and output layer are the target's, as the report of DeepSeek-V3 shares them.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.footprint import count_weight_bytes
from mlxrun.model.load.model_info import LoadedModelInfo
from mlxrun.model.load.weight_check import load_checked_weights
from mlxrun.model.speculation.mtp_weights import (
    FORMATS,
    HeadFormat,
    HeadWeights,
    read_head_weights,
    stack_experts,
)

log = logging.getLogger(__name__)
# A model of one layer, which is as one behind the target's last one would be.
_ONE_LAYER = {"num_hidden_layers": 1, "full_attention_interval": 1, "mlp_only_layers": []}
_BLOCKS = {"attention": "*", "moe": "E", "mlp": "-"}  # of nemotron_h, by their names in its config
_KEPT_TYPE = "e_score_correction_bias"  # in float32 whatever the model's type is


class LayerStack(nn.Module):
    """Layers in place of one; all but one of them have no cache, and use none."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = list(layers)

    def __call__(self, x: mx.array, mask: Any, cache: Any) -> mx.array:
        for layer in self.layers:
            x = layer(x, mask=mask, cache=cache)
        return x


class MTPHead(nn.Module):
    """`layer`: a decoder layer. `width`: of hidden states. `window`: tokens that it sees; None: all."""

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
        """Hidden states [B, n, D] that predict the token behind the ones embedded here, and those from which
        the next prediction starts. `hidden` [B, n, D]: of the tokens before them."""
        parts = [self.embed_norm(embeds), self.hidden_norm(hidden)]
        joined = mx.concatenate(parts[::-1] if self._form.hidden_first else parts, axis=-1)
        output = self.layer(self.project(joined), mask, cache=cache)
        normed = self.norm(output) if "norm" in self else output
        return normed, normed if self._form.chains_normed else output


@dataclass(frozen=True, slots=True)
class FoundHead:
    """A head that a checkpoint has, in `folder`. `family`: the module of mlx-lm that has its decoder
    layer."""

    folder: Path
    family: str
    form: HeadFormat
    weights: HeadWeights


def find_mtp_head(info: LoadedModelInfo, split: Path | None = None) -> FoundHead | str:
    """The first head of a checkpoint; or why there is none. No weights are read. `split`: a folder with the
    head alone, as mlx-vlm splits it off."""
    config = info.config
    family = next((each for each in _list_types(config) if each in FORMATS), None)
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
    """The head with its weights evaluated and of this type. ModelLoadError if they are not complete."""
    form, text = found.form, info.config.get("text_config") or info.config
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


def _list_types(config: Mapping[str, Any]) -> list[str]:
    inner = (config.get("text_config") or {}).get("model_type", "")
    return [str(config.get("model_type")), str(inner).removesuffix("_text")]


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
    """Quantise the layers whose weights are, in the form that these have."""
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
