"""The scheduler's record of a request. Its counters say how far it is; there are no phases.

      0 .... num_computed_tokens .... prefill_target .. num_tokens      positions in prompt + output
      |  in the cache  |  remaining_prefill  |   decode   |

Prefill stops before the last token, which becomes the row's first decode step. So no chunk has to compute
logits. A prompt of one token, or one that ends in an image, has no such token: its last chunk samples
instead. A request without output (`max_tokens` 0) ends where its first decode step would be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlxrun.core.request import (
    FinishReason,
    HitKind,
    Request,
    TokenEvent,
    TokenLogprob,
    find_chunk_stop,
)
from mlxrun.core.step_plan import CacheHit, SampledToken
from mlxrun.engine.scheduler.row_drafter import Acceptance, RowDrafter


@dataclass(slots=True, eq=False)
class RequestState:
    """One request, from its arrival to its final event."""

    request: Request
    arrival_index: int  # counts up with each request; breaks the ties of every policy
    arrival_time: float  # in seconds of the scheduler's clock
    max_length: int  # of prompt and output, in tokens: the context, or what fits in memory
    regenerates: bool = False  # after a preemption, output is generated again, not computed as a prompt
    output: list[int] = field(init=False)
    max_output: int = field(init=False)  # tokens
    prompt_logprobs: RequestLogprobs = field(init=False)
    cache_positions: tuple[int, ...] = ()  # chunks end there, so that states can be snapshotted
    num_computed_tokens: int = 0  # tokens that are in the row's cache or in a chunk of the step in flight
    kv_length: int = 0  # the same, plus the tokens that decode steps have added
    num_ready: int | None = None  # tokens whose images are encoded; None: all
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache when the request first ran
    hit_kind: HitKind | None = None
    queue_seconds: float = 0.0  # that it waited before it first ran
    last_chunk_samples: bool = False  # prefill takes all tokens, and its last chunk samples
    num_sent: int = field(init=False)  # output tokens that events have brought
    num_in_flight: int = 0  # output tokens that were launched and not read yet, also by an earlier row
    running: bool = False  # has a row
    decoding: bool = False  # the row has reached `prefill_target`: its next step is a decode step
    joined: bool = False  # an earlier step has decoded the row, so that its keys are in the decode batch
    suspect: bool = False  # was running when a step failed, and has not completed a step alone since
    drafter: RowDrafter | None = None  # predicts tokens, once the row has decoded where drafts are on
    acceptance: Acceptance | None = None  # of drafts that a model makes for the row
    draft: tuple[int, ...] = ()  # predicted tokens that the step in flight verifies

    def __post_init__(self) -> None:
        self.output = list(self.request.prior_output)
        self.num_sent = len(self.output)
        self.max_output = min(self.request.params.max_tokens, self.max_length - len(self.request.prompt))
        self.prompt_logprobs = RequestLogprobs(self.request)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt and of the output so far."""
        return len(self.request.prompt) + len(self.output)

    @property
    def projected_length(self) -> int:
        """Tokens in the row's cache after one more step: `num_tokens`, those in flight, and a draft."""
        return self.num_tokens + self.num_in_flight + len(self.draft)

    @property
    def expected_length(self) -> int:
        """`projected_length`, or the length before a preemption if the output is generated again."""
        return max(self.projected_length, len(self.request.prompt) + self.num_sent)

    @property
    def prefill_target(self) -> int:
        """The position where prefill stops; see the module's docstring."""
        size, spans = self.num_tokens, self.request.image_spans
        ends_in_image = bool(spans) and any(start < size <= stop for start, stop in spans)
        return size if size == 1 or ends_in_image or self.last_chunk_samples else size - 1

    @property
    def remaining_prefill(self) -> int:
        return 0 if self.decoding else self.prefill_target - self.num_computed_tokens

    @property
    def remaining_output(self) -> int:
        """How many more tokens the output may get."""
        return self.max_output - len(self.output)

    @property
    def exhausted(self) -> bool:
        """Whether all tokens that the output may get are known or in flight."""
        return self.num_in_flight >= self.remaining_output

    @property
    def needs_nothing(self) -> bool:
        """Whether a request without output is complete: its prompt is computed, or its logprobs are known."""
        params = self.request.params
        is_computed = self.decoding or params.prompt_logprobs is not None
        return params.max_tokens == 0 and is_computed and self.prompt_logprobs.complete

    def make_event(
        self,
        num_computed_tokens: int,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        finish: FinishReason | None = None,
    ) -> TokenEvent:
        """An event that reports this much prefill. Output tokens that are computed again after a preemption
        do not count."""
        computed = min(num_computed_tokens, len(self.request.prompt))
        return TokenEvent(
            self.id,
            tokens,
            logprobs,
            computed,
            self.num_cached_tokens,
            self.hit_kind,
            finish,
            prompt_logprobs=self.prompt_logprobs.take_unsent(),
            num_left_out=self.request.num_left_out,
            queue_seconds=self.queue_seconds,
        )

    def find_chunk_end(self, chunk: int, max_tokens: int) -> int:
        """The end of the next chunk: the next multiple of `chunk`, at most `prefill_target` and `max_tokens`
        away. It never ends inside an image, even if an image has more than `max_tokens` tokens."""
        start = self.num_computed_tokens
        stop = min((start // chunk + 1) * chunk, self.prefill_target, start + max_tokens)
        stop = min([stop, *(position for position in self.cache_positions if position > start)])
        return find_chunk_stop(start, stop, self.request.image_spans)

    def record_prefill(self, stop: int) -> None:
        """Note that a chunk up to `stop` was scheduled."""
        if stop == self.prefill_target:
            self.decoding = True
            self.num_in_flight += int(stop == self.num_tokens and self.remaining_output > 0)
        self.num_computed_tokens = self.kv_length = self.prompt_logprobs.launched = stop

    def record_decode(self) -> None:
        """Note that a decode step was scheduled."""
        self.num_in_flight += 1
        self.kv_length += 1
        self.joined = True

    def append_tokens(self, found: Sequence[SampledToken]) -> tuple[list[SampledToken], SampledToken | None]:
        """Take in the tokens of a step; all but the last were drafted and are in the row's cache. Returns the
        tokens of the output, and the token with the stop id that ended it. Tokens of a preempted row are left
        out if they will be generated again."""
        self.num_in_flight, self.draft = self.num_in_flight - 1, ()
        taken: list[SampledToken] = []
        if self.regenerates and not self.running:
            return taken, None
        for index, sampled in enumerate(found, 1):
            self.kv_length += index < len(found)
            if sampled.token in self.request.params.stop_ids:
                return taken, sampled
            taken.append(sampled)
            self.output.append(sampled.token)
        return taken, None

    def record_sent(self) -> int:
        """Count all output as sent. Returns how many of its newest tokens no event has brought yet."""
        unsent = max(len(self.output) - self.num_sent, 0)
        self.num_sent += unsent
        return unsent

    def start_running(self, hit: CacheHit | None, max_sampling_chunk: int = 0) -> None:
        """Start empty, or from a hit of the prefix cache, which leaves at least one token to compute. If at
        most `max_sampling_chunk` tokens are left, one forward computes them and samples."""
        length = 0 if hit is None else hit.length
        self.num_in_flight = 0  # tokens that an earlier row had in flight are sampled again
        self.prompt_logprobs.launched = 0
        if self.hit_kind is None:
            self.hit_kind = HitKind.MISS if hit is None else hit.kind
            self.num_cached_tokens = min(length, len(self.request.prompt))
        self.num_computed_tokens = self.kv_length = length
        has_images = any(stop > length for _, stop in self.request.image_spans)
        self.num_ready = 0 if has_images and self.request.media is not None else None
        left = self.num_tokens - length
        samples = self.request.params.max_tokens > 0
        self.last_chunk_samples = samples and 1 < left <= max_sampling_chunk
        self.decoding = length == self.prefill_target

    def record_found(self) -> None:
        """Note that the prefix cache had all that the request needs, so that it gets no row."""
        if self.hit_kind is None:
            self.hit_kind, self.num_cached_tokens = HitKind.EXACT, len(self.request.prompt)

    def reset(self) -> None:
        """Return to waiting, with nothing computed. The output is kept, unless it is generated again. Tokens
        in flight may still arrive."""
        if self.regenerates:
            self.output = list(self.request.prior_output)
        self.num_computed_tokens = self.kv_length = 0
        self.running = self.decoding = self.joined = False
        self.draft = ()


@dataclass(slots=True, eq=False)
class RequestLogprobs:
    """The prompt logprobs of one request.

    `next_position`: the first prompt token whose logprob is wanted and not known, or else the prompt's
    length. `launched`: the position up to which the device has computed, or computes, logprobs.
    """

    request: Request
    next_position: int = field(init=False)
    launched: int = 0
    _unsent: list[TokenLogprob | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = self.request
        is_wanted = request.params.prompt_logprobs is not None
        size = len(request.prompt)
        self.next_position = min(max(request.logprobs_from, 1), size) if is_wanted else size
        self._skip_images()

    @property
    def complete(self) -> bool:
        return self.next_position == len(self.request.prompt)

    def limit_hit(self, tokens: int) -> int:
        """The most of `tokens` tokens that may come from the prefix cache. The token before the first wanted
        one must be computed."""
        return tokens if self.complete else min(tokens, self.next_position - 1)

    def add(self, start: int, logprobs: Sequence[TokenLogprob]) -> bool:
        """Take in logprobs of the tokens from `start` on, without known ones. Returns whether one was new."""
        before, count = self.next_position, self.request.params.prompt_logprobs or 0
        while start <= self.next_position and not self.complete:
            new = logprobs[self.next_position - start : self._find_stop() - start]
            if not new:
                break
            self._unsent += [
                logprob
                if len(logprob.top) <= count
                else TokenLogprob(logprob.logprob, logprob.top[:count], logprob.rank)
                for logprob in new
            ]
            self.next_position += len(new)
            self._skip_images()
        return self.next_position > before

    def owns(self, start: int) -> bool:
        """Whether the device computed logprobs from `start` on for this request, and not for an ended one."""
        return start <= self.launched

    def take_unsent(self) -> tuple[TokenLogprob | None, ...]:
        """The logprobs that no event has brought yet."""
        if not self._unsent:
            return ()
        unsent, self._unsent = tuple(self._unsent), []
        return unsent

    def _find_stop(self) -> int:
        """Where the run of wanted tokens ends that begins at `next_position`: at an image, or the end."""
        starts = (start for start, _ in self.request.image_spans if start > self.next_position)
        return min(starts, default=len(self.request.prompt))

    def _skip_images(self) -> None:
        for start, stop in self.request.image_spans:
            if not self.complete and start <= self.next_position < stop:
                self._unsent += [None] * (stop - self.next_position)
                self.next_position = stop
