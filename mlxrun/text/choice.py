"""One answer as it grows: token events in, text that may be shown out.

The text is the same however the events are merged. It ends before a stop string; the token that completes
one is the last that counts. The caller closes the generator once `stopped` is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxrun.scheduler.request import FinishReason, HitKind, TokenEvent, TokenLogprob
from mlxrun.text.detokenize import Detokenizer, TokenBytes
from mlxrun.text.host import HostModel
from mlxrun.text.prepared import Prepared
from mlxrun.text.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class LoggedToken:
    """A token of the answer with its probability, as bytes; `offset` is where it begins in the text."""

    text: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int


class Choice:
    """Collects one answer of a Prepared. `index` is its place in `prepared.requests` and in the response."""

    def __init__(self, prepared: Prepared, index: int, host: HostModel) -> None:
        backend = host.tokenizer.backend_tokenizer
        self.index = index
        self.stopped = False  # a stop string was found: nothing more is wanted
        self.stop: str | None = None  # the request's own stop string that was found
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.hit: HitKind | None = None  # how the prompt met the prefix cache
        self._stops = prepared.stops
        self._detokenizer = Detokenizer(backend)
        self._matcher = StopMatcher((*prepared.stops, *prepared.guards))
        self._parts: list[str] = []
        self._decoded = 0  # characters before stop strings are cut
        self._finish: FinishReason | None = None
        wants = prepared.requests[index].params.logprobs is not None
        self._bytes = TokenBytes(backend) if wants else None
        self._logged: list[tuple[int, TokenLogprob, int]] = []

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._parts)

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word for why the answer ended; None while it has not."""
        if self.stopped:
            return FinishReason.STOP.value
        return self._finish.value if self._finish is not None else None

    def resume(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> str:
        """The text of tokens that an earlier run answered (Request.answered), before any event of this one.
        It can end the answer: see `stopped`."""
        wanted = len(tokens) if logprobs or self._bytes is not None else 0
        if len(logprobs) != wanted:
            raise ValueError(f"{len(tokens)} answered tokens with {len(logprobs)} logprobs")
        return self.feed(TokenEvent("", tuple(tokens), tuple(logprobs)))

    def feed(self, event: TokenEvent) -> str:
        """The text that this event adds. With the final event, all that was held back comes too."""
        if event.error is not None:
            raise event.error
        self.cached_tokens = max(self.cached_tokens, event.cached)
        self.hit = event.hit or self.hit
        pieces = []
        for i, token in enumerate(event.tokens):
            if self.finish_reason is not None:
                break
            if event.logprobs:
                self._logged.append((token, event.logprobs[i], self._decoded))
            self.completion_tokens += 1
            pieces.append(self._take(self._detokenizer.feed((token,))))
        if event.finish is not None and self.finish_reason is None:
            pieces.append(self.finish())
            self._finish = event.finish
        return "".join(pieces)

    def finish(self) -> str:
        """Gives what was held back; for an answer whose events ended early. Safe to call again."""
        tail = self._take(self._detokenizer.finish())
        rest = self._matcher.finish()
        self._parts.append(rest)
        return tail + rest

    def logged(self) -> list[LoggedToken]:
        """The tokens with their probabilities, without those that lie wholly behind the cut of a stop
        string."""
        if self._bytes is None:
            return []
        end = len(self.text) if self.stopped else self._decoded + 1
        return [
            LoggedToken(self._bytes(token), lp.logprob, tuple((self._bytes(i), p) for i, p in lp.top), offset)
            for token, lp, offset in self._logged
            if offset < end
        ]

    def _take(self, decoded: str) -> str:
        self._decoded += len(decoded)
        text = self._matcher.feed(decoded)
        if self._matcher.matched is not None and not self.stopped:
            self.stopped = True
            self.stop = self._matcher.matched if self._matcher.matched in self._stops else None
        self._parts.append(text)
        return text
