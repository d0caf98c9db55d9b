"""Which families have layers of the usual layout, which GPUs decode with few kernels (model/fused)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from benchmarks.tiny.random_models import read_vision_info, write_text_model, write_vision_model
from mlxrun.config.settings import Config, ModelSettings
from mlxrun.model.fused.fused_blocks import hook_layers, list_fused
from mlxrun.model.hooks.adapted_layers import RowAdapters
from mlxrun.model.hooks.attention import hook_attention
from mlxrun.model.hooks.weight_form import PLAIN_WEIGHTS
from mlxrun.model.kv.ragged.layer_caches import LayerKind, flatten_caches, get_kind
from mlxrun.model.load.loader import load_lazily, make_caller
from mlxrun.model.load.model_info import LoadedModelInfo, load_model_info

_INTRODUCTION = (
    "On a GPU, [few kernels](architecture/decoding.md#fused-layers) compute a decode step of the layers "
    "below. The middle stays the library's where it is a mixture of experts, or has another activation."
)
Layers = Literal["whole", "attention", "none"]
_WORDS: Mapping[Layers, str] = {
    "whole": "whole layers",
    "attention": "all but the middle",
}


def find_all_layers(families: Sequence[tuple[str, str]]) -> dict[str, dict[str, Layers]]:
    """For each kind its families. Those that the library does not build have no such layers."""
    found: dict[str, dict[str, Layers]] = {}
    for kind, family in families:
        try:
            layers = find_layers(kind, family)
        except (Exception, SystemExit):  # a library's module may raise anything, even this
            layers = "none"
        found.setdefault(kind, {})[family] = layers
    return found


def find_layers(kind: str, family: str) -> Layers:
    """Whether all layers of a family's tiny model are fused, or all but the middle of some. Raises whatever
    the library raises."""
    with tempfile.TemporaryDirectory(prefix="mlxrun-layers-") as folder:
        path, is_text = Path(folder) / "model", kind == "text"
        (write_text_model if is_text else write_vision_model)(family, path)
        config = Config(model=ModelSettings(path=str(path)))
        info = load_model_info(config.model, weights=True) if is_text else read_vision_info(family, path)
        return _read_layers(config, info)


def _read_layers(config: Config, info: LoadedModelInfo) -> Layers:
    model, _, _ = load_lazily(config.model, info)
    caller = make_caller(config, info, model, PLAIN_WEIGHTS, RowAdapters())
    kinds = {get_kind(layer) for layer in flatten_caches(caller.make_cache())}
    hook_attention(model)
    hook_layers(model)
    layers = list_fused(model)
    if not layers or not kinds <= {LayerKind.KV, LayerKind.WINDOW}:
        return "none"
    return "whole" if all(layer.gated is not None for layer in layers) else "attention"


def render_layers(found: Mapping[str, Layers]) -> Iterator[str]:
    """Lines of docs/models.md about the families of one kind; none if no family has such layers."""
    named = {own: sorted(name for name in found if found[name] == own) for own in _WORDS}
    if any(named.values()):
        yield from ("", _INTRODUCTION, "")
    for own, names in named.items():
        if names:
            yield f"- {_WORDS[own]} ({len(names)} families): {', '.join(f'`{name}`' for name in names)}"
