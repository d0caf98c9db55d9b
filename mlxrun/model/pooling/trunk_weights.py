"""Checkpoints that have a decoder's trunk alone, as sentence-transformers saves embedding models."""

from __future__ import annotations

from typing import Any

_TRUNK = "model."
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def get_trunk_classes(config: dict[str, Any]) -> tuple[type[Any], type[Any]]:
    """As mlx_lm.utils._get_classes, for a model that also takes the weights of its trunk alone. They are
    named as in the whole model, and a missing head gets the embedding's: embeddings do not depend on it."""
    from mlx_lm.utils import _get_classes

    model_class, arguments = _get_classes(config)
    base: Any = model_class

    class TrunkModel(base):
        def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
            if not any(name.startswith(_TRUNK) for name in weights):
                heads = ("lm_head.", "score.")
                weights = {
                    name if name.startswith(heads) else _TRUNK + name: value
                    for name, value in weights.items()
                }
            if "lm_head" in self and _HEAD not in weights and _EMBEDDING in weights:
                weights = {**weights, _HEAD: weights[_EMBEDDING]}
            own = getattr(super(), "sanitize", None)
            return weights if own is None else own(weights)

    TrunkModel.__module__ = model_class.__module__  # where attention is routed
    return TrunkModel, arguments
