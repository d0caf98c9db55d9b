"""Packed rows against plain rows of rounded values: the same operations give the same arrays, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.model.kv.ragged import row_group
from mlxrun.model.kv.ragged.quantized_buffer import (
    KVQuantization,
    QuantizedArray,
    QuantizedBuffer,
    attend_quantized,
    make_buffer,
)
from mlxrun.model.kv.ragged.row_group import KVBuffer, RowKeysValues

Patch = pytest.MonkeyPatch
HEADS, KEY, VALUE = 2, 64, 32


def dequantize(array: QuantizedArray) -> mx.array:
    return mx.dequantize(*array.parts, array.form.group_size, array.form.bits)


def round_array(array: mx.array, form: KVQuantization) -> mx.array:
    return dequantize(form.quantize(array))


def make_pair(rows: int, tokens: int) -> tuple[mx.array, mx.array]:
    return mx.random.normal((rows, HEADS, tokens, KEY)), mx.random.normal((rows, HEADS, tokens, VALUE))


def has_same_rows(seed: int, form: KVQuantization) -> bool:
    """Rows join, move from another buffer, leave, decode and grow at random; whether each view is that of a
    KVBuffer to which the same is done with rounded values."""
    draw = random.Random(seed)
    mx.random.seed(seed)
    packed, plain, lengths = make_buffer(form, None), KVBuffer(None), list[int]()
    for _ in range(40):
        action, width = draw.choice(("join", "move", "leave", "decode", "decode")), max(lengths, default=0)
        if action in ("join", "move") and len(lengths) < 6:
            length = draw.randrange(1, 60)
            row = RowKeysValues(*make_pair(1, length + draw.choice((0, 5))), length)
            rounded = RowKeysValues(round_array(row.keys, form), round_array(row.values, form), length)
            if action == "move":
                other = QuantizedBuffer(form)
                other.add_rows([RowKeysValues(*make_pair(1, length + 3), length + 3), row], 0)
                packed.add_rows([other.copy_row(1, length)], width)
            else:
                packed.add_rows([row], width, draw.choice((0, 2)))
            plain.add_rows([rounded], width)
            lengths.append(length)
        elif action == "leave" and lengths:
            index = draw.randrange(len(lengths))
            lengths[index] = lengths[-1]
            lengths.pop()
            for buffer in (packed, plain):
                buffer.remove_rows({len(lengths): index} if index < len(lengths) else {}, len(lengths))
                if lengths:
                    buffer.trim(max(lengths))
        elif action == "decode" and lengths:
            lengths = [n + 1 for n in lengths]
            keys, values = make_pair(len(lengths), 1)
            packed.append(keys, values, max(lengths))
            plain.append(round_array(keys, form), round_array(values, form), max(lengths))
        views = zip(packed.view(max(lengths)), plain.view(max(lengths)), strict=True) if lengths else ()
        for found, wanted in views:
            assert found.shape == wanted.shape and found.dtype == wanted.dtype
            pairs = zip(np.array(dequantize(found)), np.array(wanted), lengths, strict=True)
            if any((a[:, -n:] != b[:, -n:]).any() for a, b, n in pairs):
                return False
    return True


@pytest.fixture(autouse=True)
def small(monkeypatch: Patch) -> None:
    monkeypatch.setattr(row_group, "BUFFER_STEP", 16)
    monkeypatch.setattr(row_group, "SPARE_TOKENS", 64)


@pytest.mark.parametrize("form", [KVQuantization(8, 32), KVQuantization(4, 32)])
def test_packed_rows_are_rounded_rows(form: KVQuantization) -> None:
    assert all(has_same_rows(seed, form) for seed in range(6))


def scales_stay_where_they_were(monkeypatch: Patch) -> None:
    """The row that takes the place of one that left keeps that one's scales."""
    original = QuantizedBuffer.remove_rows

    def remove_rows(self: QuantizedBuffer, moves: Mapping[int, int], rows: int) -> None:
        scales, indices = self._parts[1], mx.array([*moves.values()], mx.int32)
        assert scales.keys is not None and scales.values is not None
        before = scales.keys[indices] + 0, scales.values[indices] + 0
        original(self, moves, rows)
        if moves:
            scales.keys[indices], scales.values[indices] = before

    monkeypatch.setattr(QuantizedBuffer, "remove_rows", remove_rows)


def moved_rows_have_the_biases_of_another(monkeypatch: Patch) -> None:
    original = QuantizedBuffer.copy_row

    def copy_row(self: QuantizedBuffer, index: int, width: int) -> object:
        row = original(self, index, width)
        return row._replace(parts=(*row.parts[:2], self._parts[2].copy_row(0, width)))

    monkeypatch.setattr(QuantizedBuffer, "copy_row", copy_row)


@pytest.mark.parametrize("plant", [scales_stay_where_they_were, moved_rows_have_the_biases_of_another])
def test_the_comparison_finds_planted_bugs(monkeypatch: Patch, plant: Callable[[Patch], None]) -> None:
    plant(monkeypatch)
    assert not all(has_same_rows(seed, KVQuantization(8, 32)) for seed in range(6))


@pytest.mark.parametrize(("dtype", "limit"), [(mx.float32, 1e-5), (mx.bfloat16, 2e-2)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_is_the_librarys_over_rounded_values(
    dtype: mx.Dtype, limit: float, has_sinks: bool
) -> None:
    """Heads that share keys, rows of other lengths, sinks, and half precision."""
    form = KVQuantization(8, 32)
    mx.random.seed(3)
    keys, values = (form.quantize(a.astype(dtype)) for a in make_pair(3, 40))
    queries = mx.random.normal((3, 3 * HEADS, 1, KEY)).astype(dtype)
    mask = mx.arange(40) >= mx.array([0, 13, 39])[:, None, None, None]
    sinks = mx.random.normal((3 * HEADS,)).astype(dtype) if has_sinks else None
    found = attend_quantized(queries, keys, values, 0.1, mask, sinks)
    assert found.dtype == dtype and keys.astype(mx.float32).dtype == mx.float32
    exact = (queries, dequantize(keys), dequantize(values))
    wanted = mx.fast.scaled_dot_product_attention(*exact, scale=0.1, mask=mask, sinks=sinks)
    assert mx.abs(found.astype(mx.float32) - wanted.astype(mx.float32)).max().item() < limit


def test_windows_are_not_quantized() -> None:
    """A window bounds its memory by itself."""
    assert isinstance(make_buffer(KVQuantization(8, 32), 16), KVBuffer)
    assert isinstance(make_buffer(None, None), KVBuffer)
