"""Computes with each LoRA adapter when a model is loaded, and with rows of different adapters in one forward.

Each such row must have the logits that it has alone. If a model calls its layers with rows on another axis
than the first, its rows must not be mixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from mlxrun.core.errors import ConfigError
from mlxrun.model.run.chunk_grouping import PrefillSharing
from mlxrun.model.run.compute_methods import ComputeMethods
from mlxrun.model.run.hidden_hook import is_rounding
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import TEXT_ONLY

PROMPTS = np.array([[1, 2, 3, 5], [4, 1, 2, 3], [2, 2, 4, 1]])


def check_adapters(caller: ModelCaller) -> None:
    """ConfigError that names the adapter with which the model computes NaN."""
    for number, name in enumerate(caller.row_adapters.names, 1):
        if mx.any(mx.isnan(_compute_logits(caller, [0], [number]))).item():
            raise ConfigError(
                f"model.adapters: {name}: the model computes NaN with it: its numbers are too large, or "
                "damaged"
            )


def separate_adapters(caller: ModelCaller, methods: ComputeMethods) -> ComputeMethods:
    """The same methods if rows with different adapters may share a forward; else methods that never mix
    them."""
    count = len(caller.row_adapters.names)
    if not count or is_mixing_exact(caller, sorted({0, 1, count})):
        return methods
    sharing = PrefillSharing(merge_chunks=methods.sharing.merge_chunks)
    return replace(methods, decode="row_by_row", sharing=sharing, quantization=None)


def is_mixing_exact(caller: ModelCaller, numbers: Sequence[int]) -> bool:
    """Whether rows with these adapters have the same logits together as alone, within rounding."""
    try:
        together = _compute_logits(caller, range(len(numbers)), numbers)
    except ValueError:  # the shapes of some layer do not go by rows
        return False
    alone = mx.concatenate([_compute_logits(caller, [i], [n]) for i, n in enumerate(numbers)])
    return is_rounding(together, alone)


def _compute_logits(caller: ModelCaller, rows: Sequence[int], numbers: Sequence[int]) -> mx.array:
    """Logits [rows, n, V] of the prompts of these rows: of three tokens together, then of the last."""
    ids, cache = mx.array(PROMPTS[list(rows)]), caller.make_cache()
    with caller.row_adapters.use(numbers):
        first = caller.prefill(ids[:, :3], cache, 0, TEXT_ONLY)
        return mx.concatenate([first, caller.prefill(ids[:, 3:], cache, 3, TEXT_ONLY)], axis=1)
