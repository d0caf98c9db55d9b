"""Compares rows with gaps with the library's own calls, when a model is loaded that prefills sparsely.

The library computes runs of consecutive tokens, one after the other, with caches whose `offset` is the first
token's position; the engine computes them in chunks, and decodes beside a row without gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlxrun.model.kv.ragged.decode_batch import JoiningRow
from mlxrun.model.kv.ragged.layer_caches import LayerKind, flatten_caches, get_kind, unflatten_caches
from mlxrun.model.probe.reference import STEPS, Reference
from mlxrun.model.probe.report import ProbeCheck
from mlxrun.model.probe.rounding import ProbeLogits
from mlxrun.model.run.compute_methods import ComputeMethods, make_decode_batch
from mlxrun.model.run.prompt_inputs import place_tokens
from mlxrun.model.sparse.explicit_positions import PositionedAdapter

LENGTHS = (9, 23)  # tokens of the prompts: one beside it, and that with gaps
RUNS = ((0, 5), (9, 13), (17, 22))  # its kept tokens, besides the last one
CHUNK = 7  # tokens; a chunk ends inside a run
NAMES = ("positions", "positions with gaps")


class PlacedCache:
    """A layer's cache whose `offset` is the position of the next token, and not how many it holds."""

    def __init__(self) -> None:
        self.offset = 0
        self.keys: mx.array | None = None
        self.values: mx.array | None = None

    @property
    def held(self) -> int:
        """Tokens in the cache."""
        return 0 if self.keys is None else int(self.keys.shape[2])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.keys is not None and self.values is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values = keys, values
        return keys, values

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        """The mask of the libraries' KVCache for tokens behind those that the cache holds."""
        if window_size is not None:
            raise ValueError("the model has a window of its own")
        if return_array:
            return mx.arange(self.held, self.held + N)[:, None] >= mx.arange(self.held + N)[None]
        return None if N == 1 else "causal"


def make_placed_caches(template: Sequence[Any]) -> list[Any]:
    """Empty caches that can be placed, and the library's own for recurrent states. `template`: unused."""
    layers = flatten_caches(template)
    placed = [PlacedCache() if get_kind(layer) is LayerKind.KV else layer for layer in layers]
    return unflatten_caches(template, placed)


def place_caches(caches: Sequence[Any], position: int) -> None:
    """The next token that is computed has this position."""
    for cache in flatten_caches(caches):
        if isinstance(cache, PlacedCache):
            cache.offset = position


class PositionCheck:
    """`methods`: how the model decodes."""

    def __init__(self, adapter: PositionedAdapter, vocab: int, methods: ComputeMethods) -> None:
        self._adapter = adapter
        self._methods = methods
        self._reference = Reference(adapter, vocab, LENGTHS)

    def run(self) -> tuple[ProbeCheck, ProbeCheck]:
        """All tokens at explicit positions against a plain prompt; and a prompt with gaps."""
        whole = tuple(range(LENGTHS[1]))
        gaps = (*(at for start, stop in RUNS for at in range(start, stop)), LENGTHS[1] - 1)
        return (
            self._reference.check(NAMES[0], lambda: self._compute(whole)),
            self._reference.check(NAMES[1], lambda: self._compute(gaps), self._compute_runs),
        )

    def _compute(self, positions: tuple[int, ...]) -> ProbeLogits:
        """Logits of the tokens behind the prompt's tokens at `positions`, as the engine computes them."""
        prompt, inputs, cache = (
            self._reference.prompts[1],
            place_tokens(positions),
            self._adapter.make_cache(),
        )
        kept = [prompt[at] for at in positions]
        for start in range(0, len(kept) - 1, CHUNK):
            ids = kept[start : min(start + CHUNK, len(kept) - 1)]
            self._adapter.prefill(mx.array([ids]), cache, start, inputs)
        methods = replace(self._methods, quantization=None)
        batch = make_decode_batch(self._adapter.make_cache(), methods, compiled_at_once=True)
        beside = JoiningRow("0", LENGTHS[0] - 1, self._reference.copy_filled(0))
        batch.update({"0", "1"}, [beside, JoiningRow("1", len(kept) - 1, cache)])
        logits: ProbeLogits = {}
        for step in range(STEPS + 1):
            order = [int(rid) for rid in batch.ids]
            tokens = mx.array([self._read_token(row, step) for row in order])
            places = [LENGTHS[row] - 1 + step for row in order]
            found = batch.forward(self._adapter.decode, tokens, places)
            logits |= {(row, step): found[index] for index, row in enumerate(order) if row == 1}
            mx.eval(found, *batch.list_state_arrays())
        return logits

    def _compute_runs(self) -> ProbeLogits:
        """The same by the library, for the prompt with gaps."""
        prompt, caches = self._reference.prompts[1], self._make_placed_caches()
        for start, stop in RUNS:
            self._call(prompt[start:stop], start, caches)
        return {
            (1, step): self._call([self._read_token(1, step)], LENGTHS[1] - 1 + step, caches)[0, -1]
            for step in range(STEPS + 1)
        }

    def _make_placed_caches(self) -> list[Any]:
        return make_placed_caches(self._adapter.make_cache())

    def _call(self, ids: list[int], position: int, caches: list[Any]) -> mx.array:
        place_caches(caches, position)
        logits: mx.array = self._adapter.text_model(mx.array([ids]), cache=caches)
        mx.eval(logits)
        return logits

    def _read_token(self, row: int, step: int) -> int:
        return [self._reference.prompts[row][-1], *self._reference.answers[row]][step]
