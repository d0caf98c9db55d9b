"""The attention of new tokens, as a model computes it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.model.ragged.attention import NotRaggedError
from mlxrun.model.sparse.attention_scores import AttentionScores, ScoredKeys, ScoringCache


def make_arrays() -> tuple[mx.array, mx.array, mx.array]:
    """Queries of 4 heads, and keys and values of 2, for 9 tokens."""
    shapes = ((1, 4, 1, 8), (1, 2, 9, 8), (1, 2, 9, 8))
    queries, keys, values = (mx.random.normal(s, key=mx.random.key(i)) for i, s in enumerate(shapes))
    return queries, keys, values


def test_scores_and_attention() -> None:
    queries, keys, values = make_arrays()
    scores = AttentionScores(7)
    found = ScoredKeys(keys, values, scores).attend(queries, 0.3, None)
    own = np.repeat(np.array(keys)[0], 2, axis=0)
    logits = np.einsum("hd,htd->ht", np.array(queries)[0, :, 0], own) * 0.3
    weights = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert np.allclose(np.array(scores.total), weights.mean(axis=0)[:7], atol=1e-6)
    expected = np.einsum("ht,htd->hd", weights, np.repeat(np.array(values)[0], 2, axis=0))
    assert np.allclose(np.array(found)[0, :, 0], expected, atol=1e-5)


def test_models_that_look_inside_are_refused() -> None:
    queries, keys, values = make_arrays()
    with pytest.raises(NotRaggedError):
        ScoredKeys(keys, values, AttentionScores(9)).attend(queries, 0.3, mx.zeros((1, 9)))
    with pytest.raises(NotRaggedError):
        ScoringCache(None, AttentionScores(9)).make_mask(1, return_array=True)
