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

    A chunk that reaches the last token also samples the next one. Other chunks only fill the cache.
    """

    request_id: str
    start: int
    stop: int


class SnapshotKind(enum.StrEnum):
    """What an entry of the prefix cache holds."""

    DELTA = "delta"  # keys and values of tokens start..stop, of the layers that keep all of them
    STATE = "state"  # everything else a row holds after `stop` tokens: windows, recurrent states


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Copy a part of a row's cache for the prefix cache. `entry`: the prefix cache's own record, opaque here.

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
    """A snapshot: evaluated arrays that share no memory with the row. `payload` is None if copying failed."""

    request: SnapshotRequest
    payload: Any


@dataclass(frozen=True, slots=True)
class CacheHit:
    """The first `length` tokens of a request are in the prefix cache.

    `deltas`: consecutive (start, stop, payload) from 0 to `length`; empty if no layer keeps all keys. The
    last payload may hold tokens beyond its `stop`. `state`: the payload at exactly `length` tokens; None if
    the model has no states.
    """

    length: int
    kind: HitKind
    deltas: tuple[tuple[int, int, Any], ...] = ()
    state: Any = None


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """The beginning of a prompt that stays in the prefix cache. `id`: of its content, in hexadecimal; `name`:
    as the operator calls it; `nbytes`: of device memory; `pinned_at`: seconds since 1970."""

    id: str
    name: str
    tokens: int
    nbytes: int
    pinned_at: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that gets a row. `output`: its tokens before a preemption, or from an earlier run."""

    request: Request
    output: tuple[int, ...] = ()
    hit: CacheHit | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, in the order of execution: final_snapshots, free, admit, encode, decode, prefill with
    snapshots.

    `decode`: requests that get one more token; their row's cache has all their tokens but the newest.
    `drafts`: predicted tokens after the newest one, for some of them; the step before is collected first.
    `encode`: requests whose pending images are encoded, in this order, for `encode_seconds` (None: all) and
    at least one part. `final_snapshots`: of rows that are freed now. `snapshots`: of rows that have
    prefilled.
    """

    free: tuple[str, ...] = ()
    admit: tuple[Admission, ...] = ()
    decode: tuple[str, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()
    clear_pool: bool = False  # memory is short: free the buffers of MLX's pool first
    final_snapshots: tuple[SnapshotRequest, ...] = ()
    snapshots: tuple[SnapshotRequest, ...] = ()
    drafts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    encode: tuple[str, ...] = ()
    encode_seconds: float | None = None


class SampledToken(NamedTuple):
    """A token that a row got in a step."""

    token: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The logprobs of consecutive prompt tokens, the first one at position `start`. Each has at least one of
    the likeliest tokens, because the prefix cache keeps it."""

    request_id: str
    start: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens and failed requests, by request id. With decode-ahead, tokens and logprobs lag one step
    behind. A row without a draft gets one token. A row with a draft gets its accepted tokens and one more.

    `snapshots`: copies that are ready. `invalid_hits`: requests whose hit could not be restored, so that the
    runner computed those tokens. `prompt_logprobs`: each request's in order of position. `shared_tokens`:
    tokens in the decode batch that several rows hold together. `ready`: how many prompt tokens can be
    computed now, None: all; of requests with images that were admitted or encoded.
    """

    tokens: Mapping[str, tuple[SampledToken, ...]] = field(default_factory=dict)
    errors: Mapping[str, Exception] = field(default_factory=dict)
    snapshots: tuple[SnapshotResult, ...] = ()
    invalid_hits: tuple[str, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    shared_tokens: int = 0
    ready: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SerializedTensor:
    """An array as bytes. `dtype` is its safetensors name: F32, BF16, F16, U32, U8, I64, ..."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True)
class SerializedPayload:
    """A payload in host memory."""

    tensors: Mapping[str, SerializedTensor]
    meta: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(len(tensor.data) for tensor in self.tensors.values())


MAX_ROWS = 256  # texts in a batch


@dataclass(slots=True)
class PoolingBatch:
    """Texts that are computed together. `nbytes`: the memory that they take; `computed`: how many tokens of
    each row are done; `state`: the runner's own."""

    requests: tuple[Request, ...]
    nbytes: int = 0
    computed: int = 0
    state: object | None = None

    @property
    def length(self) -> int:
        """The number of tokens of the longest text."""
        return max(len(request.prompt) for request in self.requests)


DEFAULT_CHUNK = 512  # tokens, if neither the config nor the device sets it
MIN_CHUNK = 64  # tokens; neither short memory nor slow steps make chunks smaller than this
SINGLE_TOKEN_CHUNK = 512  # tokens


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What the parts of a step cost on this device.

    `max_sampling_chunk`: the most tokens of a forward that also samples, after a hit or of a prompt that
    waits by itself. It is set where a forward costs more than its tokens. `waiting_weight`: how much a
    waiting prompt counts beside a decoding row; greater where each forward is expensive. `deep_prompt`:
    beside decoding rows, chunks shrink once this many tokens of a prompt are computed, since attention
    dominates from there; 0: never. `few_lengths`: a shortened chunk gets one of few lengths, because the
    device prepares for each new one. `min_chunk`: fewer tokens take no less time, because launches bound a
    forward. `least_fitting`: a chunk is halved if a step has time for less than this share of it.
    `lone_share`: of the time of a step, what a prompt gets while nothing else runs or waits. A request that
    comes then waits for less. It gets `lone_tokens` at least, where shorter steps are not as efficient.
    """

    max_sampling_chunk: int = 0
    waiting_weight: int = 1
    deep_prompt: int = 0
    few_lengths: bool = False
    min_chunk: int = MIN_CHUNK
    least_fitting: float = 1.0
    lone_share: float = 1.0
    lone_tokens: int = 128

    def limit_chunk(self, remaining: int, budget: int) -> int:
        """The most tokens of a step's first chunk. `remaining`: tokens left of its prompt."""
        if not self.few_lengths or remaining <= budget:
            return budget
        return 1 << (budget.bit_length() - 1)

    def get_max_sampling_chunk(self, request: Request, hit: bool, lone: bool) -> int:
        """The most tokens that one forward computes while it also samples, after a hit or not. After a hit,
        it is greater for a prompt with logprobs and one output token. Joining the decode batch would copy all
        its keys for one step. `lone`: no other prompt waits, whose forward this one could share."""
        params = request.params
        if hit and params.max_tokens == 1 and params.prompt_logprobs is not None:
            return max(self.max_sampling_chunk, SINGLE_TOKEN_CHUNK)
        return self.max_sampling_chunk if hit or lone else 0
