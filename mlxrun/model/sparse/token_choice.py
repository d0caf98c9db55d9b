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


def choose_tokens(scores: Scores, keep: float, known: int = 0) -> tuple[int, ...]:
    """Ascending positions of the kept tokens of a prompt of `scores.size` tokens: its first `known` ones, a
    share `keep` of the others, and at least the first and the last ones. ValueError if a score is not a
    number."""
    if not np.isfinite(scores).all():
        raise ValueError("the draft model computes NaN")
    size = scores.size
    blocks = math.ceil(size / BLOCK)
    edge = SMOOTHED // 2
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(scores, edge, constant_values=0.0), SMOOTHED)
    smoothed = np.pad(windows.max(axis=1), (0, blocks * BLOCK - size), constant_values=np.nan)
    worth = np.nanmean(smoothed.reshape(blocks, BLOCK), axis=1)
    starts = np.arange(blocks) * BLOCK
    is_known = starts + BLOCK <= known
    always = (starts < max(FIRST, known)) | (starts + BLOCK > size - LAST)
    order = np.lexsort((starts, -worth, ~always))  # of equal ones the earlier
    wanted = int(is_known.sum()) + math.ceil(keep * (size - known) / BLOCK)
    chosen = np.sort(order[: max(wanted, int(always.sum()))])
    kept = (chosen[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
    return tuple(kept[kept < size].tolist())
