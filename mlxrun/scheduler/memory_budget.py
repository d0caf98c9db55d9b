"""How many bytes a row holds, as arithmetic on integers, so that admission can be tested without a device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlxrun.errors import OutOfMemory, PromptTooLong, RequestError
from mlxrun.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one row's cache.

    `per_token` grows with the row's length; `windows` are (window, bytes per token) of layers that stop
    growing there; `fixed` is what every row holds (recurrent state); lengths round up to `step` tokens.
    """

    per_token: int = 0
    fixed: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    step: int = 256

    def row(self, tokens: int) -> int:
        """Bytes of a row of `tokens` tokens."""
        rounded = -(-tokens // self.step) * self.step
        windowed = sum(min(rounded, window) * size for window, size in self.windows)
        return self.fixed + rounded * self.per_token + windowed


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The sum that admission checks: weights + rows + transients <= limit. All in bytes.

    `transient` is what one prompt token in flight needs for activations; `limit` 0 means unlimited.
    """

    limit: int = 0
    weights: int = 0
    transient: int = 0
    footprint: Footprint = Footprint()

    def needed(self, lengths: Iterable[int], prefill_tokens: int) -> int:
        """Bytes in use with rows of these lengths and a step of `prefill_tokens` prompt tokens.

        The longest row counts twice: joining or moving a row copies it.
        """
        rows = [self.footprint.row(n) for n in lengths]
        return self.weights + sum(rows) + max(rows, default=0) + self.transient * prefill_tokens

    def spare(self, lengths: Iterable[int], prefill_tokens: int) -> int | None:
        """Bytes that are left beside them, negative if they do not fit; None: unlimited."""
        return None if self.limit == 0 else self.limit - self.needed(lengths, prefill_tokens)

    def fits(self, lengths: Iterable[int], prefill_tokens: int) -> bool:
        spare = self.spare(lengths, prefill_tokens)
        return spare is None or spare >= 0

    def longest(self, start: int, stop: int, piece: int) -> int:
        """The most tokens, of start..stop, that a row alone may hold and compute again in pieces of that size
        if it is preempted; `start` is known to fit."""
        while start < stop:
            middle = (start + stop + 1) // 2
            start, stop = (middle, stop) if self.fits([middle], min(middle, piece)) else (start, middle - 1)
        return start

    def explain(self, tokens: int, prefill_tokens: int) -> str:
        """The sum for one request alone, for an error that a user can act on."""
        row = self.footprint.row(tokens)
        return (
            f"weights {_size(self.weights)} + {tokens} tokens {_size(2 * row)} (twice: joining copies) "
            f"+ transients {_size(self.transient * prefill_tokens)} > limit {_size(self.limit)}"
        )


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What every request must fit in by itself: the model's context, in tokens, and the memory."""

    context: int
    memory: MemoryBudget = MemoryBudget()

    def longest(self, request: Request, least: int) -> int:
        """Most tokens of prompt and answer. `least`: prompt tokens of the smallest step.

        RequestError, PromptTooLong or OutOfMemory if it could never run.
        """
        if not request.prompt:
            raise RequestError("the prompt is empty")
        size = len(request.prompt) + len(request.answered)
        if size >= self.context:
            raise PromptTooLong(f"the prompt has {size} tokens; the context holds {self.context}")
        piece = max([least, *(end - start for start, end in request.spans)])
        if not self.memory.fits([size + 1], min(piece, size)):
            reason = self.memory.explain(size + 1, min(piece, size))
            raise OutOfMemory(f"the prompt can never fit in memory: {reason}")
        return self.memory.longest(size + 1, self.context, piece)


def _size(count: int) -> str:
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
