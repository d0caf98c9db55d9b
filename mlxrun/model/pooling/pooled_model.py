"""Whether a model gives embeddings or scores, by its files and the config, and what front ends need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.core.request import PooledModel
from mlxrun.model.load.model_files import read_json
from mlxrun.model.pooling.encoder_types import check_labels, get_first_position, is_encoder
from mlxrun.model.pooling.sentence_config import has_sentence_config, read_sentence_config

ANSWERS = ("yes", "no")  # of a reranker that generates
_POSITIONS = "max_position_embeddings"


def read_pooled_model(
    folder: Path, config: Mapping[str, Any], settings: ModelSettings, tokenizer: Any
) -> PooledModel | None:
    """What the model makes of texts; None if it only generates. ModelLoadError for what would be wrong."""
    kind, encoder = settings.kind, is_encoder(config)
    if encoder and kind in ("text", "vision"):
        raise ModelLoadError(f"model.kind: {kind}, but {folder} is an encoder ({config['model_type']})")
    architecture = str((config.get("architectures") or [""])[0])
    classifies = architecture.endswith("ForSequenceClassification")
    if kind == "reranker" or (kind == "auto" and classifies):
        return _read_reranker(folder, config, settings, tokenizer, classifies)
    has_own = has_sentence_config(folder)
    only_embeds = kind == "embedding" or (kind == "auto" and (has_own or encoder))
    if not only_embeds and settings.pooling is None:
        return None
    if not encoder:
        _check_causal(folder, config)
    own = read_sentence_config(folder, settings)
    size = own.dense[-1].size if own.dense else _read_width(folder, config) * len(own.modes)
    default = own.default_prompt
    if default is not None and default not in own.prompts:
        raise ModelLoadError(f"{folder}: default_prompt_name {default!r} is none of its prompts")
    return PooledModel(
        task="embed",
        size=size,
        max_tokens=_read_max_tokens(config, settings, tokenizer, own.max_tokens),
        generates=not only_embeds,
        prompts=own.prompts,
        default_prompt=default,
        normalized=own.normalize,
        lower_case=own.lower_case,
        sizes=tuple(config.get("matryoshka_dimensions") or ()),
    )


def _read_reranker(
    folder: Path, config: Mapping[str, Any], settings: ModelSettings, tokenizer: Any, classifies: bool
) -> PooledModel:
    limits = read_json(folder / "sentence_bert_config.json")
    most = _read_max_tokens(config, settings, tokenizer, limits.get("max_seq_length"))
    if is_encoder(config) and classifies:
        check_labels(config)
        return PooledModel("score", 1, most)
    vocabulary = tokenizer.get_vocab()
    if config.get("model_type") == "qwen3" and not classifies and all(word in vocabulary for word in ANSWERS):
        return PooledModel("score", 1, most, template="qwen3")
    raise ModelLoadError(
        f"{folder}: this kind of reranker is not supported ({config.get('model_type')}, "
        f"{(config.get('architectures') or ['no architecture'])[0]}): only encoders with a classifier of one "
        "label, and Qwen3-Reranker"
    )


def _check_causal(folder: Path, config: Mapping[str, Any]) -> None:
    """ModelLoadError for decoders whose tokens see those after them, which mlx-lm does not compute."""
    text = config.get("text_config") or {}
    for source in (text, config):
        for key, causal in (("use_bidirectional_attention", (None, False)), ("is_causal", (None, True))):
            if source.get(key) not in causal:
                raise ModelLoadError(
                    f"{folder}/config.json: {key} {source[key]!r} is not supported: mlx-lm computes causal "
                    "attention, and the embeddings would be wrong"
                )


def _read_width(folder: Path, config: Mapping[str, Any]) -> int:
    for source in (config.get("text_config") or {}, config):
        for key in ("hidden_size", "d_model", "n_embd", "dim"):
            if isinstance(source.get(key), int):
                return int(source[key])
    raise ModelLoadError(f"{folder}/config.json has no hidden_size")


def _read_max_tokens(
    config: Mapping[str, Any], settings: ModelSettings, tokenizer: Any, own: int | None
) -> int:
    """Tokens of one text: `model.context_length`, else what the model's files say; never more than it has
    positions."""
    text = config.get("text_config") or {}
    positions = text.get(_POSITIONS) or config.get(_POSITIONS) or 1 << 31
    most = int(positions) - get_first_position(config)
    given = own or min(most, int(tokenizer.model_max_length))
    wanted = settings.context_length or given
    return min(wanted, most) if is_encoder(config) else wanted
