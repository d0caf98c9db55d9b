"""Every method gives the library's product, for every kind of quantized weights and any number of rows."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_vlm.models import switch_layers as vision_layers

from mlxrun.model.hooks import quantized_layers
from mlxrun.model.hooks.quantized_layers import (
    MethodTable,
    ProductMethod,
    bound_transients,
    count_weights,
    describe_quantization,
    hold_dequantized,
    hook_experts,
    hook_products,
    list_experts,
    list_products,
    list_quantized,
    multiply,
    use_row_products,
)
from mlxrun.model.machine import device

MODES = [
    *[("affine", bits, 64) for bits in (2, 3, 4, 5, 6, 8)],
    ("affine", 4, 32),
    ("mxfp4", 4, 32),
    ("mxfp8", 8, 32),
    ("nvfp4", 4, 16),
]
METHODS: list[ProductMethod] = ["library", "flat", "packed", "dequantized"]


class Layers(nn.Module):
    """A linear layer with bias, one without, an embedding, experts and heads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(128, 96)
        self.plain = nn.Linear(128, 64, bias=False)
        self.embedding = nn.Embedding(64, 128)
        self.experts = SwitchLinear(128, 32, 4, bias=True)
        self.heads = MultiLinear(128, 64, 2)

    def run(self, x: mx.array) -> dict[str, mx.array]:
        """The outputs of all layers for x [rows, 1, 128]."""
        experts = mx.arange(x.shape[0])[:, None, None] % 4
        return {
            "linear": self.linear(x),
            "plain": self.plain(x),
            "embedding": self.embedding.as_linear(x),
            "tokens": self.embedding(mx.arange(5)),
            "experts": self.experts(x[:, :, None, None], experts),
            "heads": self.heads(mx.broadcast_to(x[:, 0], (2, x.shape[0], 128))),
        }


def make_layers(mode: str = "affine", bits: int = 4, group: int = 64) -> Layers:
    mx.random.seed(0)
    layers = Layers()
    layers.linear.bias = mx.random.normal((96,))
    layers.experts.bias = mx.random.normal((4, 32))
    nn.quantize(layers, group_size=group, bits=bits, mode=mode)
    mx.eval(layers.parameters())
    return layers


def difference(a: mx.array, b: mx.array) -> float:
    assert a.shape == b.shape
    return float((mx.abs(a - b).max() / mx.abs(a).max()).item())


@pytest.mark.parametrize(("mode", "bits", "group"), MODES)
@pytest.mark.parametrize("method", METHODS)
def test_a_routed_layer_gives_the_librarys_product(mode: str, bits: int, group: int, method: Any) -> None:
    layers = make_layers(mode, bits, group)
    for rows in (1, 2, 7, 8, 9, 33):
        x = mx.random.normal((rows, 1, 128))
        expected = layers.run(x)
        hook_products(layers, MethodTable(((1, method),)))
        found = layers.run(x)
        for name, value in expected.items():
            assert difference(value, found[name]) < 1e-5, (name, rows)


@pytest.mark.parametrize(("mode", "bits", "group"), MODES)
def test_held_weights_give_the_librarys_product(mode: str, bits: int, group: int) -> None:
    layers = make_layers(mode, bits, group)
    x = mx.random.normal((9, 1, 128))
    expected = layers.run(x)
    hold_dequantized(list_quantized(layers), mx.float32)
    assert list_quantized(layers) == [] and type(layers.linear) is nn.Linear
    assert type(layers.experts) is SwitchLinear and type(layers.heads) is MultiLinear
    assert {name.rpartition(".")[2] for name, _ in tree_of(layers)} == {"weight", "bias"}
    for name, value in layers.run(x).items():
        assert difference(expected[name], value) < 1e-5, name


