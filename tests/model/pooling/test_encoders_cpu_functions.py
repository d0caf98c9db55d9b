"""The GELU and the attention of encoders on a CPU are the library's, to rounding."""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxrun.model.pooling import encoders
from mlxrun.model.pooling.encoders import BLOCK_NUMBERS, TextBlocks, attend, compute_gelu


def compute_exactly(x: np.ndarray) -> np.ndarray:
    """In double precision."""
    return np.array([float(a) * 0.5 * math.erfc(-float(a) / math.sqrt(2)) for a in x.ravel()]).reshape(
        x.shape
    )


def measure_gelu() -> float:
    """The largest error, for numbers of more than one block."""
    x = np.linspace(-14, 14, 400 * 89, dtype=np.float32).reshape(-1, 89)
    assert x.size > BLOCK_NUMBERS
    return float(np.abs(np.array(compute_gelu(mx.array(x))) - compute_exactly(x)).max())


def test_gelu_is_the_exact_one() -> None:
    assert measure_gelu() < 3e-7


def test_a_wrong_factor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin."""
    monkeypatch.setattr(encoders, "FACTORS", (*encoders.FACTORS[:-1], -0.692))
    assert measure_gelu() > 3e-7


def test_gelu_of_numbers_without_an_end() -> None:
    found = compute_gelu(mx.array([[0.0, 1e30, -1e30, math.inf, math.nan]])).tolist()[0]
    assert found[:4] == pytest.approx([0.0, 1e30, 0.0, math.inf]) and math.isnan(found[4])


def test_gelu_of_a_part_leaves_the_other_part_alone() -> None:
    whole = np.random.default_rng(0).standard_normal((2, 3, 10), np.float32)
    first, second = mx.split(mx.array(whole) + 0, 2, axis=-1)
    kept = second + 0
    assert np.abs(np.array(compute_gelu(first)) - compute_exactly(whole[..., :5])).max() < 1e-6
    assert np.array_equal(np.array(kept), whole[..., 5:]) and np.array_equal(np.array(second), whole[..., 5:])


def test_other_dtypes_get_the_librarys_gelu() -> None:
    x = mx.array([[0.5, -0.5]], dtype=mx.bfloat16)
    assert mx.array_equal(compute_gelu(x), nn.gelu(x))


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("is_padded", [False, True], ids=["joined", "padded"])
def test_each_text_attends_to_itself(monkeypatch: pytest.MonkeyPatch, is_padded: bool, window: int) -> None:
    """In blocks of one length, as on a CPU, and in one block with padding, as elsewhere."""
    lengths = (70, 5, 5, 2, 1)  # one with many logits
    if is_padded:
        monkeypatch.setattr(encoders, "group_lengths", lambda lengths: [list(lengths)])
    blocks = TextBlocks(lengths)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((3, len(lengths), 70, 4 * 8), np.float32)
    joined = [blocks.join(states.tolist()).reshape(-1, 4, 8) for states in rows]
    found = blocks.pad(attend(*joined, blocks, blocks.make_masks(window)))
    wanted = np.zeros_like(rows[0])
    for row, length in enumerate(lengths):
        q, k, v = (
            mx.array(states[row : row + 1, :length]).reshape(1, length, 4, 8).swapaxes(1, 2)
            for states in rows
        )
        near = np.abs(np.subtract.outer(range(length), range(length))) <= (window or length)
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=8**-0.5, mask=mx.array(near))
        wanted[row, :length] = out.swapaxes(1, 2).reshape(length, -1)
    inside = np.arange(70) < np.array(lengths)[:, None]
    assert np.abs(np.array(found) - wanted)[inside].max() < 1e-5
    unmasked = [None] * len(blocks.make_masks())  # the twin
    seen = blocks.pad(attend(*joined, blocks, unmasked))
    assert (np.abs(np.array(seen) - wanted)[inside].max() > 1e-2) == (is_padded or window > 0)
