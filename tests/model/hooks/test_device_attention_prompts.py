"""Padded prompts attend as the library's own call does, in few shapes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxrun.model.hooks import device_attention, engine_attention
from mlxrun.model.hooks.device_attention import STEP, attend_causally, round_length

SHAPES = [(1, 1), (3, 40), (2, STEP), (5, STEP + 1)]


def make_arrays(rows: int, tokens: int, before: int) -> tuple[mx.array, mx.array, mx.array]:
    queries = mx.random.normal((rows, 4, tokens, 16), key=mx.random.key(1))
    keys, values = (mx.random.normal((rows, 2, before + tokens, 16), key=mx.random.key(i)) for i in (2, 3))
    return queries, keys, values


@pytest.mark.parametrize(("rows", "tokens"), SHAPES)
@pytest.mark.parametrize("before", [0, 37, 2 * STEP + 5])
def test_padding_changes_no_result(rows: int, tokens: int, before: int) -> None:
    arrays = make_arrays(rows, tokens, before)
    expected = mx.fast.scaled_dot_product_attention(*arrays, scale=0.3, mask="causal")
    assert mx.allclose(attend_causally(*arrays, 0.3), expected, atol=1e-5).item()


def test_prompts_of_many_lengths_and_beginnings_have_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = set()
    original = mx.fast.scaled_dot_product_attention

    def record(queries: mx.array, keys: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        shapes.add((queries.shape[0], queries.shape[2], keys.shape[2]))
        return original(queries, keys, *args, **kwargs)

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", record)
    monkeypatch.setattr(engine_attention, "uses_cuda", lambda: True)
    monkeypatch.setattr(device_attention, "CUDNN_TYPES", (mx.float32,))
    monkeypatch.setattr(device_attention, "FLOATS", ())
    for tokens in range(2, STEP, 50):
        for before in (0, STEP, STEP + 3, 2 * STEP - 1):
            engine_attention.attend_plain(*make_arrays(1 + tokens % 4, tokens, before), 0.3, "causal")
    assert shapes <= {(r, q, k) for r in (1, 4) for q in (STEP, 2 * STEP) for k in (q, q + STEP)}


def test_few_lengths() -> None:
    assert sorted({round_length(n) for n in range(1, 4096)}) == [STEP * n for n in (1, 2, 3, 4, 6, 8, 12, 16)]
    assert all(round_length(n) >= n for n in range(1, 4096))
