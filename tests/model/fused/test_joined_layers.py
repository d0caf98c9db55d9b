"""Joined linear layers multiply as each of them, and keep views of one weight."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxrun.model.fused.joined_layers import JoinedProduct, can_join
from mlxrun.model.fused.operations import ARRAYS
from mlxrun.model.hooks import even_products
from mlxrun.model.hooks.derived_layers import transpose_weights
from mlxrun.model.hooks.even_products import forget_even_products, hook_even_products
from mlxrun.model.hooks.quantized_layers import MethodTable, forget_methods, hook_products
from tests.helpers.fused_models import multiply_rows, use_packed_products

X = mx.random.normal((3, 1, 64), key=mx.random.key(1))


def make_layers(bias: bool = True, bits: int | None = None, dtype: mx.Dtype = mx.float32) -> Any:
    mx.random.seed(2)
    layers = nn.Sequential(*(nn.Linear(64, n, bias=bias) for n in (64, 32, 96)))
    layers.set_dtype(dtype)
    if bits is not None:
        nn.quantize(layers, group_size=32, bits=bits)
    return layers


@pytest.mark.parametrize("bits", [None, 4, 8])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_outputs_follow_each_other(dtype: mx.Dtype, bias: bool, bits: int | None) -> None:
    model, x = make_layers(bias, bits, dtype), X.astype(dtype)
    transpose_weights(model)
    expected = mx.concatenate([layer(x) for layer in model.layers], axis=-1)
    joined = JoinedProduct(model.layers)
    assert joined.outputs == 192 and mx.array_equal(joined(x), expected).item()
    again = mx.concatenate([layer(x) for layer in model.layers], axis=-1)
    assert mx.array_equal(again, expected).item()


def test_one_layer_is_its_own_product() -> None:
    (layer,) = make_layers().layers[:1]
    weight = layer.weight
    assert mx.array_equal(JoinedProduct([layer])(X), layer(X)).item() and layer.weight is weight


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [None, 4])
def test_gate_and_up_are_gated_by_the_kernel_of_their_product(
    bits: int | None, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias is added to a product before its gate, so the kernel cannot make it."""
    model, calls = make_layers(bias, bits), []

    def multiply(layer: Any, x: mx.array, gated: bool = False, added: None = None) -> mx.array:
        calls.append(gated)
        return multiply_rows(layer, x, gated)

    expected = ARRAYS.gate(mx.concatenate([layer(X) for layer in model.layers], axis=-1))
    monkeypatch.setattr(even_products, "can_multiply_plain", lambda layer, dtype: True)
    use_packed_products(model, multiply, monkeypatch)
    assert hook_even_products(model, mx.float32, whole=False) == (0 if bits else 3)
    joined = JoinedProduct(model.layers)
    assert mx.allclose(joined.gate(X, ARRAYS.gate), expected, atol=1e-4).item()
    assert calls == [not bias]
    chunk = X.reshape(1, 3, 64)
    assert mx.allclose(joined.gate(chunk, ARRAYS.gate), expected.reshape(1, 3, -1), atol=1e-4).item()
    assert not any(calls[1:]), "a prompt's tokens"
    forget_even_products(model)
    forget_methods(model)
    calls.clear()
    assert mx.allclose(joined.gate(X, ARRAYS.gate), expected, atol=1e-4).item() and joined(X) is not None
    assert calls == [], "the layers' products are the library's now"


def test_the_method_of_quantized_products_is_that_of_the_layers() -> None:
    """The load check replaces the tables of a model's layers meanwhile."""
    model = make_layers(bits=4)
    hook_products(model, MethodTable(((1, "library"), (9, "dequantized"))))
    joined = JoinedProduct(model.layers)
    joined(X)
    for layer in model.layers:
        layer.table = MethodTable()
    joined(X)
    assert joined.layer.table == MethodTable()


def test_layers_of_different_forms_are_not_joined() -> None:
    plain, wide = make_layers().layers, nn.Linear(32, 64)
    four, eight = make_layers(bits=4).layers, make_layers(bits=8).layers
    assert can_join(plain) and can_join(four)
    assert not can_join([plain[0], make_layers(bias=False).layers[1]])
    assert not can_join([plain[0], wide]) and not can_join([four[0], eight[1]])
    assert not can_join([plain[0], four[0]]) and not can_join([plain[0], nn.RMSNorm(64)])
    assert not can_join([plain[0], make_layers(dtype=mx.float16).layers[1]])

    class Adapted(nn.Linear):
        pass

    assert not can_join([Adapted(64, 32), Adapted(64, 32)])
