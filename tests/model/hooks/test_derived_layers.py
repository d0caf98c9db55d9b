"""Linear layers with views of their weights compute what the library's do, by fewer nodes."""

from __future__ import annotations

import io
import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlxrun.model.hooks import derived_layers
from mlxrun.model.hooks.derived_layers import transpose_weights


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

    monkeypatch.setattr(derived_layers.TransposedLinear, "__call__", keep_first)
    assert not replace_weight()


def test_layers_of_other_classes_stay_as_they_are() -> None:
    class OwnLinear(nn.Linear):
        pass

    model = nn.Sequential(OwnLinear(4, 4), nn.QuantizedLinear(64, 64))
    transpose_weights(model)
    assert [type(layer) for layer in model.layers] == [OwnLinear, nn.QuantizedLinear]
