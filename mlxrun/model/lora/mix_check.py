"""Computes with each adapter when a model is loaded, and compares rows with different adapters in one forward
with each of them alone.

A model may call its layers with rows in another place than the first; then its rows must not be mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlxrun.core.errors import ConfigError
from mlxrun.model.run.adapter import Adapter
from mlxrun.model.run.chunk_grouping import PrefillSharing
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.run.prompt_inputs import TEXT_ONLY

# Largest difference of logits that counts as rounding, in units of their standard deviation.
TOLERANCE = {mx.float32: 1e-3}
OTHER_TOLERANCE = 0.1  # of other types
PROMPTS = np.array([[1, 2, 3, 5], [4, 1, 2, 3], [2, 2, 4, 1]])


def check_adapters(adapter: Adapter) -> None:
    """ConfigError that names the adapter with which the model computes NaN."""
    for number, name in enumerate(adapter.row_adapters.names, 1):
        if mx.any(mx.isnan(_compute_logits(adapter, [0], [number]))).item():
            raise ConfigError(
                f"model.adapters: {name}: the model computes NaN with it: its numbers are too large, or "
                "damaged"
            )


def separate_adapters(adapter: Adapter, methods: ComputeMethods) -> ComputeMethods:
    """The same methods if rows with different adapters may share a forward; else methods by which none do."""
    count = len(adapter.row_adapters.names)
    if not count or _is_mixing_exact(adapter, sorted({0, 1, count})):
        return methods
    sharing = PrefillSharing(merge_chunks=methods.sharing.merge_chunks)
    return replace(methods, decode="row_by_row", sharing=sharing, quantization=None)


def _is_mixing_exact(adapter: Adapter, numbers: Sequence[int]) -> bool:
    try:
        together = _compute_logits(adapter, range(len(numbers)), numbers)
    except ValueError:  # the shapes of some layer do not go by rows
        return False
    alone = mx.concatenate([_compute_logits(adapter, [i], [n]) for i, n in enumerate(numbers)])
    limit = TOLERANCE.get(alone.dtype, OTHER_TOLERANCE)
    found, wanted = together.astype(mx.float32), alone.astype(mx.float32)
    return bool(mx.max(mx.abs(found - wanted)).item() <= limit * mx.std(wanted).item())


def _compute_logits(adapter: Adapter, rows: Sequence[int], numbers: Sequence[int]) -> mx.array:
    """Logits [rows, n, V] of the prompts of these rows: of three tokens together, then of the last."""
    ids, cache = mx.array(PROMPTS[list(rows)]), adapter.make_cache()
    with adapter.row_adapters.use(numbers):
        first = adapter.prefill(ids[:, :3], cache, 0, TEXT_ONLY)
        return mx.concatenate([first, adapter.prefill(ids[:, 3:], cache, 3, TEXT_ONLY)], axis=1)