def test_weights_are_the_same_on_several_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their places, whichever stream is done first."""
    found = []
    for least in (1 << 60, 0):
        monkeypatch.setattr(device, "PARALLEL_BYTES", least)
        monkeypatch.setattr(device.os, "cpu_count", lambda: 3)
        assert len(device.StreamSpread(1)._streams) == (1 if least else 3)
        sizes = [256, 32, 1024, 64, *[96] * 20]
        layers = [nn.Linear(64, size, bias=False) for size in sizes]
        for at, layer in enumerate(layers):
            layer.weight = mx.random.normal(layer.weight.shape, key=mx.random.key(at))
        quantized = [layer.to_quantized(group_size=32, bits=4) for layer in layers]
        quantized_layers.hold_dequantized(quantized, mx.float32)
        found.append([layer.weight for layer in quantized])
    assert all(mx.array_equal(one, many).item() for one, many in zip(*found, strict=True))


def test_a_layer_in_several_places_is_taken_once() -> None:
    layers = make_layers()
    layers.again = [layers.linear, {"head": layers.embedding}]
    assert len(list_products(layers)) == 3 and len(list_quantized(layers)) == 5
    x = mx.random.normal((9, 1, 128))
    expected = layers.run(x)
    hold_dequantized(list_quantized(layers), mx.float32)
    assert layers.again[0] is layers.linear
    assert difference(expected["linear"], layers.again[0](x)) < 1e-5


def tree_of(layers: Layers) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    return [(str(name), value) for name, value in tree_flatten(layers.parameters())]


def test_the_comparison_sees_a_lost_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation twin: rows are padded in front and cut off at the end."""
    layers = make_layers()
    x = mx.random.normal((3, 1, 128))
    expected = layers.run(x)["linear"]
    pad = mx.pad
    monkeypatch.setattr(quantized_layers.mx, "pad", lambda flat, widths: pad(flat, [widths[0][::-1], (0, 0)]))
    assert difference(expected, multiply(layers.linear, x, "flat") + layers.linear.bias) > 1e-2


