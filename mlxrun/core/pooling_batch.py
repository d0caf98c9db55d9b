"""Texts whose vectors (embeddings, scores) are computed together."""

from __future__ import annotations

from dataclasses import dataclass

from mlxrun.core.request import Request

MAX_ROWS = 256  # texts in a batch


@dataclass(slots=True)
class PoolingBatch:
    """Texts that are computed together. `nbytes`: the memory that they take; `computed`: tokens of each row
    that are done; `state`: the runner's own."""

    requests: tuple[Request, ...]
    nbytes: int = 0
    computed: int = 0
    state: object | None = None

    @property
    def length(self) -> int:
        """Tokens of the longest text."""
        return max(len(request.prompt) for request in self.requests)
