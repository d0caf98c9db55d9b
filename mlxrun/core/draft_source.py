"""The seam through which drafts come that a model makes: a source predicts, the draft planner says for whom.

Implementations are in model/speculation/; the engine's factory gives one to the planner. What a source needs
of the target besides tokens, such as hidden states, it gets from the runner, which the factory builds too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mlxrun.core.request import Request


@dataclass(frozen=True, slots=True)
class KnownRow:
    """A row's request and the tokens of its answer that are known; they only grow until it is forgotten."""

    request: Request
    output: Sequence[int]

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_tokens(self) -> int:
        """Known tokens of prompt and answer."""
        return len(self.request.prompt) + len(self.output)

    def list_tokens(self, start: int, stop: int | None = None) -> list[int]:
        """The known tokens at these positions."""
        size, stop = len(self.request.prompt), self.num_tokens if stop is None else stop
        answer = self.output[max(start - size, 0) : max(stop - size, 0)]
        return [*self.request.prompt[start:stop], *answer]


class DraftSource(Protocol):
    """Predicts the next tokens of rows. Called on the engine's thread, between steps. After an error of any
    method it is closed, and called no more; no request fails.

    `name`: what it is called in /v1/status. `cost`: what one more drafted token costs for all rows together,
    in steps of the target. `max_tokens`: the most that it drafts for a row in a step.
    """

    @property
    def name(self) -> str: ...
    @property
    def cost(self) -> float: ...
    @property
    def max_tokens(self) -> int: ...

    def takes(self, request: Request) -> bool:
        """Whether it can draft for this request at all."""

    def advance(self, rows: Sequence[KnownRow]) -> None:
        """Take in tokens of decoding rows, a bounded number of them and without waiting for the device;
        called each time a step is planned. Newer tokens than the known ones may be in flight."""

    def is_ready(self, row: KnownRow) -> bool:
        """Whether little is left of the row's tokens to take in, so that `propose` can draft for it. Newer
        tokens may be in flight here too; `propose` then follows once they are known."""

    def propose(self, rows: Sequence[KnownRow], limits: Sequence[int]) -> Sequence[tuple[int, ...]]:
        """For each row, at most so many tokens that are expected behind its newest one, which is known: no
        row's tokens are in flight. Waits for the device once."""

    def forget(self, request_id: str) -> None:
        """The row has ended or was preempted; nothing happens if it is not known. The id may come again."""

    def close(self) -> None:
        """Release all arrays of rows. Nothing is called after that."""
