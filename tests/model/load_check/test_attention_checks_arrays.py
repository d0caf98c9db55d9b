"""The engine's attention over plain arrays is compared with the library's, for each shape that it meets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.model.hooks import engine_attention
from mlxrun.model.load_check.attention_checks import AttentionCheck, AttentionError

DTYPES = (mx.float32, mx.float16, mx.bfloat16)
ORIGINAL = engine_attention.attend_plain


def call(check: AttentionCheck, dtype: mx.Dtype = mx.float32, mask: Any = "causal", length: int = 5) -> None:
    queries = mx.zeros((2, 4, length, 16), dtype)
    keys = mx.zeros((2, 2, 9, 16), dtype)
    check(queries, keys, keys, 0.25, mask)


def scale_by(factor: float) -> Callable[..., mx.array]:
    return lambda q, k, v, scale, mask, **more: ORIGINAL(q, k, v, scale * factor, mask, **more)


def drop_last_key(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any, **more: Any) -> mx.array:
    return ORIGINAL(q, k[:, :, :-1], v[:, :, :-1], scale, mask, **more)


def swap_heads(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any, **more: Any) -> mx.array:
    return ORIGINAL(q, k[:, ::-1], v[:, ::-1], scale, mask, **more)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask", ["causal", None, "array"])
def test_sound_attention_passes(dtype: mx.Dtype, mask: Any) -> None:
    """Also where a query attends to nothing, as padding does."""
    given = mx.arange(9)[None, None, None] < mx.arange(5)[None, None, :, None] if mask == "array" else mask
    call(AttentionCheck(), dtype, given)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("plant", [scale_by(1.02), scale_by(0.98), scale_by(1.2), drop_last_key, swap_heads])
def test_faults_are_found(dtype: mx.Dtype, plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_attention, "attend_plain", plant)
    with pytest.raises(AttentionError, match="differs by"):
        call(AttentionCheck(), dtype)


def test_a_fault_in_long_rows_is_found_in_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q: mx.array, k: mx.array, v: mx.array, scale: float, mask: Any, **more: Any) -> mx.array:
        return ORIGINAL(q, k, v, scale if k.shape[2] < 4000 else 1.05 * scale, mask, **more)

    monkeypatch.setattr(engine_attention, "attend_plain", attend)
    with pytest.raises(AttentionError):
        call(AttentionCheck())


def test_a_shape_is_compared_once_and_fails_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def attend(q: mx.array, *given: Any, **more: Any) -> mx.array:
        calls.append(1)
        return ORIGINAL(q, *given, **more)

    monkeypatch.setattr(engine_attention, "attend_plain", attend)
    check = AttentionCheck()
    call(check)
    first = len(calls)
    call(check)
    assert len(calls) == first
    call(check, length=7)
    assert len(calls) == first + 1
    monkeypatch.setattr(engine_attention, "attend_plain", scale_by(1.2))
    broken = AttentionCheck()
    for _ in range(2):
        with pytest.raises(AttentionError):
            call(broken)
