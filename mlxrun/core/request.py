"""What a front end asks of the engine, and what it gets back. Pure data, shared by all packages.

A Request holds only token ids and numbers that were validated before. Text, images and JSON stay in the front
end; `media` and `grammar` are opaque to the scheduler.

Equal content ids mean equal content. The prefix cache and the pages of rows use them to find shared prompts.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, NamedTuple, Protocol

from mlxrun.core.errors import MlxrunError
from mlxrun.core.transcription import Recording, Transcript


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are sampled. Ranges are validated where bodies are parsed.

    The settings apply in this order to the float32 logits of the last position: grammar, `min_tokens`,
    logit_bias, penalties, temperature, top_k, top_p, min_p. The repetition penalty is that of CTRL
    (arXiv:1909.05858), over prompt and answer. Presence and frequency penalties are OpenAI's, over the answer
    only. `temperature` 0 is greedy. `seed` and the token's position decide all randomness of a request,
    whatever else runs in the batch.

    The first `min_tokens` tokens are none of `end_ids`, unless the grammar allows nothing else. `max_tokens`
    0: the request ends once its prompt is computed.
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
    logprobs: int | None = None  # None: none; n: of the sampled token and of the n likeliest ones
    stop_ids: frozenset[int] = frozenset()  # end the answer, and are not part of it
    min_tokens: int = 0
    end_ids: frozenset[int] = frozenset()  # with min_tokens: stop_ids, and the model's own with ignore_eos
    prompt_logprobs: int | None = None  # None: none; n: of each prompt token and of the n likeliest ones


class GrammarMatcher(Protocol):
    """Follows the answer of one row token by token, on the engine thread only. An error of a method fails
    only that row."""

    @property
    def done(self) -> bool:
        """Whether only a stop token may follow."""

    def mask(self) -> bytes:
        """The tokens that may follow, stop tokens included, as a bitmask. Token i is bit i % 8 of byte i //
        8. Tokens beyond the last byte are forbidden."""

    def accept(self, token: int) -> None:
        """Take in a sampled token that the last mask allowed."""

    def fork(self) -> GrammarMatcher:
        """An independent copy."""


class Grammar(Protocol):
    """What an answer must match. Immutable: one object may serve many requests."""

    def start(self, output: Sequence[int], stop_ids: frozenset[int]) -> GrammarMatcher:
        """A matcher for an answer that begins with `output`. It is called each time a row starts. A stop
        token is allowed only where the answer is complete. Raises RequestError if `output` does not match."""


@dataclass(frozen=True, slots=True)
class ProcessedPrompt:
    """A prompt with images as a model's processor returns it. `Request` describes the fields."""

    ids: tuple[int, ...]
    image_spans: tuple[tuple[int, int], ...]
    media: Any
    image_digests: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class PooledModel:
    """What a model returns for a text instead of an answer: an embedding, or the score of a pair of texts.

    `size`: numbers in a vector, 1 for a score. `max_tokens`: of one text. `generates`: whether the model
    answers prompts too. `prompts`: texts that are put before a text, by name; `default_prompt`: the one that
    is used if a request names none. `sizes`: the lengths to which an embedding may be cut; empty: any.
    `template`: how query and document become one text; None: as a pair of the tokenizer.
    """

    task: Literal["embed", "score"]
    size: int
    max_tokens: int
    generates: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    normalized: bool = False
    lower_case: bool = False
    sizes: tuple[int, ...] = ()
    template: Literal["qwen3"] | None = None


