"""What a model's own files say about its vectors: sentence-transformers' modules, pooling, prompts, limits.

A module or an option that is not implemented is a ModelLoadError that names it: without it the vectors would
be others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.model_files import read_json, read_json_list

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
MODES: tuple[PoolingMode, ...] = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
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


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer after pooling, and the activation after it."""

    folder: Path
    activation: str
    size: int


@dataclass(frozen=True, slots=True)
class SentenceConfig:
    """How token states become an embedding. `max_tokens`: of a text; None: that of the model."""

    modes: tuple[PoolingMode, ...]
    normalize: bool
    dense: tuple[DenseModule, ...]
    prompts: Mapping[str, str]
    default_prompt: str | None
    max_tokens: int | None
    lower_case: bool


def has_sentence_config(folder: Path) -> bool:
    """Whether the folder is a model of sentence-transformers that gives embeddings."""
    return any(_get_kind(module) == "Pooling" for module in read_json_list(folder / "modules.json"))


def read_sentence_config(folder: Path, settings: ModelSettings) -> SentenceConfig:
    """The config of an embedding model; ModelLoadError if something in it is not implemented, or if neither
    its files nor `model.pooling` say how to pool."""
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
    names = [given] if isinstance(given, str) else list(given or _iterate_old_modes(pooling))
    for name in names:
        if name not in MODES:
            _refuse(folder, f"pooling_mode {name!r}")
    return tuple(mode for name in names for mode in MODES if mode == name) or ("mean",)


def _iterate_old_modes(pooling: Mapping[str, Any]) -> Iterator[PoolingMode]:
    yield from (mode for key, mode in _OLD_KEYS.items() if pooling.get(key))


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
