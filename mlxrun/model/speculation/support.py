"""Whether drafts can be verified for a model, and whether that takes longer the more tokens they have.

Steps are timed at load: what a drafted token costs, and what verifying one does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxrun.model.hooks.adapted_layers import BASE
from mlxrun.model.kv.paged.paged_batch import PagedDecodeBatch
from mlxrun.model.kv.ragged.decode_batch import JoiningRow
from mlxrun.model.kv.ragged.layer_caches import LayerKind, flatten_caches, get_kind, list_all_arrays
from mlxrun.model.machine.device import uses_gpu
from mlxrun.model.run.adapter import Adapter
from mlxrun.model.run.compute_methods import ComputeMethods, make_decode_batch
from mlxrun.model.run.prompt_inputs import TEXT_ONLY

TIMED_STEPS = 5
MIN_COST = 0.01  # of a drafted token, in steps


def find_device_problem() -> str | None:
    """Why no model drafts on this device; None if some may."""
    return None if uses_gpu() else "drafts need decoding by pages, which is for GPUs, and this is a CPU"


def find_draft_problem(methods: ComputeMethods) -> str | None:
    """Why a model that is computed by these methods does not draft; None if it can."""
    if methods.decode not in ("compiled", "paged"):
        return f"drafts need decoding by pages, which is for GPUs; this model decodes {methods.decode}"
    return methods.draft_problem or None


def computes_token_by_token(template: Sequence[Any]) -> bool:
    """Whether some layers compute the drafted tokens of a row one after the other. `template`: the model's
    caches."""
    return LayerKind.STATE in map(get_kind, flatten_caches(template))


def measure_row_cost(adapter: Adapter, methods: ComputeMethods, drafted: int) -> float:
    """What a drafted token adds to a step that verifies so many, in steps of one row: nothing where a forward
    has a fixed width, and little where it reads weights most of the time."""
    alone = time_step(adapter, methods)
    return max(time_step(adapter, methods, 1 + drafted) / alone - 1, 0.0) / drafted


def time_step(adapter: Adapter, methods: ComputeMethods, count: int = 1) -> float:
    """Seconds of a decode step of one row with `count` tokens, as it is once it has been compiled."""
    cache = adapter.make_cache()
    adapter.prefill(mx.array([[1, 1]]), cache, 0, TEXT_ONLY)
    mx.eval(list_all_arrays(cache))
    batch = make_decode_batch(adapter.make_cache(), methods, compiled_at_once=True)
    assert isinstance(batch, PagedDecodeBatch)
    batch.update(set(), [JoiningRow("trial", 2, cache)])
    decode = adapter.make_decode([BASE] * count * (TIMED_STEPS + 2))
    seconds = []
    for _ in range(TIMED_STEPS + 2):
        started = time.perf_counter()
        first = batch.lengths[0]
        with adapter.use_attention():
            logits = batch.forward(decode, mx.array([1] * count), range(first, first + count), [count])
        mx.eval(logits, *batch.list_state_arrays())
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[2:])  # the first ones compile