class LoraAdapter(NamedTuple):
    """A loaded LoRA adapter. `digest`: sha256 of its files."""

    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to be answered.

    `prompt`: all tokens, with image placeholders expanded. `image_spans`: the half-open ranges of `prompt`
    that images fill, in order and without overlap; a prefill chunk does not end inside one. `media`: the
    images as the model's processor returns them (numpy only). `image_digests`: a digest of the content of
    each span.

    `cache_positions`: ascending positions where other prompts are likely to diverge from this one. Examples
    are the end of the system prompt and tools, or the start of the last user turn. `prior_output`: tokens of
    the answer that are known from an earlier run; events do not repeat them. `grammar`: what the answer must
    match. `logprobs_from`: with `prompt_logprobs`, the first position of `prompt` whose logprob is wanted;
    the first token has none.

    `pooled`: the request wants a vector, not an answer; `token_types`: of the tokens of a pair, empty: all 0.
    `recording`: the sound that it wants transcribed, in place of an answer; `prompt` is empty then.
    `speculation`: its row may draft. `adapter`: the LoRA adapter that answers, None: the model as it is.
    `sparse`: tokens of the prompt may be left out. If some were, `prompt` has the others, `positions` their
    positions in the whole prompt, and `left_out` the ids that are missing.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    image_spans: tuple[tuple[int, int], ...] = ()
    media: Any = None
    image_digests: tuple[bytes, ...] = ()
    cache_positions: tuple[int, ...] = ()
    prior_output: tuple[int, ...] = ()
    priority: int = 0  # policy `priority`: lower first
    fairness_key: str = ""  # policy `fair`: these get equal shares
    grammar: Grammar | None = None
    background: bool = False  # served on spare capacity only: an offline batch beside live requests
    logprobs_from: int = 1
    pooled: bool = False
    token_types: tuple[int, ...] = ()
    recording: Recording | None = None
    speculation: bool = True
    adapter: LoraAdapter | None = None
    sparse: bool = True
    positions: tuple[int, ...] = ()
    left_out: frozenset[int] = frozenset()

    @property
    def num_left_out(self) -> int:
        """How many tokens of the prompt were left out. Its last token never is."""
        return self.positions[-1] + 1 - len(self.prompt) if self.positions else 0

    @property
    def all_cache_positions(self) -> tuple[int, ...]:
        """`cache_positions` and up to two more, ascending. One is the end of the last image if no position is
        behind it, since questions about images diverge there. The other is where answers to one question
        diverge: before the token that predicts the first wanted logprob."""
        points, size = set(self.cache_positions), len(self.prompt)
        points |= {stop for _, stop in self.image_spans[-1:] if max(points, default=0) < stop < size}
        if self.params.prompt_logprobs is not None and 1 < self.logprobs_from < size:
            points.add(self.logprobs_from - 1)
        return tuple(sorted(points))


class FinishReason(enum.StrEnum):
    """Why an answer ended, in OpenAI's words where they exist."""

    STOP = "stop"  # a stop id, or (front end) a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the front end asked for it, or went away
    ERROR = "error"  # see TokenEvent.error


class HitKind(enum.StrEnum):
    """What a lookup of the prefix cache found."""

    EXACT = "exact"  # the same prompt: all that can be reused of it
    PREFIX = "prefix"  # complete entries, which the prompt continues
    SUPERSEQUENCE = "supersequence"  # the prompt is a part of a longer entry
    LCP = "lcp"  # a part of an entry, after which the prompt differs
    MISS = "miss"


