"""Makes a model compute tokens at given positions, where the libraries count them from the cache's length.

A row whose prompt has gaps holds fewer tokens than its positions say. Caches, masks and the decode batch
count tokens; only the rotary embeddings take the positions of `use_positions`.

When a model is loaded, `PositionCheck` compares rows with gaps with the library's own calls. The library
computes runs of consecutive tokens, one after the other, with caches whose `offset` is the first token's
position. The engine computes them in chunks, and decodes beside a row without gaps.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxrun.model.kv.ragged.decode_batch import JoiningRow
from mlxrun.model.kv.ragged.layer_caches import LayerKind, flatten_caches, get_kind, unflatten_caches
from mlxrun.model.load_check.reference import STEPS, Reference
from mlxrun.model.load_check.report import LoadCheck
from mlxrun.model.load_check.rounding import CheckLogits
from mlxrun.model.run.compute_methods import ComputeMethods, make_decode_batch
from mlxrun.model.run.model_caller import ModelCaller
from mlxrun.model.run.prompt_inputs import PromptInputs, place_tokens

LENGTHS = (9, 23)  # tokens of the prompts: one beside it, and that with gaps
RUNS = ((0, 5), (9, 13), (17, 22))  # its kept tokens, besides the last one
CHUNK = 7  # tokens; a chunk ends inside a run
NAMES = ("positions", "positions with gaps")


class _Positions(threading.local):
    """Of the forward that this thread builds, or None. Each engine of a process has a thread."""

    current: mx.array | None = None


_POSITIONS = _Positions()


@contextmanager
def use_positions(positions: mx.array) -> Iterator[None]:
    """Within the block, forwards have these positions: int32 [tokens] of one row, or [rows] of one token
    each."""
    _POSITIONS.current = positions
    try:
        yield
    finally:
        _POSITIONS.current = None


class PositionedRope(nn.Module):
    """A rotary embedding that takes the positions of `use_positions` instead of the cache's offset."""

    def __init__(self, rope: nn.Module) -> None:
        super().__init__()
        self.rope = rope

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        """The rotated `x` [rows, heads, tokens, D]."""
        positions = _POSITIONS.current
        if positions is None:
            return self.rope(x, *args, **kwargs)
        if args:
            args = args[1:]
        kwargs = {**kwargs, "offset": positions}
        rows, _, tokens, _ = x.shape
        if tokens == 1 and rows == positions.size:
            return self.rope(x, *args, **kwargs)
        if rows != 1 or tokens != positions.size:
            raise ValueError(f"{positions.size} positions for {rows} rows of {tokens} tokens")
        turned: mx.array = self.rope(x.swapaxes(0, 2), *args, **kwargs)  # the tokens as rows
        return turned.swapaxes(0, 2)


def position_ropes(model: nn.Module) -> None:
    """Make the model's rotary embeddings take explicit positions. Idempotent."""
    for module in model.modules():
        if isinstance(module, PositionedRope):
            continue
        for name, value in list(module.items()):
            if (
                isinstance(value, nn.Module)
                and "rope" in type(value).__name__.lower()
                and "offset" in inspect.signature(type(value).__call__).parameters
            ):
                module[name] = PositionedRope(value)


class PositionedModelCaller(ModelCaller):
    """A caller of a text model whose rows may have gaps."""

    def __init__(self, caller: ModelCaller) -> None:
        super().__init__(caller.model, caller.weights, caller.row_adapters)
        position_ropes(caller.model)

    def prefill(self, ids: mx.array, cache: list[Any], start: int, inputs: PromptInputs) -> mx.array:
        if inputs.positions is None:
            return super().prefill(ids, cache, start, inputs)
        stop, known = start + ids.shape[1], inputs.positions.shape[0]
        positions = inputs.positions[start:stop]
        if stop > known:  # a preempted row: its answer so far goes on behind the whole prompt
            answer = mx.arange(max(start, known), stop, dtype=mx.int32) + inputs.position_delta
            positions = mx.concatenate([positions, answer])
        with use_positions(positions):
            return super().prefill(ids, cache, start, inputs)

    def decode(self, ids: mx.array, cache: list[Any], positions: Sequence[int] | mx.array) -> mx.array:
        rows = positions if isinstance(positions, mx.array) else mx.array(positions, dtype=mx.int32)
        with use_positions(rows):
            return super().decode(ids, cache, rows)


