"""Scores the tokens of prompts with a draft model: a small one that reads the whole prompt first.

The draft model decodes a few tokens after the prompt, and what these attend to is what the answer is going to
need (as in "Speculative Prefill", arXiv:2502.02789). Its caches are dropped once a prompt is scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxrun.model.adapter import Adapter
from mlxrun.model.prompt_inputs import TEXT_ONLY
from mlxrun.model.ragged.attention import use_engine_attention
from mlxrun.model.ragged.layer_caches import list_all_arrays, reserve_capacity
from mlxrun.model.sparse.attention_scores import AttentionScores, ScoringCache
from mlxrun.model.sparse.token_choice import choose_tokens

LOOKAHEAD = 8  # tokens whose attention is scored: the prompt's last one, and those that follow it


class PromptDraft:
    """`adapter`: the draft model, all of whose layers keep all keys. `keep`: share of the tokens that are
    kept. `max_tokens`: of a prompt that it can read."""

    def __init__(self, adapter: Adapter, keep: float, max_tokens: int) -> None:
        self._adapter = adapter
        self._keep = keep
        self.max_tokens = max_tokens
        self._tokens: Sequence[int] = ()
        self._cache: list[Any] = []
        self._computed = 0

    def start(self, tokens: Sequence[int]) -> None:
        """Begin with another prompt, of two tokens or more."""
        self._tokens, self._computed = tokens, 0
        self._cache = reserve_capacity(self._adapter.make_cache(), len(tokens) + LOOKAHEAD)

    def advance(self, limit: int) -> tuple[int, ...] | None:
        """Read `limit` more tokens of the prompt. Once it is read: the positions of the kept ones."""
        start, stop = self._computed, min(self._computed + limit, len(self._tokens) - 1)
        if start < stop:
            with use_engine_attention():
                self._adapter.prefill(mx.array([self._tokens[start:stop]]), self._cache, start, TEXT_ONLY)
            mx.eval(list_all_arrays(self._cache))
            self._computed = stop
        if stop < len(self._tokens) - 1:
            return None
        scores = self._decode_lookahead()
        self._cache = []
        return choose_tokens(scores, self._keep)

    def _decode_lookahead(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        scores = AttentionScores(len(self._tokens))
        caches = [ScoringCache(layer, scores) for layer in self._cache]
        token = mx.array([[self._tokens[-1]]])
        for position in range(len(self._tokens) - 1, len(self._tokens) - 1 + LOOKAHEAD):
            logits = self._adapter.decode(token, caches, [position])
            token = mx.argmax(logits[:, -1], axis=-1, keepdims=True)
        return np.array(scores.total)

    def close(self) -> None:
        """Drop all arrays."""
        self._cache, self._tokens = [], ()
        del self._adapter
