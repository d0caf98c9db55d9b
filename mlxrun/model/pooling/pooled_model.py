"""The facts in a model's files about its vectors: whether it gives embeddings or scores, and how. Loads no
mlx.

They are the kinds of encoders, and sentence-transformers' modules, pooling, prompts and limits. An
unsupported module or option is a ModelLoadError that names it, since the vectors would be different without
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.core.request import PooledModel
from mlxrun.model.load.model_files import (
    find_hidden_size,
    find_text_config,
    read_json,
    read_json_list,
)

ANSWERS = ("yes", "no")  # of a reranker that generates
_POSITIONS = "max_position_embeddings"

# Positions of these are counted from the padding token's id + 1 on.
ROBERTA_TYPES = ("roberta", "xlm-roberta", "camembert")
ENCODER_TYPES = ("bert", *ROBERTA_TYPES, "modernbert")

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
ACTIVATIONS = ("identity", "tanh", "sigmoid", "relu")
_SETTING: dict[str, PoolingMode] = {"mean": "mean", "cls": "cls", "last": "lasttoken"}  # of model.pooling
_OLD_KEYS: dict[str, PoolingMode] = {  # in the order in which the library concatenates what they pool
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

_TRUNK = "model."
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def read_pooled_model(
    folder: Path, config: Mapping[str, Any], settings: ModelSettings, tokenizer: Any
) -> PooledModel | None:
    """What the model makes of texts; None if it only generates. ModelLoadError if its vectors would be
    wrong."""
    kind, encoder = settings.kind, is_encoder(config)
    if encoder and kind in ("text", "vision"):
        raise ModelLoadError(f"model.kind: {kind}, but {folder} is an encoder ({config['model_type']})")
    architecture = str((config.get("architectures") or [""])[0])
    classifies = architecture.endswith("ForSequenceClassification")
    if kind == "reranker" or (kind == "auto" and classifies):
        return _read_reranker(folder, config, settings, tokenizer, classifies)
    has_own = any(_get_kind(module) == "Pooling" for module in read_json_list(folder / "modules.json"))
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
    for source in (find_text_config(config), config):
        for key, causal in (("use_bidirectional_attention", (None, False)), ("is_causal", (None, True))):
            if source.get(key) not in causal:
                raise ModelLoadError(
                    f"{folder}/config.json: {key} {source[key]!r} is not supported: mlx-lm computes causal "
                    "attention, and the embeddings would be wrong"
                )


def _read_width(folder: Path, config: Mapping[str, Any]) -> int:
    found = find_hidden_size(config)
    if found is None:
        raise ModelLoadError(f"{folder}/config.json has no hidden_size")
    return found


def _read_max_tokens(
    config: Mapping[str, Any], settings: ModelSettings, tokenizer: Any, own: int | None
) -> int:
    """Tokens of one text: `model.context_length`, else what the model's files say; never more than it has
    positions."""
    positions = find_text_config(config).get(_POSITIONS) or config.get(_POSITIONS) or 1 << 31
    most = int(positions) - get_first_position(config)
    given = own or min(most, int(tokenizer.model_max_length))
    wanted = settings.context_length or given
    return min(wanted, most) if is_encoder(config) else wanted


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether encoders.py has the model of this config."""
    return config.get("model_type") in ENCODER_TYPES


def get_first_position(config: Mapping[str, Any]) -> int:
    """The position of a text's first token."""
    return int(config.get("pad_token_id", 1)) + 1 if config.get("model_type") in ROBERTA_TYPES else 0


def check_labels(config: Mapping[str, Any]) -> None:
    """ModelLoadError if the classifier has several labels, since a score of relevance needs one."""
    labels = config.get("id2label")
    count = len(labels) if labels else config.get("num_labels", 2)
    if count != 1:
        raise ModelLoadError(f"a reranker has one label, but this classifier has {count}")


