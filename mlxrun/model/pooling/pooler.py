"""Turns the states of tokens into vectors: pooling over chunks of rows, and heads.

The heads are those of embedding models, of cross-encoders with one label, and of rerankers that generate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.tensor_files import read_tensors
from mlxrun.model.pooling.encoders import get_activation
from mlxrun.model.pooling.pooled_model import DenseModule, PoolingMode, SentenceConfig
from mlxrun.model.run.hidden_hook import HiddenStateHook
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import TEXT_ONLY

HEADS = ("bert.pooler.", "pooler.", "classifier.", "head.", "score.")  # of names of their tensors

_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "identity": lambda x: x,
    "tanh": mx.tanh,
    "sigmoid": mx.sigmoid,
    "relu": lambda x: mx.maximum(x, 0),
}


class RowPooler:
    """Pools rows of these lengths while their states come in chunks. States after a row's end are ignored."""

    def __init__(self, modes: Sequence[PoolingMode], lengths: Sequence[int]) -> None:
        self._modes = modes
        self._lengths = mx.array(lengths)[:, None]
        self._pooled: dict[PoolingMode, mx.array] = {}

    def add(self, hidden: mx.array, start: int) -> None:
        """Take in the states [B, n, D] of tokens [start, start + n) of all rows."""
        hidden = hidden.astype(mx.float32)
        positions = mx.arange(start, start + hidden.shape[1])[None]
        inside = (positions < self._lengths)[..., None]
        for mode in self._modes:
            before = self._pooled.get(mode)
            if mode == "max":
                found = mx.max(mx.where(inside, hidden, -mx.inf), axis=1)
                self._pooled[mode] = found if before is None else mx.maximum(before, found)
                continue
            if mode == "cls":
                weights = mx.broadcast_to((positions == 0)[..., None], inside.shape)
            elif mode == "lasttoken":
                weights = (positions == self._lengths - 1)[..., None]
            elif mode == "weightedmean":
                weights = mx.where(inside, (positions + 1)[..., None], 0)
            else:
                weights = inside
            # Not a product alone: what padding gives may be infinite.
            found = mx.sum(mx.where(weights == 0, 0, hidden * weights), axis=1)
            self._pooled[mode] = found if before is None else before + found

    def list_arrays(self) -> list[mx.array]:
        return list(self._pooled.values())

    def finish(self) -> mx.array:
        """The pooled states [B, D] in float32. Several modes are concatenated."""
        count = self._lengths.astype(mx.float32)
        divisors = {
            "mean": count,
            "mean_sqrt_len_tokens": mx.sqrt(count),
            "weightedmean": count * (count + 1) / 2,
        }
        found = [self._pooled[mode] / divisors.get(mode, 1.0) for mode in self._modes]
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=1)


class EmbeddingHead:
    """The modules of sentence-transformers after the transformer. ModelLoadError if their weights are
    missing."""

    def __init__(self, config: SentenceConfig) -> None:
        self.modes = config.modes
        self._normalize = config.normalize
        self._dense = [(_load_linear(module), _ACTIVATIONS[module.activation]) for module in config.dense]

    def compute(self, pooled: mx.array) -> mx.array:
        """Embeddings [B, size] in float32 of pooled states [B, D]."""
        for (weight, bias), activate in self._dense:
            made = pooled @ weight.T
            pooled = activate(made if bias is None else made + bias)
        if not self._normalize:
            return pooled
        norm = mx.sqrt(mx.sum(pooled * pooled, axis=1, keepdims=True))
        return pooled / mx.maximum(norm, 1e-12)


def _load_linear(module: DenseModule) -> tuple[mx.array, mx.array | None]:
    """Weight [out, in] and bias [out] in float32."""
    path = module.folder / "model.safetensors"
    if not path.is_file():
        raise ModelLoadError(f"{path}: the weights of the Dense module are missing")
    tensors = read_tensors(path)
    if "linear.weight" not in tensors or tensors["linear.weight"].shape[0] != module.size:
        raise ModelLoadError(f"{path}: no linear.weight of {module.size} rows")
    bias = tensors.get("linear.bias")
    return tensors["linear.weight"].astype(mx.float32), None if bias is None else bias.astype(mx.float32)


class RelevanceHead:
    """The head of a cross-encoder with one label. ModelLoadError if its weights are missing."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, mx.array], sigmoid: bool) -> None:
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


class AnswerHead:
    """The probability that a reranker answers yes and not no. `ids`: of these two tokens."""

    modes: tuple[PoolingMode, ...] = ("lasttoken",)

    def __init__(
        self, caller: ModelCaller, hook: HiddenStateHook, ids: Sequence[int], dtype: mx.Dtype
    ) -> None:
        self._caller = caller
        self._hook = hook
        self._ids = mx.array(list(ids))
        self._dtype = dtype

    def compute(self, pooled: mx.array) -> mx.array:
        """Scores [B, 1] in float32 of the states [B, D] of last tokens."""
        ids, cache = mx.zeros((pooled.shape[0], 1), dtype=mx.int32), self._caller.make_cache()
        hidden = pooled[:, None].astype(self._dtype)
        logits = self._hook.compute_logits(hidden, lambda caller: caller.prefill(ids, cache, 0, TEXT_ONLY))
        answers = logits[:, 0, self._ids].astype(mx.float32)
        return mx.softmax(answers, axis=-1)[:, :1]


VectorHead = EmbeddingHead | RelevanceHead | AnswerHead
