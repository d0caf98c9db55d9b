"""Plain weights multiply rows of decode steps by the kernel where that is wanted, else by the library."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxrun.model.hooks import even_products, skinny_gemm
from mlxrun.model.hooks.even_products import (
    EVERY_ROW,
    forget_even_products,
    has_epilogues,
    hook_even_products,
    is_plain_linear,
    list_even,
    takes_heads,
)
from mlxrun.model.hooks.quantized_layers import MethodTable, keep_methods
from tests.helpers.fused_models import count_products

TABLE = MethodTable(((1, "library"), (8, "packed"), (9, "library")))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 32)
        self.norm = nn.RMSNorm(32)
        self.linear = nn.Linear(32, 32)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.embedding.as_linear(self.norm(self.linear(self.embedding(tokens))))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each product of the kernel."""
    monkeypatch.setattr(even_products, "can_multiply_plain", skinny_gemm.can_multiply_plain)
    monkeypatch.setattr(skinny_gemm, "get_backend", lambda: "cuda")
    return count_products(monkeypatch)


def test_rows_of_decode_steps_are_multiplied_evenly(products: list[int]) -> None:
    model = Tied()
    model.set_dtype(mx.float16)
    tokens = mx.arange(130)[:, None] % 10
    expected, prompt = model(tokens), model(tokens.T)
    assert hook_even_products(model, mx.float16) == len(list_even(model)) == 2
    assert is_plain_linear(model.linear)
    found = model(tokens)
    assert products == [64, 64, 2] * 2 and mx.allclose(found, expected, atol=1e-2).item()
    assert mx.array_equal(model(tokens.T), prompt).item() and len(products) == 6, "a prompt is the library's"
    forget_even_products(model)
    assert list_even(model) == [] and is_plain_linear(model.linear)
    assert mx.array_equal(model(tokens), expected).item()


def test_layers_take_heads_and_gate_while_they_multiply_evenly(products: list[int]) -> None:
    model = Tied()
    model.set_dtype(mx.float16)
    linear, heads = model.linear, mx.random.normal((5, 4, 1, 8)).astype(mx.float16)
    expected = linear(heads.reshape(5, 1, 32))
    assert not takes_heads(linear) and not has_epilogues(linear, mx.float16)
    hook_even_products(model, mx.float16)
    assert takes_heads(linear) and not has_epilogues(linear, mx.float16), "with a bias"
    for wide in (heads, heads.astype(mx.float32)):  # the library's, which takes no heads
        found = linear(wide)
        assert found.shape == (5, 1, 32) and mx.allclose(found, expected, atol=1e-2).item()
    assert products == [5]
    del linear["bias"]
    assert has_epilogues(linear, mx.float16) and not has_epilogues(linear, mx.float32)
    forget_even_products(model)
    assert not has_epilogues(linear, mx.float16) and linear(heads).shape == (5, 1, 32) and products == [5]


@pytest.mark.parametrize(
    "kind", ["another type", "an odd width", "a matrix of its own", "quantized", "derived"]
)
def test_nothing_is_multiplied_evenly_unless_all_is(kind: str, products: list[int]) -> None:
    model: Any = Tied()
    model.set_dtype(mx.float16)
    match kind:
        case "another type":
            model.linear.set_dtype(mx.float32)
        case "an odd width":
            model.more = nn.Linear(33, 4)
            model.set_dtype(mx.float16)
        case "a matrix of its own":
            model.gate = mx.zeros((4, 32))
        case "quantized":
            model.linear = model.linear.to_quantized(group_size=32, bits=4)
        case "derived":
            model.linear.__class__ = type("Own", (nn.Linear,), {})
    assert hook_even_products(model, mx.float16) == 0 and list_even(model) == []


@pytest.mark.parametrize("table", [TABLE, EVERY_ROW])
def test_a_table_chooses_the_rows_of_the_kernel(table: MethodTable, products: list[int]) -> None:
    """The twin multiplies all rows by it."""
    model = Tied()
    model.set_dtype(mx.float16)
    assert hook_even_products(model, mx.float16, table, whole=False) == 2
    for rows in (1, 2, 8, 9, 70):
        model.linear(mx.ones((rows, 1, 32), mx.float16))
    model.linear(mx.ones((32,), mx.float16))  # no rows
    assert products == ([2, 8] if table is TABLE else [1, 2, 8, 9, 64, 6])


def test_layers_that_the_kernel_does_not_cover_stay_the_librarys(products: list[int]) -> None:
    model: Any = Tied()
    model.more, model.gate = nn.Linear(33, 4), mx.zeros((4, 32))
    model.set_dtype(mx.float16)
    assert hook_even_products(model, mx.float16, TABLE, whole=False) == 2
    assert type(model.more) is nn.Linear and takes_heads(model.linear)


def test_methods_return_after_a_block_that_keeps_them(products: list[int]) -> None:
    """As after a load check that is repeated beside requests."""
    model = Tied()
    model.set_dtype(mx.float16)
    hook_even_products(model, mx.float16, TABLE)
    with keep_methods(model):
        forget_even_products(model)
        assert list_even(model) == []
    assert [layer.table for layer in list_even(model)] == [TABLE, TABLE]
