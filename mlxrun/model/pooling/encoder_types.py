"""Which encoders there are, and what their configs say, without loading mlx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxrun.core.errors import ModelLoadError

# Positions of these are counted from the padding token's id + 1 on.
ROBERTA_TYPES = ("roberta", "xlm-roberta", "camembert")
ENCODER_TYPES = ("bert", *ROBERTA_TYPES, "modernbert")


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a model of this config is one of those in encoders.py."""
    return config.get("model_type") in ENCODER_TYPES


def get_first_position(config: Mapping[str, Any]) -> int:
    """The position of a text's first token."""
    return int(config.get("pad_token_id", 1)) + 1 if config.get("model_type") in ROBERTA_TYPES else 0


def check_labels(config: Mapping[str, Any]) -> None:
    """ModelLoadError if the classifier has more than one label, which is no score of relevance."""
    labels = config.get("id2label")
    count = len(labels) if labels else config.get("num_labels", 2)
    if count != 1:
        raise ModelLoadError(f"a reranker has one label, but this classifier has {count}")


def is_sigmoid(config: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether scores go through a sigmoid, by config.json and config_sentence_transformers.json."""
    found = (config.get("sentence_transformers") or {}).get("activation_fn")
    found = found or config.get("sbert_ce_default_activation_function") or own.get("activation_fn")
    name = str(found or "Sigmoid").rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise ModelLoadError(f"the activation {found} of scores is not supported")
    return name == "Sigmoid"
