"""From the states of a pair of texts to a score: the heads of cross-encoders with one label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.pooling.encoders import get_activation
from mlxrun.model.pooling.sentence_config import PoolingMode

Tensors = Mapping[str, mx.array]
_HEADS = ("bert.pooler.", "pooler.", "classifier.", "head.", "score.")


def is_head_weight(name: str) -> bool:
    """Whether a checkpoint's tensor belongs to a head."""
    return name.startswith(_HEADS)


class ScoreHead:
    """`kind`: the model type. ModelLoadError if its weights are missing."""

    def __init__(self, config: Mapping[str, Any], tensors: Tensors, sigmoid: bool) -> None:
        self._tensors = {name.removeprefix("bert."): value for name, value in tensors.items()}
        self._kind = str(config["model_type"])
        self._eps = float(config.get("norm_eps", 1e-5))
        self._activate = get_activation(config.get("classifier_activation", "gelu"))
        self._sigmoid = sigmoid
        mean = self._kind == "modernbert" and config.get("classifier_pooling", "cls") == "mean"
        self.modes: tuple[PoolingMode, ...] = ("mean",) if mean else ("cls",)
        try:
            self.compute(mx.zeros((1, config["hidden_size"])))
        except KeyError as error:
            raise ModelLoadError(f"the weights of the classifier are missing: {error.args[0]}") from error

    def compute(self, pooled: mx.array) -> mx.array:
        """Scores [B, 1] in float32 of pooled states [B, D]."""
        if self._kind == "bert":
            pooled, last = mx.tanh(self._apply("pooler.dense", pooled)), "classifier"
        elif self._kind == "modernbert":
            pooled = self._activate(self._apply("head.dense", pooled))
            weight, bias = self._tensors["head.norm.weight"], self._tensors.get("head.norm.bias")
            pooled, last = mx.fast.layer_norm(pooled, weight, bias, self._eps), "classifier"
        else:
            pooled, last = mx.tanh(self._apply("classifier.dense", pooled)), "classifier.out_proj"
        logits = self._apply(last, pooled)
        return mx.sigmoid(logits) if self._sigmoid else logits

    def _apply(self, name: str, x: mx.array) -> mx.array:
        made = x @ self._tensors[f"{name}.weight"].T
        bias = self._tensors.get(f"{name}.bias")
        return made if bias is None else made + bias
