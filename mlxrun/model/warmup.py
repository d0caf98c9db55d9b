"""Computes once, at load, what a GPU prepares for each shape that it meets, so that no request waits for it.

On CUDA, MLX's attention is planned by cuDNN for each pair of (new tokens, tokens in all): some 40 ms each.
Prompts are rounded to few lengths (model/prefill.py) and chunks lie on a grid, so few shapes come up.
"""

from __future__ import annotations

import logging
import time

import mlx.core as mx

from mlxrun.config.settings import SchedulerSettings
from mlxrun.model import leaves
from mlxrun.model.adapter import PLAIN, Adapter
from mlxrun.model.prefill import Sharing

log = logging.getLogger(__name__)

LONGEST = 16384  # tokens of the longest prompt that is prepared for


def warm_up(adapter: Adapter, settings: SchedulerSettings, sharing: Sharing, context: int) -> None:
    """Prefill dummy prompts in the pieces that the scheduler will hand out. `settings` are resolved."""
    start = time.perf_counter()
    longest = min(LONGEST, context // sharing.round * sharing.round)
    busy = settings.prefill_budget_busy or settings.prefill_budget
    for piece in {busy, settings.prefill_budget}:
        cache = leaves.reserve(adapter.new_cache(), longest)
        for offset in range(0, longest, piece):
            _prefill(adapter, cache, 1, offset, min(piece, longest - offset))
    for rows in range(1, sharing.rows + 1):
        for length in range(sharing.round, settings.prefill_budget // rows + 1, sharing.round):
            if length <= busy:
                _prefill(adapter, leaves.reserve(adapter.new_cache(), length), rows, 0, length)
    log.info("warmed up in %.1f s", time.perf_counter() - start)


def _prefill(adapter: Adapter, cache: list[object], rows: int, start: int, length: int) -> None:
    adapter.prefill(mx.zeros((rows, length), mx.int32), cache, start, PLAIN)
    mx.eval(leaves.all_arrays(cache))
