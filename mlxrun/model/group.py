"""A row group: rows of similar length that share one attention call a layer, so that padding stays small.

For every KV or WINDOW leaf it holds one buffer [rows, H, capacity, D], rows aligned on the right at `end`:

      ....aaaaaaaaaa|          a, b, c: keys of three rows, the newest last
      .........bbbbb|          . never attended to: masked, as it lies before a row's first key
      ..cccccccccccc|end

All lengths are Python ints; masks depend on lengths alone, so one mask serves all layers of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

STEP = 256  # buffers grow by this many tokens, as the libraries' caches do


class Buffer:
    """Keys and values of one leaf for the rows of a group. `window`: how many newest tokens count; None: all."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.end = 0

    def append(self, keys: mx.array, values: mx.array, width: int) -> tuple[mx.array, mx.array]:
        """Add one token [rows, H, 1, D] to each row; returns the newest `width` tokens of all rows."""
        assert self.keys is not None and self.values is not None
        if self.end == self.keys.shape[2]:
            kept = min(width - 1, self.end)
            self.keys = _regrown(self.keys, self.end, kept)
            self.values = _regrown(self.values, self.end, kept)
            self.end = kept
        self.keys[:, :, self.end : self.end + 1] = keys
        self.values[:, :, self.end : self.end + 1] = values
        self.end += 1
        return self.view(width)

    def view(self, width: int) -> tuple[mx.array, mx.array]:
        """The newest `width` tokens of all rows, [rows, H, width, D]."""
        assert self.keys is not None and self.values is not None
        span = slice(self.end - width, self.end)
        return self.keys[:, :, span], self.values[:, :, span]

    def take(self, rows: Sequence[int], width: int) -> tuple[mx.array, mx.array]:
        """Copy of some rows' newest `width` tokens."""
        keys, values = self.view(width)
        index = mx.array(list(rows))
        return keys[index], values[index]

    def fill(self, parts: Sequence[tuple[mx.array, mx.array]]) -> None:
        """Hold these [n, H, length, D] parts, one after the other, and nothing else."""
        self.end = max(keys.shape[2] for keys, _ in parts)
        capacity = _rounded(self.end + 1)
        self.keys = _aligned([keys for keys, _ in parts], self.end, capacity)
        self.values = _aligned([values for _, values in parts], self.end, capacity)

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes


def _rounded(tokens: int) -> int:
    return -(-tokens // STEP) * STEP


def _regrown(x: mx.array, end: int, kept: int) -> mx.array:
    """The newest `kept` tokens before `end`, moved to the front of a buffer with room for more."""
    rows, heads, _, size = x.shape
    room = mx.zeros((rows, heads, _rounded(kept + 1) - kept, size), x.dtype)
    return mx.concatenate([x[:, :, end - kept : end], room], axis=2)


def _aligned(parts: Sequence[mx.array], end: int, capacity: int) -> mx.array:
    """Parts [n, H, length, D] stacked as rows, each ending at `end`, in a buffer of `capacity` tokens."""
    padded = []
    for part in parts:
        before = end - part.shape[2]
        padded.append(mx.pad(part, [(0, 0), (0, 0), (before, capacity - end), (0, 0)]))
    return padded[0] if len(padded) == 1 else mx.concatenate(padded, axis=0)


class RowGroup:
    """The rows of one length bucket and their buffers, one a KV or WINDOW leaf of the model.

    `ids` and `lengths` (tokens in the cache, the one being computed included) are in row order.
    """

    def __init__(self, bucket: int, windows: Sequence[int | None]) -> None:
        self.bucket = bucket
        self.ids: list[str] = []
        self.lengths: list[int] = []
        self.buffers = [Buffer(window) for window in windows]
        self._masks: dict[tuple[int | None, int], mx.array | None] = {}

    def advance(self) -> None:
        """Every row gets one token in this step."""
        self.lengths = [n + 1 for n in self.lengths]
        self._masks.clear()

    def width(self, window: int | None) -> int:
        """Tokens that the longest row attends to in a leaf with this window."""
        longest = max(self.lengths)
        return longest if window is None else min(longest, window)

    def mask(self, width: int, window: int | None) -> mx.array | None:
        """Bool [rows, 1, 1, width], True where a row may look; None if all may look everywhere.

        `window`: the model's own limit for this layer, which may be tighter than the leaf's.
        """
        key = window if window is not None and window < width else None
        if (key, width) not in self._masks:
            seen = [min(n, width if key is None else key) for n in self.lengths]
            mask = None
            if min(seen) < width:
                first = mx.array([width - n for n in seen])[:, None, None, None]
                mask = mx.arange(width) >= first
            self._masks[key, width] = mask
        return self._masks[key, width]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers)
