"""Linear layers with views of their weights compute what the library's do, by fewer nodes."""

from __future__ import annotations

import io
import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxrun.model.hooks import derived_layers, skinny_gemm
from mlxrun.model.hooks.derived_layers import (
    can_gate,
    forget_even_products,
    hook_even_products,
    is_plain_linear,
    list_even,
    takes_heads,
    transpose_weights,
)
from tests.helpers.fused_models import multiply_rows


def make_layers(dtype: mx.Dtype = mx.float32) -> nn.Sequential:
    mx.random.seed(1)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32, bias=False))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def count_nodes(name: str, *outputs: mx.array) -> int:
    graph = io.StringIO()
    mx.export_to_dot(graph, *outputs)
    return len(re.findall(name, graph.getvalue()))


def count_transposes(model: nn.Module, x: mx.array) -> int:
    return count_nodes("Transpose", model(x))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_result_is_the_librarys_bit_by_bit(dtype: mx.Dtype, rows: int) -> None:
    model = make_layers(dtype)
    x = mx.random.normal((rows, 1, 64)).astype(dtype)
    expected = model(x), mx.compile(model)(x)
    names = [name for name, _ in tree_flatten(model.parameters())]
    transpose_weights(model)
    found = model(x), mx.compile(model)(x)
    assert all(mx.array_equal(a, b).item() for a, b in zip(found, expected, strict=True))
    assert [name for name, _ in tree_flatten(model.parameters())] == names


def test_a_forward_has_no_node_for_the_views() -> None:
    model, x = make_layers(), mx.ones((2, 64))
    assert count_transposes(model, x) == 2
    transpose_weights(model)
    model(x)
    assert count_transposes(model, x) == 0


def test_one_row_folds_no_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rows do, as each would read the weights. GPUs compute as the library."""
    model = make_layers()
    transpose_weights(model)
    folded = [count_nodes("Flatten|Unflatten", model(mx.ones((rows, 1, 64)))) for rows in (1, 2)]
    assert folded[0] == 0 < folded[1]
    monkeypatch.setattr(derived_layers, "uses_gpu", lambda: True)
    transpose_weights(model := make_layers())
    assert count_nodes("Flatten|Unflatten", model(mx.ones((1, 1, 64)))) == folded[1]


def test_a_weight_that_is_replaced_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin keeps the view of the first one."""

    def replace_weight() -> bool:
        model, x = make_layers(), mx.ones((2, 64))
        transpose_weights(model)
        before = model(x)
        model.layers[0].weight = 2 * model.layers[0].weight
        return not mx.allclose(model(x), before).item()

    assert replace_weight()

    def keep_first(self: Any, x: mx.array) -> mx.array:
        self["_source"] = self["weight"].T if self["_source"] is None else self["_source"]
        return x @ self["_source"]

    monkeypatch.setattr(derived_layers._TransposedLinear, "__call__", keep_first)
    assert not replace_weight()


def test_layers_of_other_classes_stay_as_they_are() -> None:
    class OwnLinear(nn.Linear):
        pass

    model = nn.Sequential(OwnLinear(4, 4), nn.QuantizedLinear(64, 64))
    transpose_weights(model)
    assert [type(layer) for layer in model.layers] == [OwnLinear, nn.QuantizedLinear]


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
    found: list[int] = []

    def multiply(layer: Any, x: mx.array, gated: bool = False) -> mx.array:
        found.append(x.shape[0])
        return multiply_rows(layer, x, gated)

    monkeypatch.setattr(skinny_gemm, "multiply_few_rows", multiply)
    monkeypatch.setattr(derived_layers, "can_multiply_plain", skinny_gemm.can_multiply_plain)
    monkeypatch.setattr(skinny_gemm, "get_backend", lambda: "cuda")
    return found


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
    assert list_even(model) == [] and type(model.linear) is nn.Linear
    assert mx.array_equal(model(tokens), expected).item()


def test_layers_take_heads_and_gate_while_they_multiply_evenly(products: list[int]) -> None:
    model = Tied()
    model.set_dtype(mx.float16)
    linear, heads = model.linear, mx.random.normal((5, 4, 1, 8)).astype(mx.float16)
    expected = linear(heads.reshape(5, 1, 32))
    assert not takes_heads(linear) and not can_gate(linear, mx.float16)
    hook_even_products(model, mx.float16)
    assert takes_heads(linear) and not can_gate(linear, mx.float16), "with a bias"
    for wide in (heads, heads.astype(mx.float32)):  # the library's, which takes no heads
        found = linear(wide)
        assert found.shape == (5, 1, 32) and mx.allclose(found, expected, atol=1e-2).item()
    assert products == [5]
    del linear["bias"]
    assert can_gate(linear, mx.float16) and not can_gate(linear, mx.float32)
    forget_even_products(model)
    assert not takes_heads(linear) and not can_gate(linear, mx.float16)


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
