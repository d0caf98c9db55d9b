"""Attention on a CPU is the library's, but for rounding: every shape, mask and dtype; nobody else gets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxrun.model  # noqa: F401  (loads OpenBLAS before MLX)
from mlxrun.model.hooks import attention, device_attention, engine_attention

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="for CPUs")
SCALE = 0.3


def make_arrays(seed: int, batch: int, groups: int, repeats: int, length: int, width: int) -> list[mx.array]:
    """Queries, keys and values; keys and values are parts of larger buffers, as caches give them."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, groups * repeats, length, 8)) * 3
    k, v = rng.normal(size=(batch, groups, width + 3, 8)) * 3, rng.normal(size=(batch, groups, width + 3, 6))
    return [mx.array(q.astype(np.float32)), *(mx.array(x.astype(np.float32))[:, :, :width] for x in (k, v))]


def mask_of(kind: str, batch: int, length: int, width: int) -> Any:
    rng = np.random.default_rng(3)
    if kind in ("none", "causal"):
        return None if kind == "none" else "causal"
    seen = rng.random((batch if kind == "rows" else 1, 1, 1 if kind == "shared" else length, width)) < 0.6
    seen[..., 0] = True
    if kind == "added":
        return mx.array(np.where(seen, rng.normal(size=seen.shape), -np.inf).astype(np.float32))
    return mx.array(seen if kind != "flat" else seen[0, 0])


def difference(
    arrays: list[mx.array], mask: Any, ours: Callable[..., mx.array] = device_attention.compute_attention
) -> float:
    q, k, v = arrays
    want = mx.fast.scaled_dot_product_attention(q, k, v, scale=SCALE, mask=mask)
    got = ours(q, k, v, SCALE, mask)
    assert got.shape == want.shape and got.dtype == want.dtype
    return float(mx.abs(got.astype(mx.float32) - want.astype(mx.float32)).max().item())


KINDS = ("none", "causal", "flat", "rows", "shared", "added")


@pytest.mark.parametrize("eager", [0, 1 << 62], ids=["numpy", "graph"])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 99),
    batch=st.integers(1, 3),
    groups=st.integers(1, 2),
    repeats=st.integers(1, 3),
    length=st.integers(1, 13),
    before=st.integers(0, 40),
    kind=st.sampled_from(KINDS),
    block=st.sampled_from([1, 64, 1 << 21]),
)
def test_it_is_the_library_s_attention(
    eager: int,
    seed: int,
    batch: int,
    groups: int,
    repeats: int,
    length: int,
    before: int,
    kind: str,
    block: int,
) -> None:
    width = length + before
    arrays = make_arrays(seed, batch, groups, repeats, length, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_attention, "BLOCK_LOGITS", block)
        patch.setattr(device_attention, "MIN_QUERIES", 2)
        patch.setattr(device_attention, "NUMPY_LOGITS", block)
        patch.setattr(device_attention, "GRAPH_LOGITS", eager)
        assert difference(arrays, mask_of(kind, batch, length, width)) < 1e-5


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("length", [1, 7])
def test_half_precision(dtype: mx.Dtype, length: int) -> None:
    """The library rounds the scores too: ours are at most as far from the truth."""
    arrays = [x.astype(dtype) for x in make_arrays(1, 2, 2, 2, length, 20)]
    truth = [x.astype(mx.float32) for x in arrays]
    exact = mx.fast.scaled_dot_product_attention(*truth, scale=SCALE, mask="causal")
    got = device_attention.compute_attention(*arrays, SCALE, "causal")
    assert got.dtype == dtype
    assert float(mx.abs(got.astype(mx.float32) - exact).max().item()) < (
        2e-3 if dtype == mx.float16 else 2e-2
    )


def test_a_query_that_sees_nothing_is_no_nan() -> None:
    mask = mx.array(np.arange(5)[None] < np.array([[0], [3]]))
    for length in (1, 2):
        q, k, v = make_arrays(2, 1, 1, 1, length, 5)
        assert not mx.isnan(device_attention.compute_attention(q, k, v, SCALE, mask[:length])).any().item()


def shifted(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any) -> mx.array:
    """A causal mask that is one key off."""
    length, width = q.shape[2], k.shape[2]
    seen = np.arange(width)[None] <= np.arange(length)[:, None] + width - length + 1
    return device_attention.compute_attention(q, k, v, scale, mx.array(seen))


def unshared(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any) -> mx.array:
    """Heads that are given the wrong keys."""
    order = mx.arange(q.shape[1]).reshape(-1, k.shape[1]).swapaxes(0, 1).reshape(-1)
    return device_attention.compute_attention(q[:, order], k, v, scale, mask)


@pytest.mark.parametrize("wrong", [shifted, unshared])
def test_what_is_wrong_is_seen(wrong: Callable[..., mx.array]) -> None:
    """The twins."""
    assert difference(make_arrays(4, 1, 2, 3, 7, 20), "causal", wrong) > 1e-2


def test_only_the_engine_s_forwards_attend_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer in the same process computes as it always does, and what a kernel alone knows goes to it."""
    from mlx_lm.models.base import scaled_dot_product_attention as library

    calls: list[int] = []
    original = device_attention.compute_attention

    def counted(*args: Any, **options: Any) -> mx.array:
        calls.append(1)
        return original(*args, **options)

    monkeypatch.setattr(device_attention, "compute_attention", counted)
    routed = attention._make_routed(library)
    q, k, v = make_arrays(5, 1, 2, 2, 4, 9)
    theirs = routed(q, k, v, cache=None, scale=SCALE, mask="causal")
    assert not calls
    with engine_attention.use_engine_attention():
        ours = routed(q, k, v, cache=None, scale=SCALE, mask="causal")
        assert len(calls) == 1
        routed(q, k, v, cache=None, scale=SCALE, mask="causal", sinks=mx.zeros(4))
        attention._make_routed(lambda queries, keys, values, cache, scale, mask: queries)(
            q, k, v, None, scale=SCALE, mask=None
        )
        assert len(calls) == 1
    routed(q, k, v, cache=None, scale=SCALE, mask="causal")
    assert len(calls) == 1
    assert mx.allclose(ours, theirs, atol=1e-5).item()


@pytest.mark.parametrize(
    ("usual_rows", "width", "same"), [(8, 1280, True), (None, 1280, False), (8, 1111, False)]
)
def test_a_row_rounds_alike_in_company(usual_rows: int | None, width: int, same: bool) -> None:
    """One of 1,100 tokens that attends over 1,280, and 32 of them. Twins: the method follows the number of
    rows, and the width the longest row."""
    mx.random.seed(5)
    q, k, v = (mx.random.normal((32, heads, tokens, 16)) for heads, tokens in ((4, 1), (2, 1280), (2, 1280)))
    first = 1280 - 1100

    def attend(count: int, tokens: int) -> mx.array:
        seen = mx.arange(tokens) >= tokens - 1100
        keys, values = (a[:count, :, first - (tokens - 1100) :] for a in (k, v))
        return device_attention.compute_attention(q[:count], keys, values, SCALE, seen, usual_rows=usual_rows)

    alone, many = attend(1, width), attend(32, 1280)
    assert mx.abs(alone - many[:1]).max().item() < 1e-5
    assert mx.array_equal(alone, many[:1]).item() is same
