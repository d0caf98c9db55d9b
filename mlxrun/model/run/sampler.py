"""Samples one token a row, all rows at once, each by its own SamplingParams.

Everything is computed on float32 logits of the last position. The noise of a token depends only on the
request's seed and the token's position, so a row samples the same tokens in any batch. Filters apply in this
order: temperature, top_k, top_p (over what is left), min_p (relative to the likeliest).

Before all of them, tokens are removed that a grammar forbids, or that would end an answer before its
`min_tokens`. Logprobs are the model's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from mlxrun.core.request import SamplingParams, TokenLogprob
from mlxrun.core.step_plan import SampledToken
from mlxrun.model.machine.device import uses_gpu

_BLOCK = 64  # columns; it divides the vocabularies of most models


def add_exponentials(raw: mx.array) -> mx.array:
    """Compute the logarithms [n, 1] of the sums of e to the power of `raw` [n, V], in float32. On a CPU MLX
    adds one number after the other, and loses those that are small beside the sum. With 151,936 tokens each
    logprob is then too high by up to 3e-4. So blocks are added up first."""
    rows, width = raw.shape
    blocks, rest = divmod(width, _BLOCK)
    if blocks and not uses_gpu():
        sums = mx.logsumexp(raw[:, : width - rest].reshape(rows, blocks, _BLOCK), axis=-1)
        raw = mx.concatenate([sums, raw[:, width - rest :]], axis=-1) if rest else sums
    return mx.logsumexp(raw, axis=-1, keepdims=True)


@dataclass(slots=True)
class RowSampling:
    """One row's settings, and its tokens so far if a penalty needs them.

    `end_position`: the first position, in prompt and answer together, where the answer may end. `seen` bool
    [V]: over prompt and answer; `counts` float32 [V]: over the answer; both None without penalties.
    """

    params: SamplingParams
    seen: mx.array | None = None
    counts: mx.array | None = None
    end_position: int = 0

    @classmethod
    def start(
        cls,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int],
        vocab: int,
        left_out: Iterable[int] = (),
    ) -> RowSampling:
        """The state of a new row. `left_out`: tokens of the prompt that are not in `prompt`."""
        row = cls(params, end_position=len(prompt) + params.min_tokens)
        if _has_penalty(params):
            row.seen = _count_tokens([*prompt, *left_out, *output], vocab) > 0
            row.counts = _count_tokens(output, vocab)
        return row

    def fork(self, tokens: Sequence[int]) -> RowSampling:
        """The row's state after it has sampled these tokens too."""
        if self.seen is None or self.counts is None:
            return self
        new = _count_tokens(tokens, self.counts.shape[0])
        return replace(self, seen=self.seen | (new > 0), counts=self.counts + new)

    def follow(self, fork: RowSampling) -> None:
        """Copy the tokens that a fork of this row has seen."""
        self.seen, self.counts = fork.seen, fork.counts


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """Sampled tokens: lazy arrays, one item a row. `top_*` [rows, n]: the n likeliest, best first."""

    tokens: mx.array
    logprobs: mx.array | None = None
    top_ids: mx.array | None = None
    top_logprobs: mx.array | None = None

    def list_arrays(self) -> list[mx.array]:
        return [a for a in (self.tokens, self.logprobs, self.top_ids, self.top_logprobs) if a is not None]


