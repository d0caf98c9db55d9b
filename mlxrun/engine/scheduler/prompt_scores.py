"""Which logprobs of a request's prompt are known, in order of position, and which wait for its next event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mlxrun.core.request import Request, TokenLogprob


@dataclass(slots=True, eq=False)
class PromptScores:
    """`next_position`: the first prompt token whose logprob is wanted and not known; the prompt's length if
    there is none. `launched`: the device has computed, or computes, the logprobs up to this position."""

    request: Request
    next_position: int = field(init=False)
    launched: int = 0
    _unsent: list[TokenLogprob | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = self.request
        is_wanted = request.params.prompt_logprobs is not None
        size = len(request.prompt)
        self.next_position = min(max(request.score_from, 1), size) if is_wanted else size
        self._skip_images()

    @property
    def complete(self) -> bool:
        return self.next_position == len(self.request.prompt)

    def limit_hit(self, tokens: int) -> int:
        """The most of `tokens` tokens that may come from the prefix cache: the token before the first one
        that is wanted has to be computed."""
        return tokens if self.complete else min(tokens, self.next_position - 1)

    def add(self, start: int, logprobs: Sequence[TokenLogprob]) -> bool:
        """Take in logprobs of the tokens from `start` on; known ones are left out. Returns whether one was
        new."""
        before, count = self.next_position, self.request.params.prompt_logprobs or 0
        while start <= self.next_position and not self.complete:
            new = logprobs[self.next_position - start : self._find_stop() - start]
            if not new:
                break
            self._unsent += [
                score
                if len(score.top) <= count
                else TokenLogprob(score.logprob, score.top[:count], score.rank)
                for score in new
            ]
            self.next_position += len(new)
            self._skip_images()
        return self.next_position > before

    def owns(self, start: int) -> bool:
        """Whether the device has computed logprobs from `start` on for this request, not for an ended one."""
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
