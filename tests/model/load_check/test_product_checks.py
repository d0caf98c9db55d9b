"""The methods by which quantized layers multiply are compared with float32, one layer of each shape."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxrun.model.hooks import quantized_layers
from mlxrun.model.hooks.quantized_layers import MethodTable, hook_experts, hook_products, list_experts
from mlxrun.model.load_check.product_checks import check_products

TABLE = MethodTable(((1, "library"), (4, "flat"), (8, "dequantized")))


class Layers(nn.Module):
    def __init__(self, dtype: mx.Dtype, experts: bool) -> None:
        super().__init__()
        mx.random.seed(1)
        self.linear = nn.Linear(64, 96)
        self.embed = nn.Embedding(80, 64)
        nn.quantize(self, group_size=32, bits=4)
        if experts:
            self.experts = SwitchLinear(64, 96, 4).to_quantized(group_size=32, bits=4)
            assert isinstance(self.experts, QuantizedSwitchLinear)
        self.set_dtype(dtype)
        hook_products(self, TABLE)
        hook_experts(list_experts(self), MethodTable(((2, "library"), (3, "dequantized"))))


def make(dtype: mx.Dtype = mx.float32, experts: bool = True) -> Layers:
    return Layers(dtype, experts and dtype == mx.float32)  # a CPU multiplies experts in float32 only


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_sound_methods_pass(dtype: mx.Dtype) -> None:
    (check,) = check_products(make(dtype))
    assert check.passed, check.describe()
    assert check_products(nn.Linear(4, 4)) == ()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_wrong_product_is_replaced_by_the_librarys(
    dtype: mx.Dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = quantized_layers.multiply

    def multiply(layer: Any, x: mx.array, method: Any) -> mx.array:
        return original(layer, x, method) * (1.05 if method == "flat" else 1)

    monkeypatch.setattr(quantized_layers, "multiply", multiply)
    model = make(dtype)
    (check,) = check_products(model)
    assert not check.passed and model.linear.table == MethodTable()


def test_experts_in_a_wrong_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = mx.gather_mm

    def gather_mm(x: mx.array, weight: mx.array, *, rhs_indices: mx.array, **more: Any) -> mx.array:
        return original(x, weight, rhs_indices=weight.shape[0] - 1 - rhs_indices, **more)

    model = make()
    monkeypatch.setattr(quantized_layers.mx, "gather_mm", gather_mm)
    (check,) = check_products(model)
    assert not check.passed
