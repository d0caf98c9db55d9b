"""Checks, at load and in `mlxrun doctor`, that the fast ways of computing a model give what the safe ones do.

A few short prompts run alone, and then batched; logits are compared. What differs is switched to the next
safer method, and said. Upstream bugs of this kind keep coming: nothing is trusted because of its name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrun.config.settings import Config
from mlxrun.model.adapter import TEXT_ONLY, Adapter
from mlxrun.model.compute_methods import (
    AnyDecodeBatch,
    ComputeMethods,
    DecodeMethod,
    can_batch,
    make_decode_batch,
    find_padding_limit,
)
from mlxrun.model.machine.device import uses_cuda, uses_gpu
from mlxrun.model.chunk_grouping import PrefillSharing
from mlxrun.model.ragged import layer_caches
from mlxrun.model.ragged.attention import use_engine_attention
from mlxrun.model.ragged.decode_batch import ModelCall, JoiningRow
from mlxrun.scheduler.scheduler import DEFAULT_CHUNK

log = logging.getLogger(__name__)

ProbeRun = Callable[[], list[list[np.ndarray[Any, Any]]]]  # logits [V] of each prompt and step
LENGTHS = (12, 3, 23)  # tokens of the probe's prompts: ragged on purpose
SHORTEST = 8  # so that these rows make two groups, and the first moves from one to the other
STEPS = 4  # tokens decoded after each
# Largest difference of logits that is rounding, in units of their standard deviation.
TOLERANCE = {mx.float32: 5e-3, mx.bfloat16: 0.25, mx.float16: 0.1}


@dataclass(frozen=True, slots=True)
class ProbeCheck:
    """One comparison. `difference`: largest |logits - reference| / std, or None if the way raised `error`."""

    name: str
    passed: bool
    difference: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ProbeReport:
    methods: ComputeMethods
    checks: tuple[ProbeCheck, ...]


def choose_methods(adapter: Adapter, vocab: int, config: Config) -> ProbeReport:
    """The fastest methods that this model passes; with `engine.probe` off, the fastest possible ones."""
    template = adapter.make_cache()
    wanted = _choose_candidate(template, config)
    if not config.engine.probe or wanted.decode == "alone":
        return ProbeReport(wanted, ())
    reference = _Reference(adapter, vocab)
    checks: list[ProbeCheck] = []

    def passes(name: str, way: ProbeRun) -> bool:
        checks.append(reference.check(name, way))
        return checks[-1].passed

    width = wanted.fixed_width
    ways: tuple[DecodeMethod, ...] = ("ragged", "grouped")
    decode: DecodeMethod = next(
        (way for way in ways if passes(f"decode {way}", partial(reference.decode, way, width))), "alone"
    )
    rows, padded = wanted.sharing.max_rows, wanted.sharing.max_padded
    if rows > 1 and not passes("prefill equal lengths", reference.prefill_equal):
        rows = 1
    if rows > 1 and padded and not passes("prefill padded", partial(reference.prefill_padded, padded)):
        padded = 0
    _log_failures(checks)
    sharing = replace(wanted.sharing, rows=rows, padded=padded)
    return ProbeReport(replace(wanted, decode=decode, sharing=sharing), tuple(checks))


def _choose_candidate(template: Sequence[Any], config: Config) -> ComputeMethods:
    """The fastest methods, by the kinds of the model's caches and the config alone."""
    scheduler = config.scheduler
    gpu = uses_gpu()
    if config.engine.reproducible:
        # A CPU's BLAS rounds a row by its place among the others: there each row is computed alone.
        batched = gpu and can_batch(template)
        return ComputeMethods(
            "ragged" if batched else "alone", PrefillSharing(), scheduler.max_running, uses_cuda()
        )
    if not can_batch(template):
        return ComputeMethods("alone")
    padded = find_padding_limit(template, scheduler.prefill_budget if gpu else scheduler.chunk or DEFAULT_CHUNK)
    sharing = PrefillSharing(scheduler.prefill_rows, padded, merge_chunks=gpu)
    return ComputeMethods("ragged", sharing, launch_first=uses_cuda())


def _log_failures(checks: Sequence[ProbeCheck]) -> None:
    for check in checks:
        if not check.passed:
            reason = check.error or check.difference
            log.warning("parity probe: %s differs from alone (%s): it is not used", check.name, reason)


