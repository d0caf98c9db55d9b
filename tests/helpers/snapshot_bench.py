"""A tiny model with its snapshots, for tests that save and restore rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrun.core.request import HitKind
from mlxrun.core.step_plan import CacheHit
from mlxrun.model.hooks import attention
from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.kv.snapshot.snapshots import SnapshotCodec
from mlxrun.model.run.model_caller import ModelCaller, VisionModelCaller, run_trial_forward
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from tests.helpers.model_fixtures import Zoo

TOLERANCE = 1e-4
LENGTH = 40
PLACES = (5, 8, 21, 39)  # before, at and past the windows of 8; one token before the end


class Bench:
    """A model, its snapshots, and rows of it."""

    def __init__(self, caller: ModelCaller, bits: int | None = None) -> None:
        self.caller = caller
        self.snapshots = SnapshotCodec(run_trial_forward(caller)[0], bits)
        assert self.snapshots.problem is None

    def fill(self, ids: Sequence[int], cache: list[Any] | None = None, start: int = 0, chunk: int = 7) -> Any:
        """Prefill on; returns cache and the last logits."""
        cache = (
            layer_caches.reserve_capacity(self.caller.make_cache(), len(ids) + 8) if cache is None else cache
        )
        logits = None
        for first in range(start, len(ids), chunk):
            part = mx.array([list(ids[first : first + chunk])])
            logits = self.caller.prefill(part, cache, first, TEXT_ONLY)[:, -1]
            mx.eval(layer_caches.list_all_arrays(cache), logits)
        return cache, logits

    def decode(self, cache: list[Any], logits: mx.array, length: int, count: int = 6) -> Any:
        """Greedy answer and all logits on the way."""
        tokens, rows = [], [np.array(logits[0].astype(mx.float32))]
        for step in range(count):
            tokens.append(int(rows[-1].argmax()))
            logits = self.caller.decode(mx.array([[tokens[-1]]]), cache, [length + step])[:, -1]
            rows.append(np.array(logits[0].astype(mx.float32)))
        return tokens, np.stack(rows)

    def answer(
        self, ids: Sequence[int], cache: list[Any] | None = None, start: int = 0, chunk: int = 7
    ) -> Any:
        cache, logits = self.fill(ids, cache, start, chunk)
        return self.decode(cache, logits, len(ids))

    def save(self, view: layer_caches.RowView, length: int, ends: Sequence[int] = ()) -> CacheHit:
        """Evaluated payloads of a row; its deltas end at these positions."""
        edges = [0, *(c for c in ends if c < length), length]
        deltas: list[tuple[int, int, Any]] = []
        if self.snapshots.has_deltas:
            spans = list(zip(edges, edges[1:], strict=False))
            deltas = [(a, b, self.snapshots.copy_delta(view, a, b)) for a, b in spans]
        state = self.snapshots.copy_state(view, length) if self.snapshots.has_states else None
        payloads = [p for _, _, p in deltas] + ([] if state is None else [state])
        mx.eval([a for p in payloads for a in self.snapshots.list_arrays(p)])
        return CacheHit(length, HitKind.PREFIX, tuple(deltas), state)

    def restore(self, hit: CacheHit, capacity: int = LENGTH) -> list[Any]:
        return self.snapshots.restore(hit, capacity, self.caller.make_cache())

    def through_bytes(self, hit: CacheHit) -> CacheHit:
        def again(payload: Any) -> Any:
            return self.snapshots.decode(self.snapshots.encode(payload))

        deltas = tuple((a, b, again(p)) for a, b, p in hit.deltas)
        return replace(hit, deltas=deltas, state=None if hit.state is None else again(hit.state))


def caller(zoo: Zoo, family: str, kind: str = "text") -> ModelCaller:
    if kind == "text":
        from mlx_lm import load

        return ModelCaller(routed(load(str(zoo.text(family)))[0]))
    from mlx_vlm import load as load_vision

    return VisionModelCaller(routed(load_vision(str(zoo.vision(family)))[0]))


def routed(model: Any) -> Any:
    attention.hook_attention(model)
    return model


def same(found: Any, wanted: Any, tolerance: float = TOLERANCE) -> bool:
    return found[0] == wanted[0] and float(np.abs(found[1] - wanted[1]).max()) < tolerance
