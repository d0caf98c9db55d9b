"""The GELU and the attention of encoders on a CPU are the library's, to rounding."""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxrun.model.pooling import encoders
from mlxrun.model.pooling.encoders import BLOCK_NUMBERS, attend, compute_gelu


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
    assert measure_gelu() < 1e-6


def test_a_wrong_factor_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin."""
    monkeypatch.setattr(encoders, "FACTORS", (0.11714, *encoders.FACTORS[1:]))
    assert measure_gelu() > 1e-6


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


@pytest.mark.parametrize("length", [5, 70], ids=["few scores", "many scores"])
def test_attention_is_the_librarys(length: int) -> None:
    rng = np.random.default_rng(length)
    q, k, v = (mx.array(rng.standard_normal((3, 4, length, 8), np.float32)) for _ in range(3))
    ends = mx.array([length, length - 3, 1])
    mask = mx.where(mx.arange(length)[None] < ends[:, None], 0.0, -mx.inf)[:, None, None]
    wanted = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask)
    assert mx.abs(attend(q, k, v, 0.3, mask) - wanted).max().item() < 1e-5
    unmasked = attend(q, k, v, 0.3, mx.zeros_like(mask))  # the twin
    assert mx.abs(unmasked - wanted).max().item() > 1e-2