class TokenLogprob(NamedTuple):
    """Natural-log probabilities of the model itself, before grammar, temperature and filters."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), likeliest first
    rank: int = 0  # of a prompt's token: 1 and the number of likelier ones; 0: not counted


class TokenEvent(NamedTuple):
    """Progress of one request. Events can be merged: tokens, logprobs and transcripts concatenate, other
    fields take the latest.

    Exactly one event of each request has `finish` set, and it is the last one. `tokens` never has a stop id.
    `prompt_logprobs` continue those of the event before. The first one is of the token at `logprobs_from`.
    None stands for a token inside an image.
    """

    request_id: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()  # as long as `tokens`, or empty if not asked for
    num_computed_tokens: int = 0  # prompt tokens in the row's cache: prefill progress
    num_cached_tokens: int = 0  # of these, how many were found in the prefix cache
    hit_kind: HitKind | None = None  # None until the request runs
    finish: FinishReason | None = None
    error: MlxrunError | None = None  # set if and only if finish is ERROR
    stop_id: int | None = None  # the stop id that was sampled, if that is why it finished
    stop_logprob: TokenLogprob | None = None  # that of `stop_id`, if logprobs were asked for
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # of prompt tokens, in order of position
    vector: bytes = b""  # of a pooled request, with `finish`: float32, little-endian
    transcript: Transcript = Transcript()  # of a recording: the part that this event adds
    num_left_out: int = 0  # tokens of the prompt that were not computed at all (sparse prefill)
    queue_seconds: float = 0.0  # between the request's arrival and its first row

    def merge_progress(self, later: TokenEvent) -> TokenEvent:
        """This event followed by `later`, as one event without tokens and logprobs."""
        return later._replace(
            tokens=(),
            logprobs=(),
            prompt_logprobs=(),
            num_computed_tokens=max(self.num_computed_tokens, later.num_computed_tokens),
            num_cached_tokens=max(self.num_cached_tokens, later.num_cached_tokens),
            hit_kind=later.hit_kind or self.hit_kind,
            transcript=self.transcript.join(later.transcript),
            num_left_out=max(self.num_left_out, later.num_left_out),
            queue_seconds=max(self.queue_seconds, later.queue_seconds),
        )


IDS_PER_HASH = 8  # ids that one hash yields
ID_MASK = (1 << 63) - 1


def compute_digest(*parts: bytes) -> bytes:
    """The 16-byte blake2b digest that identifies content."""
    return blake2b(b"".join(parts), digest_size=16).digest()


def has_known_content(request: Request) -> bool:
    """Whether the prompt has content ids. It has none if it has images whose tokens are unknown."""
    spans, digests = request.image_spans, request.image_digests
    return len(spans) == len(digests) and (request.media is None or len(spans) > 0)


def build_content_ids(
    tokens: Sequence[int], spans: Sequence[tuple[int, int]], digests: Sequence[bytes]
) -> array[int]:
    """Return the token ids (int64), with an image's ids replaced by negative numbers derived from its digest.
    ValueError unless there is one digest for each image: such a prompt matches nothing."""
    if len(spans) != len(digests):
        raise ValueError(f"{len(spans)} image spans, but {len(digests)} digests")
    ids = array("q", tokens)
    for (start, stop), image_digest in zip(spans, digests, strict=True):
        ids[start:stop] = _build_image_ids(image_digest, ids[start:stop])
    return ids


def _build_image_ids(image_digest: bytes, tokens: array[int]) -> array[int]:
    """Return one id for each token of the image; they depend on the tokens too, as the layout of an image may
    differ."""
    seed = compute_digest(compute_digest(image_digest), tokens.tobytes())
    blocks = range(-(-len(tokens) // IDS_PER_HASH))
    words = array("q")
    words.frombytes(b"".join(blake2b(seed + i.to_bytes(8, "little")).digest() for i in blocks))
    return array("q", [-1 - (word & ID_MASK) for word in words[: len(tokens)]])


def find_chunk_stop(start: int, stop: int, spans: Sequence[tuple[int, int]]) -> int:
    """Return the end of a chunk that begins at `start` and should end at `stop`. It ends before an image that
    this would split, or behind it if the chunk begins with the image."""
    for image_start, image_stop in spans:
        if image_start < stop < image_stop:
            stop = image_start if image_start > start else image_stop
    return stop


def round_down(length: int, spans: Sequence[tuple[int, int]], grid: int = 1) -> int:
    """Return the longest length, at most `length`, that is a multiple of `grid` and does not end inside an
    image."""
    while True:
        length -= length % grid
        inside = [start for start, stop in spans if start < length < stop]
        if not inside:
            return length
        length = inside[0]
