"""One answer as it grows: consumes token events and returns the deltas that are certain.

The deltas of each kind join to the same text however events were merged. The text ends before a stop string.
The token that completes a stop string is the last that counts. The caller closes the generator once `stopped`
is set.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrun.api.parsers.delta import Delta, Parser
from mlxrun.api.prepared import PreparedRequest
from mlxrun.api.text.continuation import get_continuation_tail_ids, get_prompt_tail_ids
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.tokens.detokenize import Detokenizer, TokenBytes, get_token_bytes
from mlxrun.core.request import FinishReason, HitKind, TokenEvent, TokenLogprob

_MAX_DIGITS = 4000  # of an integer; Python parses no longer ones


@dataclass(frozen=True, slots=True)
class AnswerToken:
    """The bytes of a token with its logprob. `offset`: where it begins in the text, in characters. `top`: the
    likeliest tokens with their logprobs; `top_ids`: their ids."""

    text: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...]
    offset: int
    id: int
    top_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class ToolCall:
    """A tool call. `arguments` is JSON text, which is complete when the answer is."""

    id: str
    name: str
    arguments: str = ""


def parse_arguments(text: str) -> dict[str, Any]:
    """Parse the input of a call, a JSON object. A number that Python or JSON cannot express becomes text."""
    found = json.loads(
        text or "{}",
        parse_int=lambda number: int(number) if len(number) <= _MAX_DIGITS else number,
        parse_float=_parse_float,
    )
    assert isinstance(found, dict), "parsers return an object"
    return found


def _parse_float(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else text


class Choice:
    """Collects one answer of a PreparedRequest. `index`: its number in `requests`, and among the choices."""

    def __init__(self, prepared: PreparedRequest, index: int, model_info: ModelInfo) -> None:
        backend = model_info.tokenizer.backend_tokenizer
        request = prepared.requests[index]
        self.index = index
        self.stopped = False  # a stop string was found: no further tokens are needed
        self.stop: str | None = None  # the request's own stop string that was found
        self.completion_tokens = 0
        self.reasoning_tokens = 0  # of these, tokens of the reasoning
        self.cached_tokens = 0
        self.left_out_tokens = 0  # of the prompt, by sparse prefill
        self.token_ids: list[int] = []  # that were sampled, the stop token that ended the answer included
        self.calls: list[ToolCall] = []
        self.hit: HitKind | None = None  # what the prefix cache had of the prompt
        self._stops = prepared.stops
        self._min_tokens = request.params.min_tokens  # stop strings in these do not count
        self._single_call = prepared.single_tool_call
        self._keeps_stop = bool(prepared.echoed_offsets)  # harnesses count the logprobs behind the prompt's
        if prepared.kind == "completion":
            prefix_ids = get_prompt_tail_ids(model_info, request.prompt)
        else:
            prefix_ids = get_continuation_tail_ids(model_info, prepared.continuation)
        parser = prepared.make_parser(index)
        self._parser: Parser | None = parser  # None once it has finished
        self._detokenizer = Detokenizer(backend, frozenset(parser.markers), prefix_ids)
        self._matcher = StopMatcher((*prepared.stops, *prepared.control_stops))
        self._texts: list[str] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._pending_tokens = 0  # tokens that no delta came of yet
        self._decoded = 0  # characters before stop strings were removed
        self._released = 0  # characters of `text`
        self.delta_ends: list[int] = []  # the characters of `text` when each delta came, if it has logprobs
        self._finish: FinishReason | None = None
        self.prompt_logprobs: list[TokenLogprob | None] = []  # of the prompt's tokens from the second on
        wanted = (request.params.logprobs, request.params.prompt_logprobs)
        self._token_bytes = None if wanted == (None, None) else get_token_bytes(backend)
        self._has_logprobs = request.params.logprobs is not None
        self._logprobs: list[tuple[int, TokenLogprob, int]] = []

    @property
    def text(self) -> str:
        """All text so far, as the model wrote it."""
        return "".join(self._texts)

    def get_text_deltas(self, start: int) -> Sequence[str]:
        """Return the increments of `text` from number `start` on."""
        return self._texts[start:]

    @property
    def content(self) -> str:
        """The answer text: `text` without reasoning and tool calls."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def ended(self) -> bool:
        """Whether the answer is complete."""
        return self.stopped or self._finish is not None

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's `finish_reason`; None while the answer goes on."""
        reason = FinishReason.STOP if self.stopped else self._finish
        if reason is FinishReason.STOP and self.calls:
            return "tool_calls"
        return None if reason is None else reason.value

    def resume(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> list[Delta]:
        """Return the deltas of tokens that an earlier run generated (Request.prior_output), before any event.
        The tokens can end the answer: see `stopped`. ValueError if there are not as many logprobs."""
        expected = len(tokens) if logprobs or self._has_logprobs else 0
        if len(logprobs) != expected:
            raise ValueError(f"{len(tokens)} answered tokens with {len(logprobs)} logprobs")
        return self.feed(TokenEvent("", tuple(tokens), tuple(logprobs)))

    def feed(self, event: TokenEvent) -> list[Delta]:
        """Return the deltas that this event adds. The final event also releases withheld text. Raises the
        event's error if it has one."""
        if event.error is not None:
            raise event.error
        self.cached_tokens = max(self.cached_tokens, event.num_cached_tokens)
        self.left_out_tokens = max(self.left_out_tokens, event.num_left_out)
        self.hit = event.hit_kind or self.hit
        self.prompt_logprobs += event.prompt_logprobs
        deltas: list[Delta] = []
        for i, token in enumerate(event.tokens):
            if self.ended:
                break
            if event.logprobs:
                self._logprobs.append((token, event.logprobs[i], self._decoded))
            self.completion_tokens += 1
            self.token_ids.append(token)
            self._pending_tokens += 1
            deltas += self._parse(self._detokenizer.feed((token,)))
        if event.finish is not None and not self.ended:
            deltas += self.finish()
            self._finish = event.finish
            if event.stop_id is not None:
                self.token_ids.append(event.stop_id)
                if self._keeps_stop and event.stop_logprob is not None:
                    self._logprobs.append((event.stop_id, event.stop_logprob, self._decoded))
        return deltas

    def finish(self) -> list[Delta]:
        """Return the withheld deltas of an answer whose events ended early; none at a second call."""
        if self._parser is None:
            return []
        return self._parse(self._detokenizer.finish()) + self._end_text()

    def _end_text(self) -> list[Delta]:
        """The deltas that are left; none if a stop string has ended the text meanwhile."""
        if self._parser is None:
            return []
        rest = self._matcher.finish()
        self._release(rest)
        parser, self._parser = self._parser, None
        return self._collect([*parser.feed(rest), *parser.finish(self.stop is not None)])

    def get_tokens_with_logprobs(self, start: int = 0) -> list[AnswerToken]:
        """Return the tokens from number `start` on that have logprobs.

        While the answer grows, these are the tokens whose text was released. Later, tokens entirely behind a
        stop string are left out. Behind an echoed prompt no sampled token is left out."""
        is_whole = self.ended and (self._keeps_stop or not self.stopped)
        end = self._decoded + 1 if is_whole else self._released
        return [self._make_answer_token(*each) for each in self._logprobs[start:] if each[2] < end]

    @property
    def token_bytes(self) -> TokenBytes:
        """Returns the bytes of a token id; only for requests with logprobs."""
        assert self._token_bytes is not None
        return self._token_bytes

    def _make_answer_token(self, token: int, logprob: TokenLogprob, offset: int) -> AnswerToken:
        top = tuple((self.token_bytes(i), p) for i, p in logprob.top)
        ids = tuple(i for i, _ in logprob.top)
        return AnswerToken(self.token_bytes(token), logprob.logprob, top, offset, token, ids)

    def _parse(self, decoded: str) -> list[Delta]:
        self._decoded += len(decoded)
        text = self._matcher.feed(decoded, may_match=self.completion_tokens > self._min_tokens)
        self._release(text)
        deltas = self._collect(self._parser.feed(text)) if self._parser is not None else []
        if self._matcher.matched is not None and not self.stopped:
            self.stopped = True
            self.stop = self._matcher.matched if self._matcher.matched in self._stops else None
            deltas += self.finish()
        return deltas

    def _release(self, text: str) -> None:
        self._texts.append(text)
        self._released += len(text)

    def _collect(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Adds each delta to the content, the reasoning or its tool call."""
        added: list[Delta] = []
        for delta in deltas:
            self.reasoning_tokens += self._pending_tokens if delta.kind == "reasoning" else 0
            self._pending_tokens = 0
            if delta.kind == "call":
                if self._single_call and delta.index > 0:
                    self.stopped, self._parser = True, None
                    break
                if delta.index == len(self.calls):
                    self.calls.append(ToolCall(delta.id, delta.name))
                self.calls[delta.index].arguments += delta.text
            else:
                (self._content if delta.kind == "content" else self._reasoning).append(delta.text)
            added.append(delta)
        if self._has_logprobs:
            self.delta_ends += [self._released] * len(added)
        return added


class StopMatcher:
    """Passes text through until a stop string matches; then `matched` is set, and later text is dropped.

    The match that is complete first wins. If several end together, the longest wins. Text is withheld only
    while it may begin a stop string. The result does not depend on how the text was split.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = set(stops) - {""}
        self._longest = max(map(len, self._stops), default=0)
        self._first_chars = {stop[0] for stop in self._stops}
        self._withheld = ""
        self.matched: str | None = None

    def feed(self, text: str, *, may_match: bool = True) -> str:
        """Return the text that is certainly not part of a stop string. Without `may_match`, stop strings that
        end in `text` are passed through."""
        if self.matched is not None:
            return ""
        if not self._withheld and self._first_chars.isdisjoint(text):
            return text
        before, text = len(self._withheld), self._withheld + text
        match = self._find_match(text, before) if may_match else None
        if match is not None:
            end, self.matched = match
            self._withheld = ""
            return text[: end - len(self.matched)]
        starts = range(max(0, len(text) - self._longest + 1), len(text))
        certain = next((at for at in starts if self._may_become_stop(text[at:])), len(text))
        self._withheld = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """Return the withheld text: the answer has ended, and completes no stop string."""
        rest, self._withheld = self._withheld, ""
        return rest

    def _find_match(self, text: str, before: int) -> tuple[int, str] | None:
        """Where a stop string ends in the text behind `before`, and the string; the longest of the first."""
        found = []
        for stop in self._stops:
            at = text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0:
                found.append((at + len(stop), -len(stop), stop))
        if not found:
            return None
        end, _, stop = min(found)
        return end, stop

    def _may_become_stop(self, text: str) -> bool:
        return any(len(text) < len(stop) and stop.startswith(text) for stop in self._stops)
