"""Facts from a model's files: the chat template, end tokens, context length, sampling defaults, and the kind.
The summary has sizes, the number of parameters, and the quantization."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.core.model_summary import ModelSummary
from mlxrun.core.text_files import read_text_file
from mlxrun.model.load.gguf.header import GgufHeader
from mlxrun.model.load.model_files import (
    EMBEDDED,
    find_text_config,
    list_weight_files,
    list_weight_indexes,
    read_json,
)
from mlxrun.model.load.tensor_files import TensorEntry, read_folder_entries

log = logging.getLogger(__name__)
GENERATION = "generation_config.json"
DEFAULT_CONTEXT = 32_768
_CONTEXT_KEYS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "n_positions", "seq_length")
_TOWER = re.compile(r"vision|visual|image|img|vit|vpm|clip")  # in names of a vision tower's weights
NO_TOWER = "the checkpoint has no vision tower, so it is a text model"
INSTALL_VISION = "pip install 'mlxrun[vision]'"
NO_LIBRARY = f"images need mlx-vlm, which is not installed ({INSTALL_VISION}), so it is a text model"
_DEFAULTS = {  # and their ranges
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 1 << 31),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 10),
}
SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size"),
)


def read_template(folder: Path, settings: ModelSettings, tokenizer: Any) -> str | None:
    """The chat template of the settings, else of the model's files; None if there is none. ModelLoadError if
    it cannot be read."""
    if settings.chat_template is not None:
        try:
            return read_text_file(Path(settings.chat_template))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ModelLoadError(f"model.chat_template: {settings.chat_template}: {reason}") from error
    if folder.is_file():
        return tokenizer.chat_template
    own = folder / "chat_template.json"  # older vision models
    where = own if own.is_file() else folder
    found = read_json(own).get("chat_template") if own.is_file() else tokenizer.chat_template
    if isinstance(found, dict):  # several named templates
        found = found.get("default")
    if found is not None and not isinstance(found, str):
        raise ModelLoadError(f"{where}: chat_template must be a string or named strings, not {found!r:.60}")
    return found


def collect_eos_ids(
    folder: Path, config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Any
) -> frozenset[int]:
    """The ids of all end tokens that a file of the model in `folder` names. Logs a warning for an invalid
    value."""
    text = find_text_config(config)
    sources = {GENERATION: generation, "config.json": config, "config.json: text_config": text}
    found: list[Any] = [tokenizer.eos_token_id]
    for name, source in sources.items():
        value = source.get("eos_token_id")
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, int) and not isinstance(each, bool):
                found.append(each)
            elif each is not None:
                _warn_of_ignored(folder, name, "eos_token_id", each, "the id of a token")
    return frozenset(i for i in found if isinstance(i, int))


def _warn_of_ignored(folder: Path, file: str, key: str, value: Any, wanted: str) -> None:
    log.warning("%s: %s: %s %.60r is ignored, since it is not %s", folder, file, key, value, wanted)


def read_context_length(settings: ModelSettings, config: Mapping[str, Any]) -> int:
    """The most tokens of a prompt and its answer: from the settings, else from the config. Logs a warning if
    the settings exceed what the config allows."""
    sources = (find_text_config(config), config)
    found = [source[key] for source in sources for key in _CONTEXT_KEYS if source.get(key)]
    wanted = settings.context_length
    if wanted is not None and found and wanted > (most := max(int(found[0]), *map(_read_extended, sources))):
        log.warning(
            "model.context_length is %d, but the model's config allows %d tokens; answers beyond may be bad",
            wanted,
            most,
        )
    return wanted or int(found[0] if found else DEFAULT_CONTEXT)


def _read_extended(config: Mapping[str, Any]) -> int:
    """The context that the scaling of positions, such as YaRN's, makes of the original one; 0 for none."""
    scaling = config.get("rope_scaling") or {}
    return int((scaling.get("original_max_position_embeddings") or 0) * (scaling.get("factor") or 1))


def read_sampling_defaults(folder: Path, generation: Mapping[str, Any]) -> dict[str, float]:
    """Sampling values that the authors of the model in `folder` recommend. `do_sample: false` means greedy.
    Logs a warning for an invalid value."""
    if generation.get("do_sample") is False:
        return {"temperature": 0.0}
    found = {}
    for key, (least, most) in _DEFAULTS.items():
        value = generation.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
            found[key] = float(value)
        elif value is not None:
            _warn_of_ignored(folder, GENERATION, key, value, f"a number from {least} to {most}")
    return found


@dataclass(frozen=True, slots=True)
class ModelKind:
    """`vision`: whether the model takes images. `note`: why not, if its config has them."""

    vision: bool
    note: str = ""


def choose_kind(settings: ModelSettings, config: Mapping[str, Any], folder: Path) -> ModelKind:
    """The kind by `model.kind`, or else by config and weights. ModelLoadError if the model cannot be of that
    kind."""
    parts = (config, *(part for part in config.values() if isinstance(part, Mapping)))
    has_config = any(part.get("vision_config") for part in parts)  # Qwen3-Omni has it in `thinker_config`
    if settings.kind == "text":
        _check_text(config, folder)
        return ModelKind(False)
    if str(settings.kind) not in ("auto", "vision") or (settings.kind == "auto" and not has_config):
        return ModelKind(False)
    if find_spec("mlx_vlm") is None:
        return _choose_without_library(settings, config, folder)
    if not has_config:
        _check_vision(config, folder)
    names = list_tensor_names(folder)
    if names is None or any(_TOWER.search(name) for name in names):
        return ModelKind(True)
    if settings.kind == "vision":
        raise ModelLoadError(f"model.kind: vision, but {folder} has no weights of a vision tower")
    log.warning("%s: %s", folder, NO_TOWER)
    _check_text(config, folder)
    return ModelKind(False, NO_TOWER)


