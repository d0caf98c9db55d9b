"""The memory that a model and its rows take on this device, for the scheduler's admission."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxrun.config.settings import SchedulerSettings
from mlxrun.model.machine.device import get_memory_limit
from mlxrun.model.ragged import layer_caches
from mlxrun.model.ragged.layer_caches import LayerKind
from mlxrun.model.ragged.row_group import BUFFER_STEP
from mlxrun.scheduler.memory_budget import Footprint, MemoryBudget

# Activations of one prompt token, in units of the hidden size: attention and MLP of one layer.
ACTIVATION_FACTOR = 24
# Padding to a group's longest row, and spare rows and tokens: measured 1.25 to 1.7 for rows of 300
# tokens and more, up to 3.6 where most are far shorter than 256.
PADDING_FACTOR = 1.5


def measure_footprint(cache: Sequence[Any]) -> Footprint:
    """Bytes of a row in the decode batch, read off caches [1, ...] that hold a few tokens."""
    per_token, fixed, windows = 0, 0, []
    for layer in layer_caches.flatten_caches(cache):
        if layer_caches.get_kind(layer) not in (LayerKind.KV, LayerKind.WINDOW):
            fixed += sum(a.nbytes for a in layer_caches.list_arrays(layer))
            continue
        window = layer_caches.get_window(layer)
        size = sum(a.shape[1] * a.shape[3] * a.itemsize for a in (layer.keys, layer.values))
        if window is None:
            per_token += size
        else:
            windows.append((window, int(size * PADDING_FACTOR)))
    return Footprint(int(per_token * PADDING_FACTOR), fixed, tuple(windows), BUFFER_STEP)


def count_weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters of a model."""
    return sum(array.nbytes for _, array in tree_flatten(model.parameters()))


def make_memory_budget(
    settings: SchedulerSettings,
    model: nn.Module,
    hidden: int,
    cache: Sequence[Any],
    vocab: int,
    image_bytes: int = 0,
) -> MemoryBudget:
    """The sum that admission checks. `hidden`: width of the model; `vocab`: width of its logits;
    `image_bytes`: what front ends may take for decoded images, which counts as weights."""
    limit = settings.memory_limit or get_memory_limit()
    itemsize = max((a.itemsize for a in layer_caches.list_all_arrays(cache)), default=4)
    weights = count_weight_bytes(model)
    logits = settings.max_running * vocab * 4 * 4
    return MemoryBudget(
        limit=int(limit * (1 - settings.memory_headroom)),
        weights=weights + logits + image_bytes,
        transient=hidden * itemsize * ACTIVATION_FACTOR,
        footprint=measure_footprint(cache),
    )
