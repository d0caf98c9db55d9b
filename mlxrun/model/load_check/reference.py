"""The load check's prompts, and the library's logits of each of them by itself.

Logits are compared by (prompt, step): step 0 follows the prompt's last token, step n the nth token after it.

Sliding windows of the caches are reduced, so that short prompts cross them. A layer attends to as many tokens
as its cache keeps and its mask allows. Both follow from `max_size` and from the `window_size` that the model
passes to `make_mask`, so a reduced cache lowers both by the same number.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrun.model.hooks.engine_attention import AttentionCall
from mlxrun.model.kv.ragged import layer_caches
from mlxrun.model.kv.ragged.decode_batch import JoiningRow
from mlxrun.model.kv.ragged.layer_caches import LayerKind, flatten_caches, get_window
from mlxrun.model.load_check.report import LoadCheck, run_check
from mlxrun.model.load_check.rounding import (
    MAX_TOLERANCE,
    NOISE_FACTOR,
    TOLERANCE,
    CheckLogits,
    LogitDifference,
    LowPrecisionRounding,
    compare_logits,
    read_in_float32,
)
from mlxrun.model.machine.device import may_shorten_float32
from mlxrun.model.run.compute_methods import AnyDecodeBatch
from mlxrun.model.run.model_caller import ModelCaller

CheckRun = Callable[[], CheckLogits]
LENGTHS = (14, 3, 23)  # tokens of the prompts: different on purpose, and the longest crosses reduced windows
# Tokens decoded after each prompt. Few, as each forward takes the time of reading all weights; enough for the
# first row to move from one row group to another (text_checks.SHORTEST).
STEPS = 2
ROUNDED_SHARE = 0.2  # of what quantized keys and values change: so much counts as rounding
REDUCED = 8  # tokens of the windows that the load check computes with, unless the model's are smaller


class Reference:
    """The library's logits of short prompts.

    `reduced`: large windows are reduced. `lengths`: tokens of the prompts. Caches of prompts are computed
    once, and copied for each check. `attention_check`: called before each call of the engine's attention
    while a method is compared.
    """

    steps = STEPS
    suffix = ""  # of the names of checks

    def __init__(
        self,
        caller: ModelCaller,
        vocab: int,
        lengths: Sequence[int] = LENGTHS,
        reduced: bool = True,
        attention_check: AttentionCall | None = None,
    ) -> None:
        self.caller = caller
        self._reduced = reduced
        self.attention_check = attention_check
        random = np.random.default_rng(7)
        sampled = [random.integers(0, vocab, max(lengths) + STEPS + 1).tolist() for _ in lengths]
        held = caller.media_tokens  # a library may ask for the images that these stand for
        free = next(token for token in range(vocab) if token not in held)
        ids = [[free if token in held else token for token in row] for row in sampled]
        self.prompts = [row[:n] for row, n in zip(ids, lengths, strict=True)]
        # What is decoded after each prompt's caches: its last token, and its answer.
        self.inputs = [row[n - 1 : n + STEPS] for row, n in zip(ids, lengths, strict=True)]
        self._filled = [self._prefill(i) for i in range(len(lengths))]
        self.logits: CheckLogits = {}  # the library's, evaluated
        for index in self.compared:
            self.logits |= self._decode_by_library(index, self.copy_filled(index))
        mx.eval(list(self.logits.values()))
        types = [a.dtype for a in layer_caches.list_all_arrays(self._filled[0])]
        self._choose_limits(next((dtype for dtype in types if dtype in TOLERANCE), mx.bfloat16))

    @property
    def compared(self) -> Sequence[int]:
        """The prompts whose logits are compared."""
        return range(len(self.prompts))

    def add_logits(self, compute: CheckRun) -> None:
        """Add the logits of another prompt, which `compute` makes by the library's own calls."""
        logits = compute()
        mx.eval(list(logits.values()))
        self.logits |= logits
        if self._rounding is not None:
            with read_in_float32(self.caller.model):
                exact = compute()
                mx.eval(list(exact.values()))
            self._rounding.add(logits, exact)

    def make_cache(self) -> list[Any]:
        """Empty single-row caches, with reduced windows."""
        cache = self.caller.make_cache()
        if self._reduced:
            reduce_windows(cache)
        return cache

    def copy_start(self, index: int) -> tuple[list[Any], int]:
        """Caches with the first tokens of a prompt that no method computes, and the number of these tokens: 0
        here."""
        return self.make_cache(), 0

    def copy_filled(self, index: int) -> list[Any]:
        """Caches with all but the last token of a prompt, prefilled by one forward."""
        copied = copy_cache(self._filled[index])
        return self._prefill(index) if copied is None else copied

    def _prefill(self, index: int, wide: bool = False) -> list[Any]:
        """`wide`: what is there at the start is turned into float32."""
        cache, start = self.copy_start(index)
        if wide:
            widen_cache(cache)
        self.caller.call_library(self.prompts[index][start:-1], cache, start)
        mx.eval(layer_caches.list_all_arrays(cache))
        return cache

    def _decode_by_library(self, index: int, cache: list[Any]) -> CheckLogits:
        """Logits of all steps of a row."""
        call, start = self.caller.call_library, len(self.prompts[index]) - 1
        tokens = enumerate(self.inputs[index][: self.steps + 1])
        return {(index, step): call([token], cache, start + step)[0, -1] for step, token in tokens}

    def decode_answer(self, index: int, cache: list[Any], stop: int = 0, start: int = 0) -> CheckLogits:
        """Logits of steps `start` to `stop`, both included, of one row in each forward, as the engine calls
        the model."""
        tokens, before = self.inputs[index], len(self.prompts[index]) - 1
        return {
            (index, step): self.caller.decode(mx.array([[tokens[step]]]), cache, [before + step])[0, -1]
            for step in range(start, stop + 1)
        }

    def make_row(self, index: int, name: str | None = None) -> JoiningRow:
        """A prompt as a row of the decode batch. Its name is its index by default."""
        return JoiningRow(name or str(index), len(self.prompts[index]) - 1, self.copy_filled(index))

    def forward(
        self,
        batch: AnyDecodeBatch,
        tokens: Sequence[int],
        positions: Sequence[int] | None = None,
        *counts: Sequence[int],
    ) -> mx.array:
        """Evaluated logits of a decode step. `positions`: those of text if None; `counts`: tokens of each
        row."""
        places = batch.lengths if positions is None else positions
        output = batch.forward(self.caller.decode, mx.array(tokens), places, *counts)
        mx.eval(output, batch.list_state_arrays())
        return output

    def check(
        self,
        name: str,
        run: CheckRun,
        expected: CheckRun | None = None,
        *,
        exact: bool = False,
        instead: str = "",
    ) -> LoadCheck:
        """Compare the result of a run with the reference's logits, or with those of `expected`. A run that
        raises fails the check. `expected` rounds the reference. A part of this change is allowed, since a
        number between two steps may be rounded either way. `exact`: no rounding is allowed."""

        def compare() -> LogitDifference:
            with self.caller.use_attention(check=self.attention_check):
                found = run()
                mx.eval(list(found.values()))
            return self._compare(found, None if expected is None else expected(), exact)

        return run_check(name, compare, self.tolerance, instead)

    def _compare(self, found: CheckLogits, expected: CheckLogits | None, exact: bool) -> LogitDifference:
        limit = 0.0 if exact else self.tolerance
        if expected is None:
            if self._rounding is not None and not exact:
                return self._rounding.compare(found)
            return LogitDifference(compare_logits(found, self.logits), limit)
        known = {key: value for key, value in expected.items() if key in self.logits}
        changed = ROUNDED_SHARE * compare_logits(known, self.logits)
        limit = min(max(limit, changed), MAX_TOLERANCE * limit)
        return LogitDifference(compare_logits(found, expected), limit)

    def _choose_limits(self, dtype: mx.Dtype) -> None:
        """Set `tolerance`, the largest difference of single logits that counts as rounding, and for half
        precision `_rounding`, which knows better. Both come from the library alone."""
        self._rounding: LowPrecisionRounding | None = None
        self.tolerance = TOLERANCE.get(dtype, TOLERANCE[mx.bfloat16])
        most = MAX_TOLERANCE * self.tolerance
        if dtype == mx.float32:
            if not may_shorten_float32():
                return
            most = TOLERANCE[mx.float16]
            noise = compare_logits(self.compute_by_token(), self.logits)
        else:
            exact = self._compute_exactly()
            noise = compare_logits(self.logits, exact)
            self._rounding = LowPrecisionRounding(dtype, self.logits, exact)
        self.tolerance = min(max(self.tolerance, NOISE_FACTOR * noise), most)

    def _compute_exactly(self) -> CheckLogits:
        """The logits of the library's model with its parameters in float32."""
        logits: CheckLogits = {}
        with read_in_float32(self.caller.model):
            for index in self.compared:
                row = self._decode_by_library(index, self._prefill(index, wide=True))
                mx.eval(list(row.values()))
                logits |= row
        return logits

    def compute_by_token(self) -> CheckLogits:
        """The logits of the library's model with the first two prompts computed token by token: the longest
        takes too many forwards."""
        logits: CheckLogits = {}
        for index in self.compared[:2]:
            prompt = self.prompts[index]
            cache, start = self.copy_start(index)
            for position in range(start, len(prompt) - 1):
                mx.eval(self.caller.call_library(prompt[position : position + 1], cache, position))
            logits |= self._decode_by_library(index, cache)
        return logits


