"""A draft source without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlxrun.core.draft_source import KnownRow
from mlxrun.core.request import Request


class FakeSource:
    """`predict`: the token behind the known ones of a row. A prompt is read by `slice_size` tokens a step.
    `fails`: the method that raises from now on."""

    name = "fake"
    max_tokens = 8

    def __init__(
        self,
        predict: Callable[[list[int]], int],
        cost: float = 0.1,
        slice_size: int = 100,
        taken: bool = True,
    ) -> None:
        self.cost = cost
        self.fails = ""
        self.calls = 0
        self.closed = False
        self.read: dict[str, int] = {}  # tokens by row
        self.received: list[list[int]] = []
        self._predict, self._slice, self._taken = predict, slice_size, taken

    def _call(self, name: str) -> None:
        self.calls += 1
        if name == self.fails:
            raise RuntimeError("planted")

    def takes(self, request: Request) -> bool:
        self._call("takes")
        return self._taken

    def advance(self, rows: Sequence[KnownRow]) -> None:
        self._call("advance")
        for row in rows:
            self.read[row.id] = min(self.read.get(row.id, 0) + self._slice, row.num_tokens)

    def is_ready(self, row: KnownRow) -> bool:
        self._call("is_ready")
        return self.read.get(row.id, 0) >= row.num_tokens - 2

    def propose(self, rows: Sequence[KnownRow], limits: Sequence[int]) -> list[tuple[int, ...]]:
        self._call("propose")
        self.received.append([*limits])
        drafts = []
        for row, limit in zip(rows, limits, strict=True):
            tokens = row.list_tokens(0)
            for _ in range(limit):
                tokens.append(self._predict(tokens))
            drafts.append(tuple(tokens[row.num_tokens :]))
        return drafts

    def forget(self, request_id: str) -> None:
        self._call("forget")
        self.read.pop(request_id, None)

    def close(self) -> None:
        self.closed = True
