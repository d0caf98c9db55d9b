"""Logs every few seconds how far a model is loaded. For that, it evaluates the weights in groups."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mlxrun.core.byte_sizes import format_rounded

log = logging.getLogger(__name__)
REPORT_EVERY = 2.0  # seconds
GROUP_BYTES = 1 << 28  # of weights that are evaluated in one call


class _Latest:
    """What was counted last, on any thread, for those who watch whether there is progress."""

    progress: LoadProgress | None = None
    counted = 0  # bytes in all
    downloads = 0  # that are under way


def count_progress() -> int:
    """Bytes that were counted since the process began."""
    return _Latest.counted


def describe_progress() -> str | None:
    """What is being read, and how far; None if nothing is."""
    return None if _Latest.progress is None else _Latest.progress.describe()


def is_downloading() -> bool:
    """Whether a model is being downloaded from the hub, which may be slow and has its own limits."""
    return _Latest.downloads > 0


@contextmanager
def note_download() -> Iterator[None]:
    """Mark the block as a download."""
    _Latest.downloads += 1
    try:
        yield
    finally:
        _Latest.downloads -= 1


class LoadProgress:
    """Counts bytes of `total`. It logs a line every REPORT_EVERY seconds until all are counted."""

    def __init__(self, what: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._total = total
        self._clock = clock
        self._done = 0
        self._reported = clock()
        _Latest.progress = self

    def describe(self) -> str:
        """What is being read, and how far."""
        share = 100 * self._done / max(self._total, 1)
        done, total = format_rounded(self._done), format_rounded(self._total)
        return f"{self._what}: {done} of {total} ({share:.0f} %)"

    def end(self) -> None:
        """Stop reporting, since all was read or reading has failed."""
        if _Latest.progress is self:
            _Latest.progress = None

    def add(self, nbytes: int) -> None:
        """Count more bytes."""
        self._done += nbytes
        _Latest.counted += nbytes
        if self._done >= self._total:
            self.end()
        elif self._clock() - self._reported >= REPORT_EVERY:
            self._reported = self._clock()
            log.info("%s", self.describe())


def evaluate_parameters(model: Any, name: str) -> None:
    """Load a model's parameters, which the library has made lazily. They are evaluated in groups of
    GROUP_BYTES, so that progress can be logged in between."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    arrays = [array for _, array in tree_flatten(model.parameters())]
    progress = LoadProgress(f"loading the weights of {name}", sum(array.nbytes for array in arrays))
    group: list[Any] = []
    size = 0
    for array in arrays:
        group.append(array)
        size += array.nbytes
        if size >= GROUP_BYTES:
            mx.eval(group)
            progress.add(size)
            group, size = [], 0
    mx.eval(group)
    progress.add(size)
