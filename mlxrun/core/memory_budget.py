"""Computes how many bytes rows take: integer arithmetic, so that admission can be tested without a device."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlxrun.core.byte_sizes import format_rounded
from mlxrun.core.errors import OutOfMemory, PromptTooLong, RequestError
from mlxrun.core.request import Request


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one row's cache. Lengths are rounded up to `step` tokens.

    `per_token`: bytes for each token; `fixed`: bytes of every row (recurrent state); `windows`: (window,
    bytes per token) of layers that keep at most a window of tokens. `packed_per_token`: bytes for each token
    of a quantized row, None if rows are not quantized. A row of the decode batch is quantized by the first
    step that begins with `packed_from` tokens or more in it.
    """

    per_token: int = 0
    fixed: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    step: int = 256
    packed_per_token: int | None = None
    packed_from: int = 0

    def compute_row_bytes(self, tokens: int) -> int:
        """Bytes of a row that has `tokens` tokens after the next step, and is not in the decode batch yet."""
        return self.sum_row_bytes([tokens])

    def sum_row_bytes(self, lengths: Sequence[int], decoding: bool = False) -> int:
        """Bytes of rows of these lengths together. `decoding`: they are in the decode batch already."""
        if not decoding or self.packed_per_token is None:
            return self._sum_bytes(lengths, self.per_token)
        most = self.packed_from + 1
        plain, packed = [n for n in lengths if n <= most], [n for n in lengths if n > most]
        return self._sum_bytes(plain, self.per_token) + self._sum_bytes(packed, self.packed_per_token)

    def compute_copy_bytes(self, tokens: int, decoding: bool) -> int:
        """Extra bytes while a row joins the decode batch or moves in it. If the row is quantized then, they
        are those of its other form."""
        is_packed = not decoding and tokens > self.packed_from
        packed = self.packed_per_token if is_packed else None
        return self._sum_bytes([tokens], self.per_token if packed is None else packed)

    def add(self, other: Footprint) -> Footprint:
        """The footprint of a row in two models. The other model has no quantized rows."""
        packed = None if self.packed_per_token is None else self.packed_per_token + other.per_token
        return replace(
            self,
            per_token=self.per_token + other.per_token,
            fixed=self.fixed + other.fixed,
            windows=self.windows + other.windows,
            packed_per_token=packed,
        )

    def _sum_bytes(self, lengths: Sequence[int], per_token: int) -> int:
        """`per_token`: bytes for each token, in the form that these rows have."""
        step = self.step
        rounded = [-(-n // step) * step for n in lengths]
        windowed = sum(size * min(n, window) for window, size in self.windows for n in rounded)
        return self.fixed * len(rounded) + per_token * sum(rounded) + windowed


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """The sum that admission checks, in bytes: weights + rows + transients <= limit.

    `limit`: 0 means unlimited; `transient`: activations of one prompt token in a step; `images`, `features`:
    the parts of `weights` that are kept for decoded images and for the cache of their features.
    """

    limit: int = 0
    weights: int = 0
    transient: int = 0
    footprint: Footprint = Footprint()
    images: int = 0
    features: int = 0

    def compute_needed_bytes(
        self, lengths: Sequence[int], prefill_tokens: int, decoding: Sequence[int] = ()
    ) -> int:
        """Bytes in use by rows and a step of `prefill_tokens` prompt tokens. `decoding`: lengths of rows in
        the decode batch; `lengths`: of the other rows. The longest row counts twice, because a row is copied
        when it joins the batch or moves in it."""
        footprint = self.footprint
        rows = footprint.sum_row_bytes(lengths) + footprint.sum_row_bytes(decoding, decoding=True)
        copies = [footprint.compute_copy_bytes(n, decoding=False) for n in lengths]
        if decoding:
            copies.append(footprint.compute_copy_bytes(max(decoding), decoding=True))
        return self.weights + rows + max(copies, default=0) + self.transient * prefill_tokens

    def compute_batch_bytes(self, rows: int, length: int, slice_tokens: int = 0) -> int:
        """Bytes of a pooling batch, padded to `length` tokens: the caches, and the activations of one forward
        of `slice_tokens` tokens. `slice_tokens` 0: one forward computes all tokens."""
        tokens = min(rows * length, slice_tokens or rows * length)
        return rows * self.footprint.compute_row_bytes(length) + self.transient * tokens

    def compute_spare_bytes(
        self, lengths: Sequence[int], prefill_tokens: int, decoding: Sequence[int] = ()
    ) -> int | None:
        """Bytes left beside these rows and this step, negative if they do not fit. None if memory is
        unlimited."""
        if self.limit == 0:
            return None
        return self.limit - self.compute_needed_bytes(lengths, prefill_tokens, decoding)

    def fits(self, lengths: Sequence[int], prefill_tokens: int) -> bool:
        spare = self.compute_spare_bytes(lengths, prefill_tokens)
        return spare is None or spare >= 0

    def compute_rows_bytes(self, rows: int, tokens: int, chunk: int) -> int:
        """Bytes in use while the last of so many rows of `tokens` tokens joins the others. `chunk`: prompt
        tokens of the smallest step."""
        return self.compute_needed_bytes([tokens], min(chunk, tokens), [tokens] * (rows - 1))

    def find_max_rows(self, tokens: int, most: int, chunk: int) -> int:
        """The most rows of so many tokens that are admitted together, up to `most`; 0: not even one."""
        if self.limit == 0:
            return most
        return bisect_right(
            range(1, most + 1), self.limit, key=lambda rows: self.compute_rows_bytes(rows, tokens, chunk)
        )

    def find_max_length(self, start: int, stop: int, chunk: int) -> int:
        """The most tokens that a row alone may hold, between `start`, which is known to fit, and `stop`.
        After a preemption, that row is computed again in chunks of `chunk` tokens."""
        while start < stop:
            middle = (start + stop + 1) // 2
            start, stop = (middle, stop) if self.fits([middle], min(middle, chunk)) else (start, middle - 1)
        return start

    def explain_shortage(self, tokens: int, prefill_tokens: int) -> str:
        """The sum for a request alone, for an error that a user can act on."""
        footprint = self.footprint
        rows = footprint.compute_row_bytes(tokens) + footprint.compute_copy_bytes(tokens, decoding=False)
        transients = format_rounded(self.transient * prefill_tokens)
        return (
            f"{self._describe_weights()} + {tokens} tokens {format_rounded(rows)} (twice: joining copies) "
            f"+ transients {transients} > limit {format_rounded(self.limit)}"
        )

    def find_start_problem(self, pools: bool = False) -> str | None:
        """Why not even the shortest request can ever run; None if it can. `pools`: the request wants a
        vector, and its row is not copied."""
        if not pools:
            return None if self.fits([2], 1) else self.explain_shortage(2, 1)
        needed = self.compute_batch_bytes(1, 1)
        if self.limit == 0 or self.weights + needed <= self.limit:
            return None
        sizes = f"1 token {format_rounded(needed)} > limit {format_rounded(self.limit)}"
        return f"{self._describe_weights()} + {sizes}"

    def _describe_weights(self) -> str:
        parts = {"media.memory_bytes": self.images, "cache.image_bytes": self.features}
        more = "".join(f" + {key} {format_rounded(size)}" for key, size in parts.items() if size)
        return f"weights {format_rounded(self.weights - self.images - self.features)}{more}"


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What every request must fit by itself: the model's context, in tokens, and the memory."""

    context: int
    memory: MemoryBudget = MemoryBudget()

    def compute_max_length(self, request: Request, min_chunk: int) -> int:
        """The most tokens of prompt and answer. `min_chunk`: prompt tokens of the smallest step. Raises
        RequestError, PromptTooLong or OutOfMemory if the request can never run."""
        if not request.prompt:
            raise RequestError("the prompt is empty")
        max_tokens = request.params.max_tokens
        if max_tokens < 0:
            raise RequestError("max_tokens must be at least 0", param="max_tokens")
        if len(request.prior_output) >= max_tokens > 0:
            raise RequestError("the answer already has max_tokens tokens", param="max_tokens")
        size = len(request.prompt) + len(request.prior_output)
        context = self.context - request.num_left_out  # whose positions are taken
        if size + min(max_tokens, 1) > context:
            size += request.num_left_out
            raise PromptTooLong(f"the prompt has {size} tokens; the context holds {self.context}")
        chunk = max([min_chunk, *(end - start for start, end in request.image_spans)])
        if not self.memory.fits([size + 1], min(chunk, size)):
            reason = self.memory.explain_shortage(size + 1, min(chunk, size))
            raise OutOfMemory(f"the prompt can never fit in memory: {reason}")
        return self.memory.find_max_length(size + 1, context, chunk)
