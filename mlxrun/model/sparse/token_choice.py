"""Which tokens of a prompt are kept, by their scores: whole blocks, its beginning and its end always."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

BLOCK = 32  # tokens that are kept or left out together: words around an important one belong to it
FIRST = 32  # tokens that are always kept: attention rests on the first ones
LAST = 128  # tokens that are always kept: what the prompt asks for
SMOOTHED = 13  # tokens: a token's score is the highest in this neighbourhood

Scores = np.ndarray[Any, np.dtype[np.float32]]


def choose_tokens(scores: Scores, keep: float) -> tuple[int, ...]:
    """Ascending positions of the kept tokens of a prompt of `scores.size` tokens: a share `keep` of them, and
    at least the first and the last ones. ValueError if a score is not a number."""
    if not np.isfinite(scores).all():
        raise ValueError("the draft model computes NaN")
    size = scores.size
    blocks = math.ceil(size / BLOCK)
    edge = SMOOTHED // 2
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(scores, edge, constant_values=0.0), SMOOTHED)
    smoothed = np.pad(windows.max(axis=1), (0, blocks * BLOCK - size), constant_values=np.nan)
    worth = np.nanmean(smoothed.reshape(blocks, BLOCK), axis=1)
    starts = np.arange(blocks) * BLOCK
    always = (starts < FIRST) | (starts + BLOCK > size - LAST)
    order = np.lexsort((starts, -worth, ~always))  # of equal ones the earlier
    wanted = max(math.ceil(keep * size / BLOCK), int(always.sum()))
    chosen = np.sort(order[:wanted])
    kept = (chosen[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    return tuple(int(at) for at in kept[kept < size])
