"""What the scheduler tells the runner to do in a step, and what the runner tells back. Integers only."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxrun.scheduler.request import HitKind, Request, TokenLogprob


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute tokens [start, stop) of a request's tokens (prompt, then answer so far, if it was preempted).

    A chunk that reaches the end of the tokens also samples the next one; others only fill the cache.
    """

    request_id: str
    start: int
    stop: int


class SnapshotKind(enum.StrEnum):
    """What a record of the prefix cache holds."""

    DELTA = "delta"  # keys and values of tokens start..stop, of the layers that keep all of them
    STATE = "state"  # everything else a row holds after `stop` tokens: windows, recurrent states


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Copy something out of a row for the prefix cache, which alone knows what `record` means.

    DELTA: tokens [start, stop), which the row's cache holds. STATE: the row holds exactly `stop` tokens.
    `at_once`: the step waits for the copy. There is a Saved for each Save, in order.
    """

    request_id: str
    kind: SnapshotKind
    start: int
    stop: int
    entry: Any
    synchronous: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """What a Save asked for: evaluated arrays of its own, which pin nothing else; None if that failed."""

    request: SnapshotRequest
    payload: Any


@dataclass(frozen=True, slots=True)
class CacheHit:
    """The first `length` tokens of a request need not be computed.

    `deltas`: (start, stop, payload), one after the other from 0 to `length`; the last payload may hold tokens
    beyond its `stop`. Empty if no layer keeps all keys. `state`: the payload at exactly `length` tokens, None
    if the model has none.
    """

    length: int
    kind: HitKind
    deltas: tuple[tuple[int, int, Any], ...] = ()
    state: Any = None


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that starts to run: `output` is what it had answered before it was preempted."""

    request: Request
    output: tuple[int, ...] = ()
    hit: CacheHit | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Order of execution: keep, free, admit, decode, prefill, save.

    `decode`: requests that get one more token; all tokens but the newest are in their cache. `keep`: of rows
    that are freed now; `save`: of rows that have prefilled.
    """

    free: tuple[str, ...] = ()
    admit: tuple[Admission, ...] = ()
    decode: tuple[str, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    clear_pool: bool = False  # give MLX's free buffers back first: memory is short
    final_snapshots: tuple[SnapshotRequest, ...] = ()
    snapshots: tuple[SnapshotRequest, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.free or self.admit or self.decode or self.prefill)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token that was drawn; `launched` counts the request's drawn tokens, this one included."""

    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens that became known, and requests that failed alone. With decode-ahead, tokens lag one step.

    `saved`: copies that are ready. `unusable`: requests whose hit could not be restored; they were computed.
    """

    tokens: Mapping[str, SampledToken] = field(default_factory=dict)
    errors: Mapping[str, Exception] = field(default_factory=dict)
    snapshots: tuple[SnapshotResult, ...] = ()
    invalid_hits: tuple[str, ...] = ()
