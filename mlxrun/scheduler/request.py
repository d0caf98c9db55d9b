"""What a front end asks of the engine, and what it gets back. Pure data, shared by all packages.

A Request can only hold token ids and numbers that were checked before (parse, don't validate);
text, images and JSON stay on the front end's side, except `media`, which is opaque here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlxrun.errors import MlxrunError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn. Ranges are checked where bodies are parsed.

    Order of application, on float32 logits of the last position: grammar, logit_bias, repetition penalty
    (CTRL, arXiv:1909.05858: over prompt and answer), presence and frequency penalty (OpenAI: over the answer
    only), temperature, top_k, top_p, min_p. `temperature` 0 is greedy. `seed` decides all randomness of a
    request together with the token's position, whatever else runs in the batch.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    logprobs: int | None = None  # None: none; n: the chosen token's and the n likeliest ones'
    stop_ids: frozenset[int] = frozenset()  # end the answer; not part of it


class GrammarMatcher(Protocol):
    """What one row may say: follows its answer token by token, on the engine thread alone. Whatever a method
    raises fails that row, and no other."""

    @property
    def done(self) -> bool:
        """Whether nothing but a stop token may follow."""

    def mask(self) -> bytes:
        """The tokens that may follow, stop tokens included: token i is bit i % 8 of byte i // 8; what the
        bytes do not reach is forbidden."""

    def accept(self, token: int) -> None:
        """The row has said this token, which the last mask allowed."""


class Grammar(Protocol):
    """What an answer must look like. Immutable: one may serve many requests."""

    def start(self, output: Sequence[int], stop_ids: frozenset[int]) -> GrammarMatcher:
        """A constraint after these tokens of the answer; made each time that a row starts. A stop token is
        allowed only where the answer is complete. RequestError if the tokens do not fit."""


@dataclass(frozen=True, slots=True)
class ProcessedPrompt:
    """What a model's processor makes of a prompt with images. For the fields see `Request`."""

    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    media: Any
    digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be answered.

    `prompt` holds every token, image placeholders expanded. `spans` are the half-open ranges of `prompt`
    that an image fills, in order, never overlapping; a prefill chunk does not end inside one. `media` is
    what the model's processor made of the images (numpy only); the scheduler never looks at it. `digests`
    say, for each span, what fills it. `boundaries` are positions in `prompt`, ascending, where other prompts
    are likely to part from this one: the end of system and tools, the start of the last user turn. `answered`
    are tokens of the answer that are known from an earlier run; events do not repeat them. `grammar` is what
    the answer must look like, None for anything; the scheduler never looks at it.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    image_spans: tuple[tuple[int, int], ...] = ()
    media: Any = None
    image_digests: tuple[bytes, ...] = ()
    boundaries: tuple[int, ...] = ()
    prior_output: tuple[int, ...] = ()
    priority: int = 0  # policy `priority`: lower first
    fairness_key: str = ""  # policy `fair`: round robin over these
    grammar: Grammar | None = None
    background: bool = False  # served in idle room only: an offline batch beside live requests


class FinishReason(enum.StrEnum):
    """Why an answer ended, in OpenAI's words where it has one."""

    STOP = "stop"  # a stop id, or (front end) a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the front end asked for it, or went away
    ERROR = "error"  # see TokenEvent.error


class HitKind(enum.StrEnum):
    """How a prompt met the prefix cache."""

    EXACT = "exact"  # all that can be reused of the same prompt
    PREFIX = "prefix"  # whole records that the prompt goes beyond
    SUPERSEQUENCE = "supersequence"  # the prompt is a part of a longer record
    LCP = "lcp"  # a part of a record, from which the prompt then differs
    MISS = "miss"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probabilities under the model's own distribution (before grammar, temperature, filters)."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """News of one request. Events of one request merge: tokens concatenate, the rest is the newest.

    Exactly one event of each request has `finish` set, and it is the last. A stop id is not among `tokens`.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # as long as `tokens`, or empty if not asked for
    num_computed_tokens: int = 0  # prompt tokens in the cache so far: prefill progress
    num_cached_tokens: int = 0  # of these, how many were not computed but found in the prefix cache
    hit_kind: HitKind | None = None  # how, once the request runs; None before, or without a cache
    finish: FinishReason | None = None
    error: MlxrunError | None = None  # set if and only if finish is ERROR

    def merge(self, later: TokenEvent) -> TokenEvent:
        """This event followed by `later`, as one. Each merge copies all tokens."""
        return self.merge_progress(later, self.tokens + later.tokens, self.logprobs + later.logprobs)

    def merge_progress(
        self, later: TokenEvent, tokens: tuple[int, ...] = (), logprobs: tuple[TokenLogprob, ...] = ()
    ) -> TokenEvent:
        """This event followed by `later`, as one with these tokens instead of theirs."""
        return TokenEvent(
            self.request_id,
            tokens,
            logprobs,
            max(self.num_computed_tokens, later.num_computed_tokens),
            max(self.num_cached_tokens, later.num_cached_tokens),
            later.hit_kind or self.hit_kind,
            later.finish,
            later.error,
        )