def _choose_without_library(settings: ModelSettings, config: Mapping[str, Any], folder: Path) -> ModelKind:
    """The kind of a model for images where mlx-vlm is not installed: mlx-lm may have its text part."""
    if settings.kind == "vision":
        raise ModelLoadError(f"model.kind: vision needs mlx-vlm: {INSTALL_VISION}")
    try:
        _check_text(config, folder)
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder}: this model needs mlx-vlm: {INSTALL_VISION}") from error
    log.log(logging.INFO if folder == EMBEDDED else logging.WARNING, "%s: %s", folder, NO_LIBRARY)
    return ModelKind(False, NO_LIBRARY)


def _check_text(config: Mapping[str, Any], folder: Path) -> None:
    """ModelLoadError unless mlx-lm has the architecture."""
    from mlx_lm.utils import _get_classes

    if "model_file" in config:
        return
    try:
        _get_classes(dict(config))
    except (KeyError, ValueError) as error:
        raise ModelLoadError(
            f"model.kind: {folder} cannot be loaded as a text model, since mlx-lm does not have the "
            f"architecture {config.get('model_type')!r}"
        ) from error


def _check_vision(config: Mapping[str, Any], folder: Path) -> None:
    """ModelLoadError unless mlx-vlm has the architecture, with a vision tower."""
    from mlx_vlm.utils import get_model_and_args

    try:
        module, _ = get_model_and_args(dict(config))
    except (KeyError, ValueError):
        module = None
    if not hasattr(module, "VisionModel"):
        raise ModelLoadError(
            f"model.kind: vision, but {folder} has no vision_config, and mlx-vlm does not have the "
            f"architecture {config.get('model_type')!r} with a vision tower"
        )


def list_tensor_names(folder: Path) -> frozenset[str] | None:
    """The names of a checkpoint's tensors, by its index or its files' headers; None if there are none.
    ModelLoadError if they cannot be read."""
    found: set[str] = set()
    try:
        for index in list_weight_indexes(folder):
            found |= read_json(index)["weight_map"].keys()
        found = found or {*read_folder_entries(folder)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{folder}: the names of the weights cannot be read: {error}") from error
    return frozenset(found) if found or list_weight_files(folder) else None


def summarize_model(folder: Path, config: Mapping[str, Any], gguf: GgufHeader | None) -> ModelSummary:
    """Summarize a model of which `config` was read. The headers of its weights are read at the first call.
    ModelLoadError if they are damaged."""
    text = find_text_config(config)
    sizes = {name: text.get(name, config.get(name)) for name in SIZES}
    quantization = config.get("quantization")
    packed = quantization if gguf is None and isinstance(quantization, Mapping) else {}
    if gguf is None:
        counts = _count_folder(folder, tuple(sorted(_read_group_sizes(packed).items())))
    else:
        counts = _count_values((each.type, math.prod(each.shape)) for each in gguf.tensors.values())
    stats = [file.stat() for file in list_weight_files(folder)]
    usual = max(counts, key=counts.__getitem__, default="")
    return ModelSummary(
        format="safetensors" if gguf is None else "gguf",
        family=str(config.get("model_type") or ""),
        quantization=f"{packed['bits']}bit" if "bits" in packed else usual,
        weight_bytes=sum(each.st_size for each in stats),
        num_parameters=counts.total(),
        modified=max((each.st_mtime for each in stats), default=0.0),
        sizes={name: value for name, value in sizes.items() if type(value) is int},
    )


def _read_group_sizes(quantization: Mapping[str, Any]) -> dict[str, int]:
    """The group sizes of layers by name; that of all others is under the empty name."""
    found = {"": quantization.get("group_size", 64)}
    for name, value in quantization.items():
        if isinstance(value, Mapping):
            found[name] = value.get("group_size", found[""])
    return found


@functools.lru_cache(maxsize=16)
def _count_folder(folder: Path, groups: tuple[tuple[str, int], ...]) -> Counter[str]:
    entries, sizes = read_folder_entries(folder), dict(groups)
    return _count_values(
        (entry.dtype, _count_parameters(name, entry, entries, sizes)) for name, entry in entries.items()
    )


def _count_values(tensors: Iterable[tuple[str, int]]) -> Counter[str]:
    """The parameters of each type."""
    counts: Counter[str] = Counter()
    for kind, count in tensors:
        counts[kind] += count
    return counts


def _count_parameters(
    name: str, entry: TensorEntry, entries: Mapping[str, TensorEntry], groups: Mapping[str, int]
) -> int:
    """The parameters of a tensor. Those of a quantized layer are counted at its scales."""
    layer, _, part = name.rpartition(".")
    if f"{layer}.scales" in entries and part in ("weight", "scales", "biases"):
        group = groups.get(layer, groups[""])
        return math.prod(entry.shape) * group if part == "scales" else 0
    return math.prod(entry.shape)
