"""What the scheduler asks of the runner in a step, what the runner returns, and what parts of a step cost.

Payloads are opaque here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mlxrun.core.request import HitKind, Request, TokenLogprob


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Compute tokens [start, stop) of a request: its prompt and, after a preemption, its output so far.

    A chunk that reaches the last token also samples the next one; others only fill the cache.
    """

    request_id: str
    start: int
    stop: int
    images: int = 0  # that begin in it


class SnapshotKind(enum.StrEnum):
    """What an entry of the prefix cache holds."""

    DELTA = "delta"  # keys and values of tokens start..stop, of the layers that keep all of them
    STATE = "state"  # everything else a row holds after `stop` tokens: windows, recurrent states


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Copy a part of a row's cache for the prefix cache. `entry` means something to the prefix cache only.

    DELTA: tokens [start, stop), which the row's cache holds. STATE: the row holds exactly `stop` tokens.
    `synchronous`: the step waits for the copy. Each request gets one SnapshotResult, in the same order.
    """

    request_id: str
    kind: SnapshotKind
    start: int
    stop: int
    entry: Any
    synchronous: bool = False


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """A snapshot: evaluated arrays that share no memory with the row; `payload` None if copying failed."""

    request: SnapshotRequest
    payload: Any


@dataclass(frozen=True, slots=True)
class CacheHit:
    """The first `length` tokens of a request are in the prefix cache.

    `deltas`: consecutive (start, stop, payload) from 0 to `length`, of which the last payload may hold tokens
    beyond its `stop`; empty if no layer keeps all keys. `state`: the payload at exactly `length` tokens; None
    if the model has no states.
    """

    length: int
    kind: HitKind
    deltas: tuple[tuple[int, int, Any], ...] = ()
    state: Any = None


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that gets a row. `output`: its tokens from before a preemption or from an earlier run."""

    request: Request
    output: tuple[int, ...] = ()
    hit: CacheHit | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, in the order of execution: final_snapshots, free, admit, decode, prefill with snapshots.

    `decode`: requests that get one more token; all their tokens but the newest are in their row's cache.
    `drafts`: for some of them, predicted tokens after the newest one; the step before is collected.
    `final_snapshots`: of rows that are freed now. `snapshots`: of rows that have prefilled.
    """

    free: tuple[str, ...] = ()
    admit: tuple[Admission, ...] = ()
    decode: tuple[str, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    clear_pool: bool = False  # memory is short: free the buffers of MLX's pool first
    final_snapshots: tuple[SnapshotRequest, ...] = ()
    snapshots: tuple[SnapshotRequest, ...] = ()
    drafts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class SampledToken(NamedTuple):
    """A token that a row got in a step."""

    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The logprobs of consecutive prompt tokens of a request, the first one at position `start`. Each has at
    least one of the likeliest tokens, even if the request wants none: the prefix cache keeps it."""

    request_id: str
    start: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens and failed requests, by request id. With decode-ahead, tokens and logprobs lag one step
    behind. A row gets one token: with a draft, the draft's tokens as long as they are what is sampled, and
    one more.

    `snapshots`: copies that are ready. `invalid_hits`: requests whose hit could not be restored, so that the
    runner computed those tokens. `logprobs`: of prompts, each request's in order of position.
    `shared_tokens`: of rows in the decode batch, held by another row too.
    """

    tokens: Mapping[str, tuple[SampledToken, ...]] = field(default_factory=dict)
    errors: Mapping[str, Exception] = field(default_factory=dict)
    snapshots: tuple[SnapshotResult, ...] = ()
    invalid_hits: tuple[str, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    shared_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SerializedTensor:
    """An array as bytes. `dtype` as safetensors calls it: F32, BF16, F16, U32, U8, I64, ..."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class SerializedPayload:
    """A payload outside the device."""

    tensors: Mapping[str, SerializedTensor]
    meta: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(len(tensor.data) for tensor in self.tensors.values())


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


DEFAULT_CHUNK = 512  # tokens, if neither the config nor the device sets it
MIN_CHUNK = 64  # tokens; neither short memory nor slow steps make chunks smaller than this
SINGLE_TOKEN_CHUNK = 512  # tokens


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What the parts of a step cost on this device.

    `max_sampling_chunk`: after a hit, up to this many tokens are computed by one forward that also samples,
    if a forward costs more than its tokens. `waiting_weight`: how much a waiting prompt counts beside a
    decoding row; more if each forward is expensive. `deep_prompt`: beside decoding rows, chunks shrink once
    this many tokens of a prompt are computed, because attention is then most of the cost; 0: never.
    `few_lengths`: a chunk that is shortened gets one of few lengths, if the device prepares for each new one.
    `min_chunk`: tokens that take no longer than fewer would, because a forward is bound by its launches;
    `least_fitting`: a chunk is halved if a step has time for less than this share of it.
    """

    max_sampling_chunk: int = 0
    waiting_weight: int = 1
    deep_prompt: int = 0
    few_lengths: bool = False
    min_chunk: int = MIN_CHUNK
    least_fitting: float = 1.0

    def limit_chunk(self, remaining: int, budget: int) -> int:
        """The most tokens of a step's first chunk, where `remaining` are left of its prompt."""
        if not self.few_lengths or remaining <= budget:
            return budget
        return 1 << (budget.bit_length() - 1)

    def get_max_sampling_chunk(self, request: Request) -> int:
        """The most tokens after a hit that are computed by one forward that also samples. A prompt
        with logprobs and one token of output would join the decode batch, with a copy of all its keys, for
        one step."""
        params = request.params
        is_single = params.max_tokens == 1 and params.prompt_logprobs is not None
        return max(self.max_sampling_chunk, SINGLE_TOKEN_CHUNK) if is_single else self.max_sampling_chunk
