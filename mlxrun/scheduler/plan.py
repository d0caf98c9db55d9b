"""What the scheduler tells the runner to do in a step, and what the runner tells back. Integers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlxrun.scheduler.request import Request, TokenLogprob


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute tokens [start, stop) of a request's tokens (prompt, then answer so far, if it was preempted).

    A chunk that reaches the end of the tokens also samples the next one; others only fill the cache.
    """

    request_id: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that starts to run: `output` is what it had answered before it was preempted."""

    request: Request
    output: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Order of execution: free, admit, decode, prefill.

    `decode`: requests that get one more token; all tokens but the newest are in their cache.
    """

    free: tuple[str, ...] = ()
    admit: tuple[Admission, ...] = ()
    decode: tuple[str, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    clear_pool: bool = False  # give MLX's free buffers back first: memory is short

    @property
    def empty(self) -> bool:
        return not (self.free or self.admit or self.decode or self.prefill)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token that was drawn; `launched` counts the request's drawn tokens, this one included."""

    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens that became known, and requests that failed alone. With decode-ahead, tokens lag one step."""

    tokens: Mapping[str, Sampled] = field(default_factory=dict)
    errors: Mapping[str, Exception] = field(default_factory=dict)