class Sampler:
    """Samples the rows of one batch, in their order. It holds their state, so new rows need a new sampler."""

    def __init__(self, rows: Sequence[RowSampling], vocab: int) -> None:
        params = [row.params for row in rows]
        self.rows = list(rows)
        self._vocab = vocab
        self._bias = _make_bias(params, vocab)
        self._penalties = any(_has_penalty(p) for p in params)
        if self._penalties:
            zeros = mx.zeros(vocab)
            self._seen = mx.stack([zeros > 0 if r.seen is None else r.seen for r in rows])
            self._counts = mx.stack([zeros if r.counts is None else r.counts for r in rows])
            self._repetition = _make_column([p.repetition_penalty for p in params])
            self._presence = _make_column([p.presence_penalty for p in params])
            self._frequency = _make_column([p.frequency_penalty for p in params])
        self._random = any(p.temperature > 0 for p in params)
        self._temperature = _make_column([p.temperature or 1.0 for p in params])
        self._greedy = mx.array([p.temperature == 0 for p in params])[:, None]
        self._seeds = [_mix(p.seed & _MASK) for p in params]
        self._filters = self._random and any(p.top_k or p.top_p < 1 or p.min_p for p in params)
        self._top_k = _make_column([p.top_k or vocab for p in params])
        # Cumulated float32 probabilities reach 1 before the end of the tail; 2 keeps all of it.
        self._top_p = _make_column([p.top_p if p.top_p < 1 else 2.0 for p in params])
        self._min_p = _make_column([p.min_p for p in params])
        self._end_ids = {i: [t for t in p.end_ids if t < vocab] for i, p in enumerate(params) if p.min_tokens}
        self._suppressed: tuple[list[int], mx.array] | None = None  # rows, and their penalty [rows, V]
        self._logprobs = max((p.logprobs for p in params if p.logprobs is not None), default=None)

    def __call__(
        self, logits: mx.array, positions: Sequence[int], mask: mx.array | None = None
    ) -> SampledBatch:
        """Sample from `logits` [rows, V] the tokens at these positions, counted in prompt and answer
        together. `mask`: bool [rows, V], False for forbidden tokens."""
        raw = logits.astype(mx.float32)
        allowed = raw if mask is None else mx.where(mask, raw, -mx.inf)
        kept = self.suppress_ends(allowed, positions)
        if mask is not None and kept is not allowed:  # a complete answer may sample nothing but its end
            kept = mx.where(mx.max(kept, axis=-1, keepdims=True) > -mx.inf, kept, allowed)
        adjusted = self.adjust_logits(kept)
        tokens = mx.argmax(self._add_noise(adjusted, positions), axis=-1)
        if self._penalties:
            self.record_tokens(tokens)
        if self._logprobs is None:
            return SampledBatch(tokens)
        logprobs = raw - add_exponentials(raw)
        chosen = mx.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
        count = min(self._logprobs, self._vocab)
        if count == 0:
            return SampledBatch(tokens, chosen)
        order = mx.argsort(-logprobs, axis=-1)[:, :count]
        return SampledBatch(tokens, chosen, order, mx.take_along_axis(logprobs, order, axis=-1))

    def suppress_ends(self, x: mx.array, positions: Sequence[int]) -> mx.array:
        """Logits without the tokens that end answers, for rows whose answers may not end yet."""
        active = [i for i in self._end_ids if positions[i] < self.rows[i].end_position]
        if not active:
            self._suppressed = None
            return x
        if self._suppressed is None or self._suppressed[0] != active:
            penalty = mx.zeros((len(self.rows), self._vocab))
            for i in active:
                penalty[i, mx.array(self._end_ids[i], dtype=mx.int32)] = -mx.inf
            self._suppressed = active, penalty
        return x + self._suppressed[1]

    def adjust_logits(self, x: mx.array) -> mx.array:
        """Logits [rows, V] with biases added and penalties taken off."""
        if self._bias is not None:
            x = x + self._bias
        if self._penalties:
            scaled = mx.where(x > 0, x / self._repetition, x * self._repetition)
            x = mx.where(self._seen, scaled, x)
            x = x - self._presence * (self._counts > 0) - self._frequency * self._counts
        return x

    def _add_noise(self, x: mx.array, positions: Sequence[int]) -> mx.array:
        """Logits whose argmax is the sampled token: by the Gumbel trick for rows with a temperature."""
        if not self._random:
            return x
        y = x / self._temperature
        if self._filters:
            y = self._filter(y)
        pairs = zip(self._seeds, positions, strict=True)
        keys = mx.array([_make_key(seed, position) for seed, position in pairs], dtype=mx.uint32)
        noise = mx.vmap(lambda key: mx.random.gumbel(shape=(self._vocab,), key=key))(keys)
        return mx.where(self._greedy, x, y + noise)

    def _filter(self, y: mx.array) -> mx.array:
        order = mx.argsort(-y, axis=-1)
        ranked = mx.take_along_axis(y, order, axis=-1)
        ranked = mx.where(mx.arange(self._vocab) < self._top_k, ranked, -mx.inf)
        p = mx.softmax(ranked, axis=-1, precise=True)
        before = mx.cumsum(p, axis=-1) - p
        keep = ((before < self._top_p) & (p >= self._min_p * p[:, :1])) | (mx.arange(self._vocab) == 0)
        return mx.put_along_axis(y, order, mx.where(keep, ranked, -mx.inf), axis=-1)

    def record_tokens(self, tokens: mx.array) -> None:
        """Count the tokens [rows] for penalties of later steps."""
        rows = mx.arange(len(self.rows))
        self._seen = self._seen.astype(mx.float32).at[rows, tokens].add(1.0) > 0
        self._counts = self._counts.at[rows, tokens].add(1.0)
        for i, row in enumerate(self.rows):
            if row.seen is not None:
                row.seen, row.counts = self._seen[i], self._counts[i]

    def list_arrays(self) -> list[mx.array]:
        """The state to evaluate with the step, so that its graph does not grow."""
        return [self._seen, self._counts] if self._penalties else []


def read_sampled(batch: SampledBatch, params: Sequence[SamplingParams]) -> list[SampledToken]:
    """The tokens as Python numbers, one a row. Waits for the step."""
    tokens: list[int] = batch.tokens.tolist()
    if batch.logprobs is None:
        return [SampledToken(token) for token in tokens]
    chosen = batch.logprobs.tolist()
    ids = [[]] * len(tokens) if batch.top_ids is None else batch.top_ids.tolist()
    values = [[]] * len(tokens) if batch.top_logprobs is None else batch.top_logprobs.tolist()
    sampled = []
    for row, token in enumerate(tokens):
        count = params[row].logprobs
        top = tuple(zip(ids[row], values[row], strict=True))[:count]
        sampled.append(SampledToken(token, None if count is None else TokenLogprob(chosen[row], top)))
    return sampled


def _has_penalty(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0


def _count_tokens(tokens: Sequence[int], vocab: int) -> mx.array:
    """How often each token occurs. Placeholders of images may be beyond the logits, where MLX writes into
    memory that is not the array's."""
    counts, known = mx.zeros(vocab), [token for token in tokens if token < vocab]
    return counts.at[mx.array(known)].add(1.0) if known else counts


def _make_bias(params: Sequence[SamplingParams], vocab: int) -> mx.array | None:
    if not any(p.logit_bias for p in params):
        return None
    bias = mx.zeros((len(params), vocab))
    for row, p in enumerate(params):
        known = {token: value for token, value in p.logit_bias.items() if token < vocab}  # as above
        if known:
            bias[row, mx.array(list(known))] = mx.array(list(known.values()))
    return bias


def _make_column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]


def _make_key(seed: int, position: int) -> tuple[int, int]:
    """A random key from a mixed seed and a position."""
    mixed = _mix(seed ^ position)
    return mixed >> 32, mixed & 0xFFFFFFFF


_MASK = (1 << 64) - 1


def _mix(x: int) -> int:
    """SplitMix64 (Steele et al., 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
