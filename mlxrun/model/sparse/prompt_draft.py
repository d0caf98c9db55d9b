"""Scores the tokens of prompts with a draft model: a small one that reads the whole prompt first.

A draft model chooses for a larger one as in "Speculative Prefill" (arXiv:2502.02789), by what the prompt's
last tokens attend to, as in "SnapKV" (arXiv:2404.14469): they ask the question. That takes one forward, where
letting the draft model answer takes one for each token. Its caches are dropped once a prompt is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrun.model.kv.ragged.layer_caches import (
    LayerKind,
    flatten_caches,
    get_kind,
    list_all_arrays,
    reserve_capacity,
    unflatten_caches,
)
from mlxrun.model.run.adapter import Adapter
from mlxrun.model.run.prompt_inputs import TEXT_ONLY
from mlxrun.model.sparse.attention_scores import AttentionScores, ScoringCache
from mlxrun.model.sparse.token_choice import Scores, choose_tokens

WINDOW = 32  # last tokens of a prompt, whose attention is scored


class PromptDraft:
    """`adapter`: the draft model, whose layers keep all keys, or recurrent states. `keep`: share of the
    tokens that are kept. `max_tokens`: of a prompt that it can read. `layers_per_launch`: see
    use_engine_attention."""

    def __init__(self, adapter: Adapter, keep: float, max_tokens: int, layers_per_launch: int = 0) -> None:
        self._adapter = adapter
        self._keep = keep
        self._layers = layers_per_launch
        self.max_tokens = max_tokens
        self._tokens: Sequence[int] = ()
        self._known = self._computed = 0
        self._cache: list[Any] = []

    def start(self, tokens: Sequence[int], known: int = 0) -> None:
        """Begin with another prompt, of two tokens or more, whose first `known` ones are kept anyway."""
        self._tokens, self._known, self._computed = tokens, known, 0
        self._cache = reserve_capacity(self._adapter.make_cache(), len(tokens))

    def advance(self, limit: int) -> tuple[int, ...] | None:
        """Read `limit` more tokens of the prompt; or if only those are left whose attention is scored, score
        it, and return the positions of the kept ones."""
        if self._read(limit):
            return None
        scores = self._score()
        self.drop()
        return choose_tokens(scores, self._keep, self._known)

    def score(self, tokens: Sequence[int], limit: int) -> Scores:
        """All scores of a prompt, read in slices of `limit` tokens."""
        self.start(tokens)
        while self._read(limit):
            pass
        scores = self._score()
        self.drop()
        return scores

    def _read(self, limit: int) -> bool:
        """Compute a slice; False if nothing is left to be read."""
        start, end = self._computed, max(len(self._tokens) - WINDOW, 0)
        if start == end:
            return False
        stop = min(start + limit, end)
        with self._adapter.use_attention(self._layers):
            self._adapter.prefill(mx.array([self._tokens[start:stop]]), self._cache, start, TEXT_ONLY)
        mx.eval(list_all_arrays(self._cache))
        self._computed = stop
        return True

    def _score(self) -> Scores:
        """Compute the last tokens."""
        scores = AttentionScores(len(self._tokens))
        layers = [
            ScoringCache(layer, scores) if get_kind(layer) is LayerKind.KV else layer
            for layer in flatten_caches(self._cache)
        ]
        caches = unflatten_caches(self._cache, layers)
        ids = mx.array([self._tokens[self._computed :]])
        self._adapter.prefill(ids, caches, self._computed, TEXT_ONLY)
        return np.array(scores.total)

    def drop(self) -> None:
        """Forget the prompt, and free what was computed of it."""
        self._cache, self._tokens = [], ()

    def close(self) -> None:
        """Drop all arrays."""
        self.drop()
        del self._adapter
