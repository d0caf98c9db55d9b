"""Checks, at load and in `mlxrun doctor`, that the fast compute methods give what the safe ones give.

A few short prompts are computed one by one, and then batched; logits are compared. A method that differs is
replaced by the next safer one, and a warning is logged. No model is trusted because of its name: libraries
keep having bugs of this kind.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, get_args

import mlx.core as mx
import numpy as np

from mlxrun.config.settings import Config
from mlxrun.model.adapter import Adapter
from mlxrun.model.chunk_grouping import PrefillSharing
from mlxrun.model.compute_methods import (
    ComputeMethods,
    DecodeMethod,
    can_batch,
    can_stack,
    find_padding_limit,
    make_decode_batch,
)
from mlxrun.model.machine.device import uses_cuda, uses_gpu
from mlxrun.model.prompt_inputs import TEXT_ONLY
from mlxrun.model.quantized_layers import use_library_products
from mlxrun.model.ragged import layer_caches
from mlxrun.model.ragged.attention import use_engine_attention
from mlxrun.model.ragged.decode_batch import JoiningRow
from mlxrun.model.weight_form import PLAIN_WEIGHTS, WeightForm
from mlxrun.scheduler.scheduler import DEFAULT_CHUNK

log = logging.getLogger(__name__)

RowLogits = list[np.ndarray[Any, Any]]  # logits [V] of each step
ProbeRun = Callable[[], list[RowLogits]]  # of each prompt
LENGTHS = (12, 3, 23)  # tokens of the probe's prompts: different on purpose
SHORTEST = 8  # so that these rows make two row groups, and the first moves from one to the other
STEPS = 4  # tokens decoded after each
# Largest difference of logits that counts as rounding, in units of their standard deviation.
TOLERANCE = {mx.float32: 5e-3, mx.bfloat16: 0.25, mx.float16: 0.1}
# In half precision: at least so many times the model's own rounding, at most so many times TOLERANCE.
NOISE_FACTOR, MAX_TOLERANCE = 2.0, 4.0


@dataclass(frozen=True, slots=True)
class ProbeCheck:
    """One comparison. `difference`: largest |logits - reference| / std; None if the method raised `error`.
    `limit`: the largest difference that passes."""

    name: str
    passed: bool
    difference: float | None = None
    error: str | None = None
    limit: float | None = None

    def describe(self) -> str:
        """The result as words: the error, or the difference and its limit."""
        if self.difference is None:
            return str(self.error)
        limit = "" if self.limit is None else f" (limit {self.limit:g})"
        return f"logits differ by {self.difference:.1e} standard deviations{limit}"


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """How the model is computed, and the comparisons that led there. `weights`: their form in memory."""

    methods: ComputeMethods
    checks: tuple[ProbeCheck, ...]
    weights: WeightForm = PLAIN_WEIGHTS


def choose_methods(adapter: Adapter, vocab: int, config: Config) -> ProbeReport:
    """The fastest methods that this model passes; with `engine.probe` off, the fastest possible ones."""
    candidate = _choose_candidate(adapter.make_cache(), config)
    if not config.engine.probe or candidate.decode == "row_by_row":
        return ProbeReport(candidate, (), adapter.weights)
    with use_library_products(adapter.model):
        methods, checks = _compare_methods(_Reference(adapter, vocab), candidate)
    for check in checks:
        if not check.passed:
            log.warning("parity probe: %s is not used for this model: %s", check.name, check.describe())
    return ProbeReport(methods, tuple(checks), adapter.weights)


def _compare_methods(
    reference: _Reference, candidate: ComputeMethods
) -> tuple[ComputeMethods, list[ProbeCheck]]:
    """The methods of the candidate that pass, and what was compared."""
    checks: list[ProbeCheck] = []

    def passes(name: str, run: ProbeRun) -> bool:
        checks.append(reference.check(name, run))
        return checks[-1].passed

    decode: DecodeMethod = "row_by_row"
    for method in get_args(DecodeMethod)[:2]:
        if passes(f"decode {method}", partial(reference.decode, method, candidate.fixed_width)):
            decode = method
            break
    rows, padded = candidate.sharing.max_rows, candidate.sharing.max_padded
    if rows > 1 and not passes("prefill equal lengths", reference.prefill_equal):
        rows = 1
    if rows > 1 and padded and not passes("prefill padded", partial(reference.prefill_padded, padded)):
        padded = 0
    tails = rows > 1 and candidate.sharing.tails
    if tails and not passes("prefill tails", partial(reference.prefill_tails, padded > 0)):
        tails = False
    sharing = replace(candidate.sharing, max_rows=rows, max_padded=padded, tails=tails)
    return replace(candidate, decode=decode, sharing=sharing), checks


def _choose_candidate(template: Sequence[Any], config: Config) -> ComputeMethods:
    """The fastest methods, by the kinds of the model's caches and the config only."""
    scheduler, gpu = config.scheduler, uses_gpu()
    if config.engine.reproducible:
        # A CPU's BLAS rounds a row by its position among the others: there each row is computed by itself.
        decode: DecodeMethod = "ragged" if gpu and can_batch(template) else "row_by_row"
        return ComputeMethods(decode, PrefillSharing(), scheduler.max_running, uses_cuda())
    if not can_batch(template):
        return ComputeMethods("row_by_row")
    padded = find_padding_limit(
        template, scheduler.prefill_budget if gpu else scheduler.chunk or DEFAULT_CHUNK
    )
    sharing = PrefillSharing(scheduler.prefill_rows, padded, merge_chunks=gpu, tails=can_stack(template))
    return ComputeMethods("ragged", sharing, launch_first=uses_cuda())