class _Reference:
    """Prompts of the probe, and what the model says to each of them alone, one after the other."""

    def __init__(self, adapter: Adapter, vocab: int) -> None:
        self._adapter = adapter
        random = np.random.default_rng(7)
        count = LENGTHS[-1] + STEPS + 1
        drawn = [random.integers(0, vocab, count).tolist() for _ in LENGTHS]
        self._prompts = [ids[:n] for ids, n in zip(drawn, LENGTHS, strict=True)]
        self._answers = [ids[n : n + STEPS] for ids, n in zip(drawn, LENGTHS, strict=True)]
        self._alone = [self._continue(p, a) for p, a in zip(self._prompts, self._answers, strict=True)]

    def check(self, name: str, way: ProbeRun) -> ProbeCheck:
        """Run a way and compare what it gives; anything that it raises is a failed check."""
        try:
            with use_engine_attention():
                got = way()
        except Exception as error:  # the border: a library may fail in any manner on what it never saw
            log.debug("parity probe: %s raised", name, exc_info=True)
            return ProbeCheck(name, False, error=f"{type(error).__name__}: {error}")
        pairs = [(g, a) for gs, al in zip(got, self._alone, strict=True) for g, a in zip(gs, al, strict=True)]
        worst = max(float(np.max(np.abs(g - a)) / (np.std(a) + 1e-9)) for g, a in pairs)
        return ProbeCheck(name, bool(worst <= self._tolerance()), worst)

    def _tolerance(self) -> float:
        return min((TOLERANCE[d] for d in self._dtypes() if d in TOLERANCE), default=TOLERANCE[mx.bfloat16])

    def _dtypes(self) -> list[mx.Dtype]:
        return [a.dtype for a in layer_caches.list_all_arrays(self._filled)][:1]

    def _fill(self, prompt: Sequence[int]) -> list[Any]:
        """A row's caches with all but the last token of the prompt."""
        cache = self._adapter.make_cache()
        self._adapter.prefill(mx.array([list(prompt[:-1])]), cache, 0, TEXT_ONLY)
        mx.eval(layer_caches.list_all_arrays(cache))
        self._filled = cache
        return cache

    def _continue(self, prompt: Sequence[int], answer: Sequence[int]) -> list[np.ndarray[Any, Any]]:
        return self._steps(self._fill(prompt), prompt, answer)

    def _steps(
        self, cache: list[Any], prompt: Sequence[int], answer: Sequence[int]
    ) -> list[np.ndarray[Any, Any]]:
        """Logits [V] after the prompt and after each token of the answer, alone."""
        out = []
        for i, token in enumerate([prompt[-1], *answer]):
            position = len(prompt) - 1 + i
            out.append(_to_numpy(self._adapter.decode(mx.array([[token]]), cache, [position])[0, -1]))
        return out

    def decode(self, way: DecodeMethod, width: int) -> list[list[np.ndarray[Any, Any]]]:
        """All rows in one batch; the second joins a step later than the others."""
        batch = make_decode_batch(
            self._adapter.make_cache(), ComputeMethods(way, fixed_width=width), SHORTEST
        )
        fed = [[p[-1], *a] for p, a in zip(self._prompts, self._answers, strict=True)]
        got: list[list[np.ndarray[Any, Any]]] = [[] for _ in fed]
        late = 1
        for step in range(STEPS + 2):
            joining = [late] if step == 1 else [i for i in range(len(fed)) if i != late] if step == 0 else []
            rows = [
                JoiningRow(str(i), len(self._prompts[i]) - 1, self._fill(self._prompts[i])) for i in joining
            ]
            alive = [i for i in range(len(fed)) if len(got[i]) <= STEPS and (i != late or step > 0)]
            batch.update({str(i) for i in alive}, rows)
            order, lengths = [int(rid) for rid in batch.ids], batch.lengths

            tokens = [fed[i][len(got[i])] for i in order]
            logits = _to_numpy(batch.forward(self._caller(batch, tokens, lengths)))
            for row, i in enumerate(order):
                got[i].append(logits[row])
        return got

    def _caller(self, batch: AnyDecodeBatch, tokens: list[int], lengths: list[int]) -> ModelCall:
        def call(first: int, count: int, caches: list[Any]) -> mx.array:
            zeros = [0] * batch.count_padding(count)
            ids = mx.array(tokens[first : first + count] + zeros)[:, None]
            return self._adapter.decode(ids, caches, lengths[first : first + count] + zeros)

        return call

    def prefill_equal(self) -> list[list[np.ndarray[Any, Any]]]:
        """Each prompt prefilled beside its reverse, before or after it."""
        got = []
        for i, (prompt, answer) in enumerate(zip(self._prompts, self._answers, strict=True)):
            both = [list(prompt[:-1])[::-1]] * 2
            both[i % 2] = list(prompt[:-1])
            cache = self._adapter.make_cache()
            self._adapter.prefill(mx.array(both), cache, 0, TEXT_ONLY)
            got.append(self._steps(layer_caches.split_row(cache, i % 2, len(prompt) - 1), prompt, answer))
        return got

    def prefill_padded(self, limit: int) -> list[list[np.ndarray[Any, Any]]]:
        """The prompts' first `limit` tokens at most in one forward, padded on the right; the rest alone."""
        stops = [min(len(p) - 1, limit) for p in self._prompts]
        firsts = [p[:stop] + [0] * (max(stops) - stop) for p, stop in zip(self._prompts, stops, strict=True)]
        shared = self._adapter.make_cache()
        self._adapter.prefill(mx.array(firsts), shared, 0, TEXT_ONLY)
        got = []
        for i, (prompt, stop) in enumerate(zip(self._prompts, stops, strict=True)):
            cache = layer_caches.split_row(shared, i, stop)
            if stop < len(prompt) - 1:
                self._adapter.prefill(mx.array([prompt[stop:-1]]), cache, stop, TEXT_ONLY)
            got.append(self._steps(cache, prompt, self._answers[i]))
        return got


def _to_numpy(x: mx.array) -> np.ndarray[Any, Any]:
    return np.array(x.astype(mx.float32))