class PlacedCache:
    """A layer's cache whose `offset` is the position of the next token, and not the number of its tokens."""

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
        """The mask of the libraries' KVCache for N tokens after those in the cache. ValueError for a
        window."""
        if window_size is not None:
            raise ValueError("the model has a window of its own")
        if return_array:
            return mx.arange(self.held, self.held + N)[:, None] >= mx.arange(self.held + N)[None]
        return None if N == 1 else "causal"


def make_placed_caches(template: Sequence[Any]) -> list[Any]:
    """PlacedCaches for the keys, and the library's own caches for recurrent states. `template`: new, empty
    caches."""
    layers = flatten_caches(template)
    placed = [PlacedCache() if get_kind(layer) is LayerKind.KV else layer for layer in layers]
    return unflatten_caches(template, placed)


def place_caches(caches: Sequence[Any], position: int) -> None:
    """Set the position of the next token."""
    for cache in flatten_caches(caches):
        if isinstance(cache, PlacedCache):
            cache.offset = position


class PositionCheck:
    """Compares rows with gaps. `methods`: how the model decodes."""

    def __init__(self, caller: PositionedModelCaller, vocab: int, methods: ComputeMethods) -> None:
        self._caller = caller
        self._methods = methods
        self._reference = Reference(caller, vocab, LENGTHS)

    def run(self) -> tuple[LoadCheck, LoadCheck]:
        """The checks: all tokens at explicit positions against a plain prompt, and a prompt with gaps."""
        whole = tuple(range(LENGTHS[1]))
        gaps = (*(at for start, stop in RUNS for at in range(start, stop)), LENGTHS[1] - 1)
        return (
            self._reference.check(NAMES[0], lambda: self._compute(whole)),
            self._reference.check(NAMES[1], lambda: self._compute(gaps), self._compute_runs),
        )

    def _compute(self, positions: tuple[int, ...]) -> CheckLogits:
        """Logits of the tokens behind the prompt's tokens at `positions`, as the engine computes them."""
        inputs, cache = place_tokens(positions), self._caller.make_cache()
        kept = [self._reference.prompts[1][at] for at in positions]
        for start in range(0, len(kept) - 1, CHUNK):
            ids = kept[start : min(start + CHUNK, len(kept) - 1)]
            self._caller.prefill(mx.array([ids]), cache, start, inputs)
        methods = replace(self._methods, quantization=None)
        batch = make_decode_batch(self._caller.make_cache(), methods, compiled_at_once=True)
        batch.update({"0", "1"}, [self._reference.make_row(0), JoiningRow("1", len(kept) - 1, cache)])
        logits: CheckLogits = {}
        for step in range(STEPS + 1):
            order = [int(rid) for rid in batch.ids]
            tokens = [self._read_token(row, step) for row in order]
            places = [LENGTHS[row] - 1 + step for row in order]
            found = self._reference.forward(batch, tokens, places)
            logits |= {(row, step): found[index] for index, row in enumerate(order) if row == 1}
        return logits

    def _compute_runs(self) -> CheckLogits:
        """The same by the library, for the prompt with gaps."""
        prompt, caches = self._reference.prompts[1], make_placed_caches(self._caller.make_cache())
        for start, stop in RUNS:
            self._call(prompt[start:stop], start, caches)
        return {
            (1, step): self._call([self._read_token(1, step)], LENGTHS[1] - 1 + step, caches)[0, -1]
            for step in range(STEPS + 1)
        }

    def _call(self, ids: list[int], position: int, caches: list[Any]) -> mx.array:
        place_caches(caches, position)
        logits: mx.array = self._caller.text_model(mx.array([ids]), cache=caches)
        mx.eval(logits)
        return logits

    def _read_token(self, row: int, step: int) -> int:
        return self._reference.inputs[row][step]
