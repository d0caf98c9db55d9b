"""The attention of new tokens, as a model computes it."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.model.hooks.attention import NotRaggedError
from mlxrun.model.sparse.prompt_selector import AttentionSums, WatchedCache, WatchedKeys


def make_arrays(new: int) -> tuple[mx.array, mx.array, mx.array]:
    """Queries of 4 heads for the newest tokens, and keys and values of 2, for 9 tokens."""
    shapes = ((1, 4, new, 8), (1, 2, 9, 8), (1, 2, 9, 8))
    queries, keys, values = (mx.random.normal(s, key=mx.random.key(i)) for i, s in enumerate(shapes))
    return queries, keys, values


@pytest.mark.parametrize("new", [1, 3])
def test_scores_and_attention(new: int) -> None:
    queries, keys, values = make_arrays(new)
    scores = AttentionSums(9)
    found = WatchedKeys(keys, values, scores).attend(queries, 0.3, None if new == 1 else "causal")
    own = np.repeat(np.array(keys)[0], 2, axis=0)
    logits = np.einsum("hqd,htd->hqt", np.array(queries)[0], own) * 0.3
    for at in range(new):  # token 9 - new + at
        logits[:, at, 10 - new + at :] = -np.inf
    weights = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    assert np.allclose(np.array(scores.total), (weights**4).mean(axis=(0, 1)), atol=1e-6)
    expected = np.einsum("hqt,htd->hqd", weights, np.repeat(np.array(values)[0], 2, axis=0))
    assert np.allclose(np.array(found)[0], expected, atol=1e-5)


def test_one_head_that_looks_at_a_token_outweighs_many_that_glance_at_another() -> None:
    weights = np.full((1, 8, 1, 50), 0.002, np.float32)
    weights[..., 7] = 0.2
    weights[0, 3, 0, 30] = 0.8
    scores = AttentionSums(50)
    scores.add(mx.array(weights))
    assert int(mx.argmax(scores.total)) == 30


def test_models_that_look_inside_are_refused() -> None:
    queries, keys, values = make_arrays(1)
    with pytest.raises(NotRaggedError):
        WatchedKeys(keys, values, AttentionSums(9)).attend(queries, 0.3, mx.zeros((1, 9)))
    with pytest.raises(NotRaggedError):
        WatchedCache(None, AttentionSums(9)).make_mask(1, return_array=True)
    assert WatchedCache(None, AttentionSums(9)).make_mask(5) == "causal"