class _Reference:
    """The probe's prompts, and the logits that the model gives for each of them by itself."""

    def __init__(self, adapter: Adapter, vocab: int) -> None:
        self._adapter = adapter
        random = np.random.default_rng(7)
        ids = [random.integers(0, vocab, LENGTHS[-1] + STEPS + 1).tolist() for _ in LENGTHS]
        self._prompts = [row[:n] for row, n in zip(ids, LENGTHS, strict=True)]
        self._answers = [row[n : n + STEPS] for row, n in zip(ids, LENGTHS, strict=True)]
        caches = [self._prefill(i) for i in range(len(LENGTHS))]
        self._logits = [self._decode_answer(i, cache) for i, cache in enumerate(caches)]
        dtypes = [a.dtype for a in layer_caches.list_all_arrays(caches[0])]
        self._tolerance = self._choose_tolerance(dtypes[0] if dtypes else mx.bfloat16)

    def _choose_tolerance(self, dtype: mx.Dtype) -> float:
        """The largest difference that counts as rounding. In half precision it is measured: the same prompt
        token by token rounds differently, and in a mixture of experts may choose other experts."""
        tolerance = TOLERANCE.get(dtype, TOLERANCE[mx.bfloat16])
        if dtype == mx.float32:
            return tolerance
        noise = _compare([self._decode_prompt(0)], self._logits[:1])
        return min(max(tolerance, NOISE_FACTOR * noise), MAX_TOLERANCE * tolerance)

    def check(self, name: str, run: ProbeRun) -> ProbeCheck:
        """Compare the result of a run; if it raises, the check fails."""
        try:
            with use_engine_attention():
                logits = run()
        except Exception as error:  # a library may raise anything for what it was not made for
            log.debug("parity probe: %s raised", name, exc_info=True)
            return ProbeCheck(name, False, error=f"{type(error).__name__}: {error}")
        worst = _compare(logits, self._logits)
        return ProbeCheck(name, bool(worst <= self._tolerance), worst, limit=self._tolerance)

    def _prefill(self, index: int) -> list[Any]:
        """A row's caches with all but the last token of a prompt."""
        cache = self._adapter.make_cache()
        self._adapter.prefill(mx.array([self._prompts[index][:-1]]), cache, 0, TEXT_ONLY)
        mx.eval(layer_caches.list_all_arrays(cache))
        return cache

    def _decode_prompt(self, index: int) -> RowLogits:
        """The logits of a prompt's answer, with its prompt computed token by token."""
        cache = self._adapter.make_cache()
        for position, token in enumerate(self._prompts[index][:-1]):
            mx.eval(self._adapter.decode(mx.array([[token]]), cache, [position]))
        return self._decode_answer(index, cache)

    def _decode_answer(self, index: int, cache: list[Any]) -> RowLogits:
        """Logits [V] after a prompt and after each token of its answer, one row in each forward."""
        prompt, logits = self._prompts[index], []
        for position, token in enumerate([prompt[-1], *self._answers[index]], len(prompt) - 1):
            logits.append(_to_numpy(self._adapter.decode(mx.array([[token]]), cache, [position])[0, -1]))
        return logits

    def decode(self, method: DecodeMethod, width: int) -> list[RowLogits]:
        """All rows in one batch; the second joins a step later than the others."""
        methods = ComputeMethods(method, fixed_width=width)
        batch = make_decode_batch(self._adapter.make_cache(), methods, SHORTEST)
        inputs = [[p[-1], *a] for p, a in zip(self._prompts, self._answers, strict=True)]
        logits: list[RowLogits] = [[] for _ in inputs]
        late = 1
        for step in range(STEPS + 2):
            joining = [late] if step == 1 else [i for i in range(len(inputs)) if i != late and step == 0]
            rows = [JoiningRow(str(i), len(self._prompts[i]) - 1, self._prefill(i)) for i in joining]
            alive = [i for i in range(len(inputs)) if len(logits[i]) <= STEPS and (i != late or step > 0)]
            batch.update({str(i) for i in alive}, rows)
            order = [int(rid) for rid in batch.ids]
            tokens = [inputs[i][len(logits[i])] for i in order]
            output = batch.forward(self._adapter.decode, mx.array(tokens), batch.lengths)
            for i, row in zip(order, _to_numpy(output), strict=True):
                logits[i].append(row)
        return logits

    def prefill_equal(self) -> list[RowLogits]:
        """Each prompt prefilled beside its reverse, before or after it."""
        logits = []
        for i, prompt in enumerate(self._prompts):
            both = [prompt[:-1][::-1]] * 2
            both[i % 2] = prompt[:-1]
            cache = self._adapter.make_cache()
            self._adapter.prefill(mx.array(both), cache, 0, TEXT_ONLY)
            logits.append(self._decode_answer(i, layer_caches.split_row(cache, i % 2, len(prompt) - 1)))
        return logits

    def prefill_padded(self, limit: int) -> list[RowLogits]:
        """The prompts' first `limit` tokens in one forward, padded on the right; the rest one by one."""
        stops = [min(len(p) - 1, limit) for p in self._prompts]
        padded = [p[:stop] + [0] * (max(stops) - stop) for p, stop in zip(self._prompts, stops, strict=True)]
        shared = self._adapter.make_cache()
        self._adapter.prefill(mx.array(padded), shared, 0, TEXT_ONLY)
        logits = []
        for i, (prompt, stop) in enumerate(zip(self._prompts, stops, strict=True)):
            cache = layer_caches.split_row(shared, i, stop)
            if stop < len(prompt) - 1:
                self._adapter.prefill(mx.array([prompt[stop:-1]]), cache, stop, TEXT_ONLY)
            logits.append(self._decode_answer(i, cache))
        return logits

    def prefill_tails(self, padded: bool) -> list[RowLogits]:
        """The prompts' first tokens one by one; the rest of all in one forward, padded on the right, or each
        beside its reverse."""
        if padded:
            rows = [prompt[:-1] for prompt in self._prompts]
            caches = self._share_tails(rows)
        else:
            pairs = [([p[:-1], p[:-1][::-1]], i) for i, p in enumerate(self._prompts)]
            caches = [self._share_tails(pair[:: 1 - 2 * (i % 2)])[i % 2] for pair, i in pairs]
        return [self._decode_answer(i, cache) for i, cache in enumerate(caches)]

    def _share_tails(self, rows: Sequence[list[int]]) -> list[list[Any]]:
        caches = [self._adapter.make_cache() for _ in rows]
        for row, cache in zip(rows, caches, strict=True):
            self._adapter.prefill(mx.array([row[:1]]), cache, 0, TEXT_ONLY)
        longest = max(map(len, rows))
        shared = layer_caches.stack_rows(caches, longest - 1)
        tails = [row[1:] + [0] * (longest - len(row)) for row in rows]
        self._adapter.prefill(mx.array(tails), shared, 1, TEXT_ONLY)
        return [layer_caches.split_row(shared, i, len(row)) for i, row in enumerate(rows)]


def _to_numpy(x: mx.array) -> np.ndarray[Any, Any]:
    return np.array(x.astype(mx.float32))


def _compare(logits: Sequence[RowLogits], reference: Sequence[RowLogits]) -> float:
    """The largest difference of two sets of logits, in standard deviations of the reference."""
    rows = zip(logits, reference, strict=True)
    pairs = [pair for row, expected in rows for pair in zip(row, expected, strict=True)]
    return max(float(np.max(np.abs(x - y)) / (np.std(y) + 1e-9)) for x, y in pairs)
