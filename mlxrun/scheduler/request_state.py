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
    arrival: int  # counts up; the tie-breaker of every policy
    since: float  # when it came, in seconds of the scheduler's clock
    limit: int  # most tokens of prompt and answer: the context, or what memory holds
    output: list[int] = field(default_factory=list)
    stops: tuple[int, ...] = ()  # positions where a chunk should end, so that states can be kept there
    computed: int = 0  # tokens whose keys are in the row's cache, or in a chunk that is under way
    filled: int = 0  # the same, and the tokens that decode steps have added
    cached: int = 0  # prompt tokens that the prefix cache gave when the request first ran
    hit: HitKind | None = None
    whole: bool = False  # the last chunk takes all tokens and samples
    pending: int = 0  # answer tokens that were launched but are not known yet, by this row or the one before
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
        return self.request.key

    @property
    def known(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.request.prompt) + len(self.output)

    @property
    def length(self) -> int:
        """`known` and what is under way: so many tokens are in the cache after one more step."""
        return self.known + self.pending

    @property
    def target(self) -> int:
        ends_in_image = any(start < self.known <= stop for start, stop in self.request.spans)
        return self.known if self.known == 1 or ends_in_image or self.whole else self.known - 1

    @property
    def prefill_left(self) -> int:
        return 0 if self.decoding else self.target - self.computed

    @property
    def room(self) -> int:
        """Tokens that the answer may still get."""
        return min(self.request.params.max_tokens - len(self.output), self.limit - self.known)

    @property
    def exhausted(self) -> bool:
        """All tokens that it may have are known or under way."""
        return self.pending >= self.room

    def event(self, computed: int, **news: Any) -> TokenEvent:
        """News of it: the prompt is computed up to there (tokens of the answer that are computed again after
        a preemption do not count), and whatever else TokenEvent has."""
        computed = min(computed, len(self.request.prompt))
        return TokenEvent(self.id, computed=computed, cached=self.cached, hit=self.hit, **news)

    def next_stop(self, chunk: int, most: int) -> int:
        """End of the next chunk: the next multiple of `chunk`, at most `target` and `most` tokens away.

        Never inside an image: one that is larger than `most` goes in one piece.
        """
        stop = min((self.computed // chunk + 1) * chunk, self.target, self.computed + most)
        stop = min([stop, *(s for s in self.stops if s > self.computed)])
        for start, end in self.request.spans:
            if start < stop < end:
                stop = start if start > self.computed else end
        return stop

    def advance(self, stop: int) -> None:
        """A chunk up to `stop` was handed out."""
        if stop == self.target:
            self.decoding = True
            self.pending += int(stop == self.known)
        self.computed = self.filled = stop

    def decode(self) -> None:
        """One more token was launched."""
        self.pending += 1
        self.filled += 1

    def resume(self, hit: CacheHit | None, sampling: int = 0) -> None:
        """Start to run with what the prefix cache has; `hit` leaves at least one token to compute. Up to
        `sampling` tokens after it are computed and sampled in one forward."""
        length = 0 if hit is None else hit.length
        self.pending = 0  # what the row before left is drawn again
        if self.hit is None:
            self.hit = HitKind.MISS if hit is None else hit.kind
            self.cached = min(length, len(self.request.prompt))
        self.computed = self.filled = length
        self.whole = hit is not None and 1 < self.known - length <= sampling
        self.decoding = length == self.target

    def reset(self) -> None:
        """Back to waiting, with nothing computed; the answer so far is kept, what is under way may come."""
        self.computed = self.filled = 0
        self.running = self.decoding = False
