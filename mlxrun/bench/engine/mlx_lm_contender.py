"""Other engines as contenders, each driven as its own server drives it. May import mlx_lm.

mlx-lm's BatchGenerator runs with the defaults of its library and of its server: 32 rows decode, 8 prompts
prefill together, 2048 tokens at a time; greedy. Its server calls `insert` and `next` just like this.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlxrun.model  # noqa: F401  OpenBLAS goes before mlx

# isort: split
import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.utils import load_model

from mlxrun.bench.engine.measurement import Output
from mlxrun.bench.engine.workloads import Job

SETTINGS = {"completion_batch_size": 32, "prefill_batch_size": 8, "prefill_step_size": 2048}


class MlxLmContender:
    """mlx-lm's BatchGenerator."""

    name = "mlx-lm"

    def __init__(self, model: Any) -> None:
        self._generator = BatchGenerator(model, **SETTINGS)
        self._jobs: dict[int, str] = {}

    @classmethod
    def open(cls, folder: Path) -> MlxLmContender:
        """Load the folder's weights as they are."""
        return cls(load_model(folder)[0])

    def add(self, jobs: Sequence[Job]) -> None:
        """Insert the prompts in one call."""
        prompts, outputs = [list(job.prompt) for job in jobs], [job.output for job in jobs]
        for uid, job in zip(self._generator.insert(prompts, outputs), jobs, strict=True):
            self._jobs[uid] = job.id

    def step(self) -> list[Output]:
        """One `next`: a token for every row, then up to 2048 tokens of up to 8 prompts."""
        _, responses = self._generator.next()
        return [Output(self._jobs[r.uid], (r.token,), r.finish_reason is not None) for r in responses]

    def close(self) -> None:
        """Drop the model with the generator."""
        self._generator.close()
        del self._generator


def chunk_seconds(folder: Path, prompt: Sequence[int], chunk: int, repeat: int = 3) -> float:
    """Time of the forward over the last `chunk` tokens of a prompt, the rest in the cache: the longest chunk.

    Nothing else runs. The yardstick of what a decoding row may wait while a long prompt prefills.
    """
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
