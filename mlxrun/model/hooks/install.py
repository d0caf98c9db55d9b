"""Installs all hooks: changes to a library's model, in a fixed order.

Each hook changes classes or functions of the library, and none knows the others. Several may change one
layer: a quantized linear layer gets its method first, and then its LoRA adapters.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.config.settings import Config
from mlxrun.model.fused.fused_blocks import hook_layers, list_fused
from mlxrun.model.fused.operations import choose_operations
from mlxrun.model.fused.quick_gates import hook_gates
from mlxrun.model.hooks.adapted_layers import LayerWeights, RowAdapters, attach_adapters
from mlxrun.model.hooks.attention import hook_attention
from mlxrun.model.hooks.derived_layers import transpose_weights
from mlxrun.model.hooks.drafted_state import hook_states
from mlxrun.model.hooks.even_products import hook_even_products
from mlxrun.model.hooks.given_embeddings import hook_embeddings
from mlxrun.model.hooks.image_positions import hook_positions
from mlxrun.model.hooks.product_timing import ProductTimes
from mlxrun.model.hooks.quantized_layers import is_expert, list_routed
from mlxrun.model.hooks.rotary_angles import share_angles
from mlxrun.model.hooks.single_placeholders import hook_placeholders
from mlxrun.model.hooks.soft_caps import hook_softcaps
from mlxrun.model.hooks.tile_features import hook_tiles
from mlxrun.model.hooks.tower_blocks import hook_blocks
from mlxrun.model.hooks.weight_form import WeightForm, settle_plain_products, settle_weights
from mlxrun.model.machine.device import fuses_operations, get_backend, uses_gpu

TIMED_LAYERS = 4  # whose products are timed: more weights than a GPU's cache holds


@dataclass(frozen=True, slots=True)
class InstalledHook:
    """A hook that is on. `places`: how many layers, modules or classes of the library it changed."""

    name: str
    places: int
    purpose: str


def may_fuse(config: Config) -> bool:
    """Whether layers may decode with few kernels. Adapters change single products, and rows with gaps have
    other positions than their caches say."""
    plain = not config.model.adapters and config.prefill.sparse == "off"
    return uses_gpu() and plain and bool(config.engine.load_check)


def may_multiply_evenly(config: Config) -> bool:
    """Whether plain weights may multiply rows of decode steps by a kernel of ours. In reproducible mode these
    are all rows."""
    return not config.model.adapters and bool(config.engine.load_check)


def needs_quick_gates() -> bool:
    """Whether MLX computes exponentials number by number, and compiles functions. It does so on Linux."""
    return get_backend() == "cpu" and sys.platform == "linux" and fuses_operations()


def install_hooks(
    model: nn.Module,
    config: Config,
    dtype: mx.Dtype,
    rows: RowAdapters,
    adapters: Sequence[Mapping[str, LayerWeights]],
    adapter_dtype: mx.Dtype | None,
    checkpoint: Mapping[str, Any],
    seconds: ProductTimes | None = None,
) -> tuple[WeightForm, tuple[InstalledHook, ...]]:
    """Change the model. Returns the form of its weights, and the hooks that changed something. `dtype`: of
    its activations; `adapters`: the weights of LoRA adapters by layer, in the order of `rows.names`;
    `adapter_dtype`: their type afterwards; `checkpoint`: config.json; `seconds`: see
    `settle_weights`."""
    form, reproducible = settle_weights(model, config, dtype, seconds), config.engine.reproducible
    routed = list_routed(model)
    experts = sum(is_expert(layer) for layer in routed)
    found = (
        InstalledHook("products", len(routed) - experts, "quantized layers multiply by the fastest method"),
        InstalledHook("experts", experts, "quantized experts multiply by the fastest method"),
        InstalledHook(
            "adapters", attach_adapters(model, rows, adapters, adapter_dtype), "LoRA adapters by row"
        ),
        InstalledHook(
            "even products",
            hook_even_products(model, dtype, whole=reproducible) if may_multiply_evenly(config) else 0,
            "a row has the same bits in steps of any width"
            if reproducible
            else "rows of decode steps are multiplied by the faster method",
        ),
        InstalledHook("linear layers", transpose_weights(model), "a view of the weight is made once"),
        InstalledHook("rotary positions", share_angles(model), "angles are computed once a forward"),
        InstalledHook("attention", hook_attention(model), "rows of any lengths attend in one forward"),
        InstalledHook("soft caps", hook_softcaps(model), "attention with a cap attends so too"),
        InstalledHook("tiles", hook_tiles(model, checkpoint), "each token of an image has one feature"),
        InstalledHook(
            "placeholders", hook_placeholders(model, checkpoint), "each token of an image has one feature"
        ),
        InstalledHook("positions", hook_positions(model), "positions come with each call"),
        InstalledHook("embeddings", hook_embeddings(model), "the language model sees images"),
        InstalledHook("tower blocks", hook_blocks(model), "images are encoded in parts, between steps"),
        InstalledHook("drafts", hook_states(model), "recurrent layers verify drafted tokens"),
        InstalledHook("gates", hook_gates(model) if needs_quick_gates() else 0, "SiLU takes less time"),
        InstalledHook(
            "fused layers",
            hook_layers(model) if may_fuse(config) else 0,
            "decode steps take few kernels, and weights of one input are joined",
        ),
    )
    if not reproducible:
        operations = choose_operations()
        products = [p for layer in list_fused(model)[:TIMED_LAYERS] for p in layer.list_products(operations)]
        form = settle_plain_products(model, form, products, dtype, seconds)
    return form, tuple(hook for hook in found if hook.places)
