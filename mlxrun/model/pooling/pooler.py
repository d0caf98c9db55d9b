"""From the states of tokens to vectors: pooling over chunks of rows, linear layers, normalisation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.tensor_files import read_tensors
from mlxrun.model.pooling.sentence_config import DenseModule, PoolingMode, SentenceConfig

_ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "identity": lambda x: x,
    "tanh": mx.tanh,
    "sigmoid": mx.sigmoid,
    "relu": lambda x: mx.maximum(x, 0),
}


class RowPooler:
    """Pools rows of these lengths while their states come in chunks; what is behind an end is ignored."""

    def __init__(self, modes: Sequence[PoolingMode], lengths: Sequence[int]) -> None:
        self._modes = modes
        self._lengths = mx.array(lengths)[:, None]
        self._pooled: dict[PoolingMode, mx.array] = {}

    def add(self, hidden: mx.array, start: int) -> None:
        """Take in the states [B, n, D] of tokens `start` to start + n of all rows."""
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
        """The pooled states [B, D], those of several modes one after the other, in float32."""
        count = self._lengths.astype(mx.float32)
        divisors = {
            "mean": count,
            "mean_sqrt_len_tokens": mx.sqrt(count),
            "weightedmean": count * (count + 1) / 2,
        }
        found = [self._pooled[mode] / divisors.get(mode, 1.0) for mode in self._modes]
        return found[0] if len(found) == 1 else mx.concatenate(found, axis=1)


class EmbeddingHead:
    """The modules of sentence-transformers after the transformer. ModelLoadError if their weights are not
    there."""

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
