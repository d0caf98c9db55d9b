"""The scheduler's own record of a request: counters that chase each other, instead of phases.

      0 ...... computed ...... target .. length      positions in prompt + answer so far
      |in cache|  to prefill   | decode

`target` is where prefill stops: before the last token, which the decode batch takes as the row's first
step, so that no chunk has to compute logits. A prompt of one token, or one that ends in an image, has
nothing to hand over like that: its last chunk samples instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mlxrun.scheduler.request import HitKind, Request, TokenEvent
from mlxrun.scheduler.step_plan import CacheHit


@dataclass(slots=True, eq=False)
class RequestState:
    request: Request
    arrival_index: int  # counts up; the tie-breaker of every policy
    arrival_time: float  # when it came, in seconds of the scheduler's clock
    max_length: int  # most tokens of prompt and answer: the context, or what memory holds
    output: list[int] = field(default_factory=list)
    snapshot_positions: tuple[int, ...] = ()  # positions where a chunk should end, so that states can be kept there
    num_computed_tokens: int = 0  # tokens whose keys are in the row's cache, or in a chunk that is under way
    kv_length: int = 0  # the same, and the tokens that decode steps have added
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache gave when the request first ran
    hit_kind: HitKind | None = None
    last_chunk_samples: bool = False  # the last chunk takes all tokens and samples
    num_in_flight: int = 0  # answer tokens that were launched but are not known yet, by this row or the one before
    running: bool = False  # has a row
    decoding: bool = False  # the row has reached `target` and is in the decode batch
    suspect: bool = False  # was running when a step failed: must get through one step alone

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def key(self) -> str:
        return self.request.fairness_key

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.request.prompt) + len(self.output)

    @property
    def projected_length(self) -> int:
        """`known` and what is under way: so many tokens are in the cache after one more step."""
        return self.num_tokens + self.num_in_flight

    @property
    def prefill_target(self) -> int:
        ends_in_image = any(start < self.num_tokens <= stop for start, stop in self.request.image_spans)
        return self.num_tokens if self.num_tokens == 1 or ends_in_image or self.last_chunk_samples else self.num_tokens - 1

    @property
    def remaining_prefill(self) -> int:
        return 0 if self.decoding else self.prefill_target - self.num_computed_tokens

    @property
    def remaining_output(self) -> int:
        """Tokens that the answer may still get."""
        return min(self.request.params.max_tokens - len(self.output), self.max_length - self.num_tokens)

    @property
    def exhausted(self) -> bool:
        """All tokens that it may have are known or under way."""
        return self.num_in_flight >= self.remaining_output

    def make_event(self, num_computed_tokens: int, **fields: Any) -> TokenEvent:
        """News of it: the prompt is computed up to there (tokens of the answer that are computed again after
        a preemption do not count), and whatever else TokenEvent has."""
        num_computed_tokens = min(num_computed_tokens, len(self.request.prompt))
        return TokenEvent(self.id, num_computed_tokens=num_computed_tokens, num_cached_tokens=self.num_cached_tokens, hit_kind=self.hit_kind, **fields)

    def find_chunk_end(self, chunk: int, max_tokens: int) -> int:
        """End of the next chunk: the next multiple of `chunk`, at most `target` and `most` tokens away.

        Never inside an image: one that is larger than `most` goes in one piece.
        """
        stop = min((self.num_computed_tokens // chunk + 1) * chunk, self.prefill_target, self.num_computed_tokens + max_tokens)
        stop = min([stop, *(s for s in self.snapshot_positions if s > self.num_computed_tokens)])
        for start, end in self.request.image_spans:
            if start < stop < end:
                stop = start if start > self.num_computed_tokens else end
        return stop

    def record_prefill(self, stop: int) -> None:
        """A chunk up to `stop` was handed out."""
        if stop == self.prefill_target:
            self.decoding = True
            self.num_in_flight += int(stop == self.num_tokens)
        self.num_computed_tokens = self.kv_length = stop

    def record_decode(self) -> None:
        """One more token was launched."""
        self.num_in_flight += 1
        self.kv_length += 1

    def start_running(self, hit: CacheHit | None, max_sampling_chunk: int = 0) -> None:
        """Start to run with what the prefix cache has; `hit` leaves at least one token to compute. Up to
        `sampling` tokens after it are computed and sampled in one forward."""
        length = 0 if hit is None else hit.length
        self.num_in_flight = 0  # what the row before left is drawn again
        if self.hit_kind is None:
            self.hit_kind = HitKind.MISS if hit is None else hit.kind
            self.num_cached_tokens = min(length, len(self.request.prompt))
        self.num_computed_tokens = self.kv_length = length
        self.last_chunk_samples = hit is not None and 1 < self.num_tokens - length <= max_sampling_chunk
        self.decoding = length == self.prefill_target

    def reset(self) -> None:
        """Back to waiting, with nothing computed; the answer so far is kept, what is under way may come."""
        self.num_computed_tokens = self.kv_length = 0
        self.running = self.decoding = False