def is_sigmoid(config: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Whether scores go through a sigmoid, by config.json and config_sentence_transformers.json.
    ModelLoadError for another activation."""
    found = (config.get("sentence_transformers") or {}).get("activation_fn")
    found = found or config.get("sbert_ce_default_activation_function") or own.get("activation_fn")
    name = str(found or "Sigmoid").rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise ModelLoadError(f"the activation {found} of scores is not supported")
    return name == "Sigmoid"


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer after pooling, with its activation."""

    folder: Path
    activation: str
    size: int


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """How token states become an embedding. `max_tokens`: of a text; None: the model's."""

    modes: tuple[PoolingMode, ...]
    normalize: bool
    dense: tuple[DenseModule, ...]
    prompts: Mapping[str, str]
    default_prompt: str | None
    max_tokens: int | None
    lower_case: bool


def read_sentence_config(folder: Path, settings: ModelSettings) -> SentenceConfig:
    """The config of an embedding model. ModelLoadError if a part is unsupported, or if neither its files nor
    `model.pooling` say how to pool."""
    modules = read_json_list(folder / "modules.json")
    kinds = [_get_kind(module) for module in modules]
    for kind, module in zip(kinds, modules, strict=True):
        if kind not in ("Transformer", "Pooling", "Dense", "Normalize"):
            _refuse(folder / "modules.json", f"the module {module.get('type')}")
    order = [{"Transformer": 0, "Pooling": 1, "Dense": 2, "Normalize": 3}[kind] for kind in kinds]
    if order != sorted(order) or kinds.count("Pooling") > 1 or kinds.count("Transformer") > 1:
        _refuse(folder / "modules.json", f"modules in the order {', '.join(kinds)}")
    paths = dict(zip(kinds, (folder / str(module.get("path", "")) for module in modules), strict=True))
    dense = [folder / str(m["path"]) for kind, m in zip(kinds, modules, strict=True) if kind == "Dense"]
    if "Transformer" in paths and paths["Transformer"].resolve() != folder.resolve():
        _refuse(folder / "modules.json", "a Transformer in a folder of its own")
    own = read_json(folder / "config_sentence_transformers.json")
    limits = read_json(folder / "sentence_bert_config.json")
    pooling = read_json(paths["Pooling"] / "config.json") if "Pooling" in paths else {}
    if not pooling.get("include_prompt", True):
        _refuse(paths["Pooling"] / "config.json", "include_prompt: false")
    prompts = own.get("prompts") or {}
    return SentenceConfig(
        modes=_read_modes(folder, pooling, settings),
        normalize="Normalize" in kinds,
        dense=tuple(map(_read_dense, dense)),
        prompts={str(name): str(text) for name, text in prompts.items()},
        default_prompt=own.get("default_prompt_name"),
        max_tokens=limits.get("max_seq_length"),
        lower_case=bool(limits.get("do_lower_case")),
    )


def _get_kind(module: Mapping[str, Any]) -> str:
    """`Pooling` of `sentence_transformers.models.Pooling`."""
    kind = str(module.get("type", ""))
    return kind.rpartition(".")[2] if kind.startswith("sentence_transformers.") else kind


def _read_modes(folder: Path, pooling: Mapping[str, Any], settings: ModelSettings) -> tuple[PoolingMode, ...]:
    if settings.pooling is not None:
        return (_SETTING[settings.pooling],)
    if not pooling:
        raise ModelLoadError(
            f"{folder}: no file says how token states become an embedding (modules.json of "
            "sentence-transformers): set model.pooling to mean, cls or last, as its authors say"
        )
    given = pooling.get("pooling_mode")
    old = [mode for key, mode in _OLD_KEYS.items() if pooling.get(key)]
    names: list[Any] = [given] if isinstance(given, str) else list(given or old)
    for name in names:
        if name not in _OLD_KEYS.values():
            _refuse(folder, f"pooling_mode {name!r}")
    return tuple(names) or ("mean",)


def _read_dense(folder: Path) -> DenseModule:
    config = read_json(folder / "config.json")
    name = (
        str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2].lower()
    )
    if name not in ACTIVATIONS:
        _refuse(folder / "config.json", f"activation_function {config['activation_function']}")
    inputs = {config.get(key) or "sentence_embedding" for key in ("module_input_name", "module_output_name")}
    if config.get("use_residual") or inputs != {"sentence_embedding"}:
        _refuse(folder / "config.json", "a Dense module with a residual or with inputs of its own")
    return DenseModule(folder, name, int(config["out_features"]))


def _refuse(path: Path, what: str) -> None:
    raise ModelLoadError(f"{path}: {what} is not supported, and embeddings without it would be wrong")


def get_trunk_classes(config: dict[str, Any]) -> tuple[type[Any], type[Any]]:
    """As mlx_lm.utils._get_classes, for a model that also takes the weights of its trunk alone. They get the
    names of the whole model. A missing head gets the embedding's weights, since embeddings do not depend on
    it."""
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
