"""The probe's prompts, and the logits that the library's own calls give for each of them by itself.

Logits are compared by (prompt, step): step 0 follows the prompt's last token, step n the nth token after it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrun.model.adapter import Adapter
from mlxrun.model.machine.device import may_shorten_float32
from mlxrun.model.probe.report import ProbeCheck
from mlxrun.model.probe.windows import reduce_windows
from mlxrun.model.prompt_inputs import TEXT_ONLY
from mlxrun.model.ragged import layer_caches
from mlxrun.model.ragged.attention import use_engine_attention
from mlxrun.model.ragged.layer_caches import LayerKind

log = logging.getLogger(__name__)

ProbeLogits = dict[tuple[int, int], mx.array]  # logits [V], lazy, by prompt and step
ProbeRun = Callable[[], ProbeLogits]
LENGTHS = (14, 3, 23)  # tokens of the prompts: different on purpose, and the longest crosses every window
# Tokens decoded after each prompt. Few, as each forward takes the time of reading all weights; enough for the
# first row to move from one row group to another (text_checks.SHORTEST).
STEPS = 2
# Largest difference of logits that counts as rounding, in units of their standard deviation.
TOLERANCE = {mx.float32: 5e-3, mx.bfloat16: 0.25, mx.float16: 0.1}
# In half precision: at least so many times the model's own rounding, at most so many times TOLERANCE.
NOISE_FACTOR, MAX_TOLERANCE = 2.0, 4.0
ROUNDED_SHARE = 0.2  # of what quantised keys and values change: so much counts as rounding


class Reference:
    """`reduced`: large windows are reduced (windows.py). `lengths`: tokens of the prompts. Caches of prompts
    are computed once, and copied for each check."""

    def __init__(
        self, adapter: Adapter, vocab: int, lengths: Sequence[int] = LENGTHS, reduced: bool = True
    ) -> None:
        self.adapter = adapter
        self._reduced = reduced
        random = np.random.default_rng(7)
        ids = [random.integers(0, vocab, max(lengths) + STEPS + 1).tolist() for _ in lengths]
        self.prompts = [row[:n] for row, n in zip(ids, lengths, strict=True)]
        self.answers = [row[n : n + STEPS] for row, n in zip(ids, lengths, strict=True)]
        self._filled = [self._prefill(i) for i in range(len(lengths))]
        arrays = [a for cache in self._filled for a in layer_caches.list_all_arrays(cache)]
        mx.eval(arrays)
        self._logits: ProbeLogits = {}
        for index in range(len(lengths)):
            self._logits |= self.decode_answer(index, self.copy_filled(index), STEPS)
        mx.eval(list(self._logits.values()))
        self.tolerance = self._choose_tolerance(arrays[0].dtype if arrays else mx.bfloat16)

    def add_logits(self, logits: ProbeLogits) -> None:
        """Add the logits of another prompt."""
        mx.eval(list(logits.values()))
        self._logits |= logits

    def make_cache(self) -> list[Any]:
        """Empty single-row caches, with reduced windows."""
        cache = self.adapter.make_cache()
        if self._reduced:
            reduce_windows(cache)
        return cache

    def copy_filled(self, index: int) -> list[Any]:
        """Caches that hold all but the last token of a prompt, prefilled by one forward."""
        copied = copy_cache(self._filled[index])
        return self._prefill(index) if copied is None else copied

    def _prefill(self, index: int) -> list[Any]:
        cache = self.make_cache()
        self.adapter.prefill(mx.array([self.prompts[index][:-1]]), cache, 0, TEXT_ONLY)
        return cache

    def decode_answer(self, index: int, cache: list[Any], stop: int = 0, start: int = 0) -> ProbeLogits:
        """Logits of steps `start` to `stop`, both included, of one row in each forward."""
        prompt, answer = self.prompts[index], self.answers[index]
        tokens, logits = [prompt[-1], *answer], {}
        for step in range(start, stop + 1):
            position = len(prompt) - 1 + step
            logits[index, step] = self.adapter.decode(mx.array([[tokens[step]]]), cache, [position])[0, -1]
        return logits

    def check(
        self, name: str, run: ProbeRun, expected: ProbeRun | None = None, *, exact: bool = False
    ) -> ProbeCheck:
        """Compare the result of a run with the reference's logits, or with those of `expected`; if it raises,
        the check fails. `expected` rounds what the reference has: a part of what that changes is allowed,
        since a number that lies between two steps may be rounded either way. `exact`: no rounding is."""
        limit = 0.0 if exact else self.tolerance
        try:
            with use_engine_attention():
                found = run()
            rounded = None if expected is None else expected()
            worst = compare_logits(found, self._logits if rounded is None else rounded)
            if rounded is not None:
                known = {key: value for key, value in rounded.items() if key in self._logits}
                changed = ROUNDED_SHARE * compare_logits(known, self._logits)
                limit = min(max(limit, changed), MAX_TOLERANCE * limit)
        except Exception as error:  # a library may raise anything for what it was not made for
            log.debug("parity probe: %s raised", name, exc_info=True)
            return ProbeCheck(name, False, error=f"{type(error).__name__}: {error}", limit=limit)
        return ProbeCheck(name, bool(worst <= limit), worst, limit=limit)

    def _choose_tolerance(self, dtype: mx.Dtype) -> float:
        """The largest difference that counts as rounding. In half precision, and where a GPU rounds float32
        as float16, it is measured: the same prompts token by token round differently, and in a mixture of
        experts may choose other experts. By the engine's attention, since a CPU's rounds otherwise than the
        library's, and quantised layers add to that."""
        tolerance = TOLERANCE.get(dtype, TOLERANCE[mx.bfloat16])
        most = MAX_TOLERANCE * tolerance
        if dtype == mx.float32:
            if not may_shorten_float32():
                return tolerance
            most = TOLERANCE[mx.float16]
        logits: ProbeLogits = {}
        with use_engine_attention():
            for index in range(len(self.prompts))[:2]:  # the longest takes too many forwards
                logits |= self._decode_prompt(index)
            noise = compare_logits(logits, self._logits)
        return min(max(tolerance, NOISE_FACTOR * noise), most)

    def _decode_prompt(self, index: int) -> ProbeLogits:
        """The logits of a prompt's answer, with its prompt computed token by token."""
        cache = self.make_cache()
        for position, token in enumerate(self.prompts[index][:-1]):
            mx.eval(self.adapter.decode(mx.array([[token]]), cache, [position]))
        return self.decode_answer(index, cache, STEPS)


def copy_cache(cache: Sequence[Any]) -> list[Any] | None:
    """Evaluated caches of one row with array objects of their own; None if there is one of another class."""
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


def compare_logits(logits: ProbeLogits, reference: ProbeLogits) -> float:
    """The largest difference of two sets of logits, in standard deviations of the reference."""
    found = np.array(mx.stack(list(logits.values())).astype(mx.float32))
    expected = np.array(mx.stack([reference[key] for key in logits]).astype(mx.float32))
    differences = np.abs(found - expected).max(axis=1) / (expected.std(axis=1) + 1e-9)
    return float(differences.max())
