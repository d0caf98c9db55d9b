"""The kernels of fused layers, as Metal would run them, against the same in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import pytest

from mlxrun.model.fused.operations import KERNELS, NormRule
from tests.metal.attention_cases import ROUNDING
from tests.metal.emulator.emulated_kernel import ORDERS, Emulator
from tests.metal.layer_cases import HEADS, OFFSETS, GPUOperations, find_problem, make_random, split_heads

Compute = Callable[..., Sequence[mx.array]]


def check(emulator: Emulator, dtype: mx.Dtype, compute: Compute, given: Sequence[mx.array]) -> None:
    found = compute(KERNELS, *given)
    assert find_problem(found, compute(GPUOperations(), *given), dtype) is None
    for emulator.order in ORDERS[1:]:
        emulator.guard = "begin" if emulator.order == "backward" else "end"
        again = compute(KERNELS, *given)
        assert all(mx.array_equal(*pair).item() for pair in zip(found, again, strict=True))
    alone = compute(KERNELS, *(array[3:4] for array in given))
    assert all(mx.array_equal(one[0], many[3]).item() for one, many in zip(alone, found, strict=True))


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("size", [64, 90, 100, 1024, 2880, 5120])
def test_sums_and_their_norms(emulator: Emulator, size: int, dtype: mx.Dtype) -> None:
    norm = NormRule(1 + 0.5 * make_random((size,), 3), 1e-5)
    norm = replace(norm, weight=norm.weight.astype(dtype))
    given = [make_random((5, 1, size), seed, dtype) for seed in (1, 2)]
    check(emulator, dtype, lambda by, x, change: by.add_norm(x, change, norm), given)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_heads(emulator: Emulator, name: str, dtype: mx.Dtype) -> None:
    case = HEADS[name]
    rule, width = case.make_rule(dtype), (case.heads + 2 * case.kv_heads) * case.size
    product = make_random((5, 1, width), 1, dtype)
    check(emulator, dtype, lambda by, x, offsets: split_heads(by, x, rule, offsets), [product, OFFSETS])


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_heads_of_chunks(emulator: Emulator, name: str, dtype: mx.Dtype) -> None:
    """A token of a chunk is computed as by itself; only its place differs."""
    case = HEADS[name]
    rule, width = case.make_rule(dtype), (case.heads + 2 * case.kv_heads) * case.size
    product, offsets = make_random((2, 3, width), 1, dtype), mx.array([300, 301, 302, 5, 6, 7])
    found = split_heads(KERNELS, product, rule, offsets)
    assert find_problem(found, split_heads(GPUOperations(), product, rule, offsets), dtype) is None
    singly = split_heads(KERNELS, product.reshape(6, 1, width), rule, offsets)
    for whole, each in zip(found, singly, strict=True):
        tokens = whole.transpose(0, 2, 1, 3).reshape(6, -1)
        assert mx.array_equal(tokens, each.reshape(6, -1)).item()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("size", [8, 300, 1024])
def test_gates(emulator: Emulator, size: int, dtype: mx.Dtype) -> None:
    product = 4 * make_random((5, 1, 2 * size), 1)
    check(emulator, dtype, lambda by, x: [by.gate(x)], [product.astype(dtype)])