def test_the_table_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = make_layers()
    used: list[tuple[int, str]] = []
    real = multiply

    def watch(layer: Any, x: mx.array, method: ProductMethod) -> mx.array:
        used.append((x.size // x.shape[-1], method))
        return real(layer, x, method)

    monkeypatch.setattr(quantized_layers, "multiply", watch)
    hook_products(layers, MethodTable(((1, "library"), (8, "flat"), (100, "dequantized"))))
    for rows in (1, 2, 8, 9, 500):
        layers.linear(mx.ones((rows, 1, 128)))
    assert used == [(1, "library"), (2, "flat"), (8, "flat"), (9, "dequantized"), (500, "dequantized")]


def test_a_weight_that_is_too_large_is_not_dequantized_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = make_layers()
    monkeypatch.setattr(quantized_layers, "MAX_TRANSIENT", 10)
    monkeypatch.setattr(quantized_layers, "dequantize_weight", lambda *given: pytest.fail("dequantized"))
    assert multiply(layers.plain, mx.ones((9, 1, 128)), "dequantized").shape == (9, 1, 64)


def test_only_layers_of_the_libraries_are_taken() -> None:
    """A subclass has a call of its own, which stays; so do experts with a global scale."""

    class Own(nn.QuantizedLinear):
        def __call__(self, x: mx.array) -> mx.array:
            return x

    layers = make_layers()
    layers.linear = Own(128, 96)
    layers.experts.global_scale = mx.ones((4,))
    found = {type(layer).__name__ for layer in list_products(layers)}
    assert found == {"QuantizedLinear", "QuantizedEmbedding"}
    assert {type(layer).__name__ for layer in list_quantized(layers)} == {
        "QuantizedLinear",
        "QuantizedEmbedding",
        "QuantizedMultiLinear",
    }
    hook_products(layers, MethodTable())
    assert type(layers.linear) is Own


def test_kinds_and_sizes_are_told() -> None:
    layers = make_layers()
    layers.plain = nn.QuantizedLinear(128, 64, bits=8)
    assert list(describe_quantization(layers)) == ["affine 4 bit", "affine 8 bit"]
    assert count_weights(layers.linear) == 96 * 128 and count_weights(layers.plain) == 64 * 128
    assert list(describe_quantization(Layers())) == []


def test_products_are_the_librarys_for_a_while() -> None:
    layers = make_layers()
    table = MethodTable(((1, "dequantized"),))
    hook_products(layers, table)
    hook_experts(list_experts(layers), table)
    with pytest.raises(RuntimeError, match="in between"), use_row_products(layers):
        assert layers.linear.table.choose(9) == layers.experts.table.choose(9) == "library"
        raise RuntimeError("in between")
    assert layers.linear.table is layers.embedding.table is layers.experts.table is table


def test_the_kernel_of_packed_weights_serves_in_place_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows do not depend on each other. The library's are compiled for minutes on CUDA."""
    layers = make_layers()
    hook_products(layers, MethodTable(((64, "packed"), (65, "dequantized"))))
    monkeypatch.setattr(quantized_layers, "can_multiply_packed", lambda layer, dtype: layer is layers.linear)
    with use_row_products(layers):
        assert layers.linear.table.choose(9) == "packed" and layers.linear.table.choose(65) == "dequantized"
        assert layers.plain.table.choose(9) == "library"


# -- experts --------------------------------------------------------------------------------------------

EXPERT_TABLE = MethodTable(((8, "library"), (9, "dequantized")))


def make_experts(mode: str = "affine", bits: int = 4, group: int = 64, library: Any = SwitchLinear) -> Any:
    mx.random.seed(0)
    experts = library(128, 32, 4, bias=True)
    experts.bias = mx.random.normal((4, 32))
    experts = experts.to_quantized(group, bits, mode)
    mx.eval(experts.parameters())
    return experts


def make_pairs(count: int) -> tuple[mx.array, mx.array]:
    """x [count, 1, 128] and the experts of its tokens, sorted; one expert has none."""
    indices = mx.sort(mx.random.randint(0, 3, (count,))).astype(mx.uint32)
    return mx.random.normal((count, 1, 128)), indices


@pytest.mark.parametrize(("mode", "bits", "group"), MODES)
@pytest.mark.parametrize("library", [SwitchLinear, vision_layers.SwitchLinear])
def test_routed_experts_give_the_librarys_product(mode: str, bits: int, group: int, library: Any) -> None:
    experts = make_experts(mode, bits, group, library)
    given = make_pairs(64)
    expected = experts(*given, sorted_indices=True)
    hook_experts([experts], EXPERT_TABLE)
    assert isinstance(experts, type(make_experts(mode, bits, group, library)))
    with bound_transients():
        assert difference(expected, experts(*given, sorted_indices=True)) < 1e-5


@pytest.mark.parametrize("wrong", ["scales", "experts", "bias"])
def test_the_comparison_sees_wrong_experts(wrong: str) -> None:
    """The mutation twins: scales of another group, weights or bias of another expert."""
    experts = make_experts()
    x, indices = make_pairs(64)
    expected = experts(x, indices, sorted_indices=True)
    hook_experts([experts], EXPERT_TABLE)
    if wrong == "bias":
        experts.bias = mx.roll(experts.bias, 1, axis=0)
    else:
        axis = 0 if wrong == "experts" else -1
        experts.scales = mx.roll(experts.scales, 1, axis=axis)
    with bound_transients():
        assert difference(expected, experts(x, indices, sorted_indices=True)) > 1e-2


@pytest.mark.parametrize("decodes", [False, True])
def test_experts_are_dequantized_for_many_sorted_tokens_of_prompts(
    decodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the shapes of a call: 8 tokens for each of 4 experts are the library's, one more is not. In a decode
    step, which may be compiled, all are."""
    made: list[int] = []
    real = quantized_layers.dequantize_weight
    experts = make_experts()
    experts.pop("bias")  # the only thing of which a CPU would compile kernels
    hook_experts([experts], EXPERT_TABLE)

    def watch(layer: Any, dtype: mx.Dtype) -> mx.array:
        made.append(count)
        return real(layer, dtype)

    monkeypatch.setattr(quantized_layers, "dequantize_weight", watch)
    run: Any = mx.compile(experts.__call__) if decodes else experts
    for count, is_sorted in ((1, True), (35, True), (36, True), (200, False), (200, True)):
        x, indices = make_pairs(count)
        with nullcontext() if decodes else bound_transients():
            found = run(x, indices, sorted_indices=is_sorted)
        with use_row_products(experts):
            assert difference(experts(x, indices, sorted_indices=is_sorted), found) < 1e-5
    assert made == ([] if decodes else [36, 200])


def test_weights_of_one_product_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a prompt's forward waits for earlier ones before it has too many of them in memory."""
    counted: list[int] = []

    def record(product: mx.array, numbers: int) -> mx.array:
        counted.append(numbers)
        return product

    monkeypatch.setattr(quantized_layers, "record_product", record)
    experts, layers = make_experts(), make_layers()
    hook_experts([experts], EXPERT_TABLE)
    with bound_transients():
        experts(*make_pairs(64), sorted_indices=True)
        for method in METHODS:
            multiply(layers.linear, mx.zeros((9, 128)), method)
    assert counted == [4 * 32 * 128, 96 * 128]


def test_experts_that_are_too_large_are_not_dequantized_for_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = make_experts()
    hook_experts([experts], EXPERT_TABLE)
    assert count_weights(experts) == 4 * 32 * 128 <= quantized_layers.MAX_EXPERT_TRANSIENT
    monkeypatch.setattr(quantized_layers, "MAX_EXPERT_TRANSIENT", 4 * 32 * 128 - 1)
    monkeypatch.setattr(quantized_layers, "dequantize_weight", lambda *given: pytest.fail("dequantized"))
    with bound_transients():
        assert experts(*make_pairs(64), sorted_indices=True).shape == (64, 1, 32)
