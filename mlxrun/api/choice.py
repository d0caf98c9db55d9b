"""One answer as it grows: token events in, typed pieces that may be shown out.

The pieces of a kind are the same however the events are merged. The text ends before a stop string; the token
that completes one is the last that counts. The caller closes the generator once `stopped` is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxrun.api.prepared import PreparedRequest
from mlxrun.parsers.delta import Delta, Parser
from mlxrun.scheduler.request import FinishReason, HitKind, TokenEvent, TokenLogprob
from mlxrun.text.continuation import get_continuation_tail_ids, get_prompt_tail_ids
from mlxrun.text.detokenize import Detokenizer, TokenBytes
from mlxrun.text.model_info import ModelInfo
from mlxrun.text.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """A token of the answer with its probability, as bytes; `offset` is where it begins in the text."""

    text: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int


@dataclass(slots=True)
class ToolCall:
    """A tool call; `arguments` is JSON text, complete once the answer is."""

    id: str
    name: str
    arguments: str = ""


class Choice:
    """Collects one answer of a Prepared. `index` is its place in `prepared.requests` and in the response."""

    def __init__(self, prepared: PreparedRequest, index: int, model_info: ModelInfo) -> None:
        backend = model_info.tokenizer.backend_tokenizer
        self.index = index
        self.stopped = False  # a stop string was found: nothing more is wanted
        self.stop: str | None = None  # the request's own stop string that was found
        self.completion_tokens = 0
        self.reasoning_tokens = 0  # of these, tokens of the thought
        self.cached_tokens = 0
        self.calls: list[ToolCall] = []
        self.hit: HitKind | None = None  # how the prompt met the prefix cache
        self._stops = prepared.stops
        parser = prepared.make_parser(index)
        if prepared.kind == "completion":  # which goes on from its prompt, as a chat's answer does not
            before = get_prompt_tail_ids(model_info, prepared.requests[index].prompt)
        else:
            before = get_continuation_tail_ids(model_info, prepared.continuation)
        self._detokenizer = Detokenizer(backend, frozenset(parser.markers), before)
        self._matcher = StopMatcher((*prepared.stops, *prepared.control_stops))
        self._parser: Parser | None = parser  # None once it has finished
        self._one_call = prepared.single_tool_call
        self._parts: list[str] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._unsure = 0  # tokens that no piece has come of yet
        self._decoded = 0  # characters before stop strings are cut
        self._shown = 0  # characters of `text`
        self._finish: FinishReason | None = None
        wants = prepared.requests[index].params.logprobs is not None
        self._bytes = TokenBytes(backend) if wants else None
        self._logged: list[tuple[int, TokenLogprob, int]] = []

    @property
    def text(self) -> str:
        """All text so far, as the model wrote it."""
        return "".join(self._parts)

    def get_text_deltas(self, start: int) -> Sequence[str]:
        """The pieces of `text` from the `start`th on: for who follows it as it grows."""
        return self._parts[start:]

    @property
    def content(self) -> str:
        """The text without thought and calls."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """The thought."""
        return "".join(self._reasoning)

    @property
    def ended(self) -> bool:
        """Whether nothing more can come."""
        return self.stopped or self._finish is not None

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's word for why the answer ended; None while it has not."""
        reason = FinishReason.STOP if self.stopped else self._finish
        if reason is FinishReason.STOP and self.calls:
            return "tool_calls"
        return None if reason is None else reason.value

    def resume(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> list[Delta]:
        """The pieces of tokens that an earlier run answered (Request.answered), before any event of this one.
        It can end the answer: see `stopped`."""
        wanted = len(tokens) if logprobs or self._bytes is not None else 0
        if len(logprobs) != wanted:
            raise ValueError(f"{len(tokens)} answered tokens with {len(logprobs)} logprobs")
        return self.feed(TokenEvent("", tuple(tokens), tuple(logprobs)))

    def feed(self, event: TokenEvent) -> list[Delta]:
        """The pieces that this event adds. With the final event, all that was held back comes too."""
        if event.error is not None:
            raise event.error
        self.cached_tokens = max(self.cached_tokens, event.num_cached_tokens)
        self.hit = event.hit_kind or self.hit
        pieces: list[Delta] = []
        for i, token in enumerate(event.tokens):
            if self.ended:
                break
            if event.logprobs:
                self._logged.append((token, event.logprobs[i], self._decoded))
            self.completion_tokens += 1
            self._unsure += 1
            pieces += self._take(self._detokenizer.feed((token,)))
        if event.finish is not None and not self.ended:
            pieces += self.finish()
            self._finish = event.finish
        return pieces

    def finish(self) -> list[Delta]:
        """Gives what was held back; for an answer whose events ended early. Safe to call again."""
        if self._parser is None:
            return []
        pieces = self._take(self._detokenizer.finish())
        rest = self._matcher.finish()
        self._parts.append(rest)
        self._shown += len(rest)
        parser, self._parser = self._parser, None
        return pieces + self._collect([*parser.feed(rest), *parser.finish()])

    def get_tokens_with_logprobs(self, start: int = 0) -> list[AnswerToken]:
        """The tokens from the `start`th on with their probabilities, without those that lie wholly behind the
        cut of a stop string; while the answer grows, those whose text is out."""
        if self._bytes is None:
            return []
        end = self._decoded + 1 if self._finish is not None and not self.stopped else self._shown
        return [
            AnswerToken(self._bytes(token), lp.logprob, tuple((self._bytes(i), p) for i, p in lp.top), offset)
            for token, lp, offset in self._logged[start:]
            if offset < end
        ]

    def _take(self, decoded: str) -> list[Delta]:
        self._decoded += len(decoded)
        text = self._matcher.feed(decoded)
        self._parts.append(text)
        self._shown += len(text)
        pieces = self._collect(self._parser.feed(text)) if self._parser is not None else []
        if self._matcher.matched is not None and not self.stopped:
            self.stopped = True
            self.stop = self._matcher.matched if self._matcher.matched in self._stops else None
            pieces += self.finish()
        return pieces

    def _collect(self, pieces: Sequence[Delta]) -> list[Delta]:
        """Collect each piece where it belongs."""
        taken: list[Delta] = []
        for piece in pieces:
            self.reasoning_tokens += self._unsure if piece.kind == "reasoning" else 0
            self._unsure = 0
            if piece.kind == "call":
                if self._one_call and piece.index > 0:
                    self.stopped, self._parser = True, None
                    break
                if piece.index == len(self.calls):
                    self.calls.append(ToolCall(piece.id, piece.name))
                self.calls[piece.index].arguments += piece.text
            else:
                (self._content if piece.kind == "content" else self._reasoning).append(piece.text)
            taken.append(piece)
        return taken
