"""Decides whether a checkpoint is loaded as a text model or as one that sees images (`model.kind`)."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxrun.config.settings import ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.model_files import list_weight_files, read_json
from mlxrun.model.load.tensor_files import read_folder_entries

log = logging.getLogger(__name__)
_TOWER = re.compile(r"vision|visual|image|img|vit|vpm|clip")  # in names of a vision tower's weights
NO_TOWER = "the checkpoint has no vision tower, so it is a text model"


@dataclass(frozen=True, slots=True)
class ModelKind:
    """`vision`: whether the model sees images. `note`: why not, where its config says that it does."""

    vision: bool
    note: str = ""


def choose_kind(settings: ModelSettings, config: Mapping[str, Any], folder: Path) -> ModelKind:
    """What `model.kind` says, or what config and weights say. ModelLoadError if it cannot be that."""
    parts = (config, *(part for part in config.values() if isinstance(part, Mapping)))
    has_config = any(part.get("vision_config") for part in parts)  # Qwen3-Omni has it in `thinker_config`
    if settings.kind == "text":
        _check_text(config, folder)
        return ModelKind(False)
    if str(settings.kind) not in ("auto", "vision") or (settings.kind == "auto" and not has_config):
        return ModelKind(False)
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
    """The names of a checkpoint's tensors, by its index or its files' headers; None if there are none."""
    found: set[str] = set()
    try:
        for index in sorted(folder.glob("*.safetensors.index.json")):
            found |= read_json(index)["weight_map"].keys()
        found = found or {*read_folder_entries(folder)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{folder}: the names of the weights cannot be read: {error}") from error
    return frozenset(found) if found or list_weight_files(folder) else None
