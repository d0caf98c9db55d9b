"""mlx-lm's BatchGenerator as a contender, in a module that is not imported while mlxrun is measured alone.

It runs with the defaults of its library and its server: 32 rows decode, 8 prompts prefill together, 2048
tokens at a time, greedily. Its server calls `insert` and `next` in the same way.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlxrun.model  # noqa: F401  OpenBLAS goes before mlx
from mlxrun.cli.bench.engine.measurement import RequestOutput
from mlxrun.cli.bench.engine.workloads import BenchRequest

# isort: split
import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.utils import load_model

SETTINGS = {"completion_batch_size": 32, "prefill_batch_size": 8, "prefill_step_size": 2048}


class MlxLmContender:
    """Runs greedy requests on mlx-lm's BatchGenerator."""

    def __init__(self, model: Any) -> None:
        self._generator = BatchGenerator(model, **SETTINGS)
        self._request_ids: dict[int, str] = {}

    @classmethod
    def open(cls, folder: Path) -> MlxLmContender:
        """Load the folder's weights as they are."""
        return cls(load_model(folder)[0])

    def add(self, requests: Sequence[BenchRequest]) -> None:
        """Insert the prompts in one call."""
        prompts = [list(request.prompt) for request in requests]
        outputs = [request.output for request in requests]
        for uid, request in zip(self._generator.insert(prompts, outputs), requests, strict=True):
            self._request_ids[uid] = request.id

    def step(self) -> list[RequestOutput]:
        """Call `next` once: a token for every row, then up to 2048 tokens of up to 8 prompts."""
        _, responses = self._generator.next()
        return [
            RequestOutput(self._request_ids[r.uid], (r.token,), r.finish_reason is not None)
            for r in responses
        ]

    def abort(self, request_id: str) -> None:
        """Remove a request's row."""
        self._generator.remove([uid for uid, known in self._request_ids.items() if known == request_id])

    def settle(self) -> None:
        """Do nothing: `next` and `remove` release rows themselves."""

    def close(self) -> None:
        """Release the generator and the model."""
        self._generator.close()
        del self._generator


def measure_chunk(folder: Path, prompt: Sequence[int], chunk: int, repeat: int = 3) -> float:
    """Measure the seconds of a forward over the last `chunk` tokens of a prompt, with the rest in the cache.
    Inter-token times of decoding rows during the prefill of a long prompt are compared with it."""
    model = load_model(folder)[0]
    cache = make_prompt_cache(model)
    chunk = min(chunk, len(prompt))
    head, tail = list(prompt[:-chunk]), list(prompt[-chunk:])
    for start in range(0, len(head), chunk):
        _prefill(model, cache, head[start : start + chunk])
    times = [_prefill(model, cache, tail)]
    while can_trim_prompt_cache(cache) and len(times) <= repeat:
        trim_prompt_cache(cache, chunk)
        times.append(_prefill(model, cache, tail))
    return statistics.median(times[1:] or times)  # the first one may compile


def _prefill(model: Any, cache: list[Any], tokens: list[int]) -> float:
    start = time.perf_counter()
    model(mx.array([tokens]), cache=cache)
    mx.eval([c.state for c in cache])
    return time.perf_counter() - start