def copy_cache(cache: Sequence[Any]) -> list[Any] | None:
    """Evaluated caches of one row with their own array objects. None if a cache is of another class."""
    layers = []
    for layer in layer_caches.flatten_caches(cache):
        kind, row = layer_caches.get_kind(layer), copy.copy(layer)
        if kind is LayerKind.OTHER:
            return None
        if kind is LayerKind.STATE:
            row.cache = [a if a is None else a[...] for a in layer.cache]
        elif layer.keys is not None:
            row.keys, row.values = layer.keys[...], layer.values[...]
        layers.append(row)
    return layer_caches.unflatten_caches(cache, layers)


def widen_cache(cache: Sequence[Any]) -> None:
    """Turn the arrays of caches that `copy_cache` copies into float32."""
    for layer in layer_caches.flatten_caches(cache):
        kind = layer_caches.get_kind(layer)
        if kind is LayerKind.STATE:
            layer.cache = [a if a is None else a.astype(mx.float32) for a in layer.cache]
        elif kind is not LayerKind.OTHER and layer.keys is not None:
            layer.keys, layer.values = layer.keys.astype(mx.float32), layer.values.astype(mx.float32)


def list_windows(cache: Sequence[Any]) -> list[int]:
    """The different sizes of windows, in tokens, smallest first."""
    found = (get_window(layer) for layer in flatten_caches(cache))
    return sorted({window for window in found if window is not None})


def reduce_windows(cache: Sequence[Any]) -> None:
    """Reduce the windows of empty caches."""
    for layer in flatten_caches(cache):
        window = get_window(layer)
        if window is not None and window > REDUCED:
            layer.__class__ = _derive_class(layer.__class__)
            layer.measure_shift, layer.max_size = window - REDUCED, REDUCED


@functools.cache
def _derive_class(library: Any) -> Any:
    """A class of the library's name and module, by which caches are told apart."""

    def make_mask(self: Any, N: int, window_size: int | None = None, return_array: bool = False) -> Any:
        if window_size is not None:
            window_size = max(window_size - self.measure_shift, 1)
        return library.make_mask(self, N, window_size=window_size, return_array=return_array)

    return type(library.__name__, (library,), {"__module__": library.__module__, "make_mask": make_mask})
