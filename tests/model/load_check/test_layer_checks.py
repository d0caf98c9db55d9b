"""Fused layers are compared with the library at load. With a fault, layers are the library's."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.model.fused import fused_blocks
from mlxrun.model.fused.fused_blocks import FusedLayer, list_fused
from mlxrun.model.fused.operations import ArrayOperations, HeadRule, NormRule
from mlxrun.model.hooks import even_products, install, skinny_gemm
from mlxrun.model.hooks.quantized_layers import dequantize_weight
from mlxrun.model.kv.paged.attention_kernel import attend_gathered
from mlxrun.model.load_check import choose, layer_checks, text_ladder
from mlxrun.model.load_check.attention_checks import KernelCheck
from mlxrun.model.load_check.layer_checks import check_layers
from mlxrun.model.run import compute_methods
from tests.helpers.fused_models import make_caller, multiply_rows, use_packed_products
from tests.helpers.load_check_driver import list_failed, probe_model
from tests.helpers.model_fixtures import Zoo, mark_sweep

DTYPES = ("float32", "bfloat16", "float16")
FUSED = ["kernels of layers", "decode fused", "decode fused at 518 tokens"]


class Sound(ArrayOperations):
    pass


class LargeEps(ArrayOperations):
    def add_norm(self, x: mx.array, change: mx.array, norm: NormRule) -> tuple[mx.array, mx.array]:
        return super().add_norm(x, change, NormRule(norm.weight, 1.0))


class NoResidual(ArrayOperations):
    def add_norm(self, x: mx.array, change: mx.array, norm: NormRule) -> tuple[mx.array, mx.array]:
        return x, super().add_norm(x, change, norm)[1]


class NextPosition(ArrayOperations):
    def make_heads(self, product: mx.array, rule: HeadRule, offsets: mx.array) -> tuple[mx.array, mx.array]:
        return super().make_heads(product, rule, offsets + 1)


class ValuesFirst(ArrayOperations):
    def make_heads(self, *given: Any) -> tuple[mx.array, mx.array]:
        queries, written = super().make_heads(*given)
        return queries, mx.roll(written, written.shape[0] // 2, axis=0)


class AnotherHead(ArrayOperations):
    def make_heads(self, *given: Any) -> tuple[mx.array, mx.array]:
        queries, written = super().make_heads(*given)
        return queries[:, ::-1], written


class RoundedSiLU(ArrayOperations):
    """Its logistic function is off by some percent."""

    def gate(self, product: mx.array) -> mx.array:
        gate, up = mx.split(product, 2, axis=-1)
        return gate * mx.sigmoid(1.05 * gate) * up


class ByCompany(ArrayOperations):
    """A row rounds otherwise among others."""

    def gate(self, product: mx.array) -> mx.array:
        return super().gate(product) * (1 + 1e-6 * (product.shape[0] > 1))


class Refused(ArrayOperations):
    """As by a compiler that does not take the source."""

    def gate(self, product: mx.array) -> mx.array:
        raise RuntimeError("[metal_kernel] the source does not compile")


FAULTS = (
    *(LargeEps, NoResidual, NextPosition, ValuesFirst, AnotherHead, RoundedSiLU),
    *(ByCompany, Refused),
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Loading believes in a GPU, whose kernels are the library's operations."""
    for module in (choose, text_ladder, install):
        monkeypatch.setattr(module, "uses_gpu", lambda: True)
    monkeypatch.setattr(text_ladder, "KernelCheck", lambda timed: KernelCheck(attend_gathered, timed=False))
    return monkeypatch


def use_operations(patch: pytest.MonkeyPatch, operations: Any) -> None:
    for module in (layer_checks, compute_methods):
        patch.setattr(module, "choose_operations", lambda: operations)


def list_compared(report: Any) -> list[str]:
    names = [check.name for check in report.checks]
    return [name for name in names if name == "kernels of layers" or name.startswith("decode fused")]


@pytest.mark.parametrize(
    ("family", "dtype"),
    mark_sweep(
        itertools.product(("llama", "qwen3", "phi3"), DTYPES),
        [("llama", "float32"), ("qwen3", "bfloat16"), ("phi3", "float32")],
    ),
)
def test_a_usual_family_decodes_with_fused_layers(
    zoo: Zoo, gpu: pytest.MonkeyPatch, family: str, dtype: str
) -> None:
    report = probe_model(zoo.text(family), dtype=dtype)
    assert list_failed(report) == [] and report.methods.decode == "fused"
    assert list_compared(report) == FUSED


def test_reproducible_mode_has_fused_layers_and_the_same_bits_in_company(
    zoo: Zoo, gpu: pytest.MonkeyPatch
) -> None:
    report = probe_model(zoo.text("llama"), reproducible=True)
    assert report.methods.decode == "fused" and report.methods.fixed_width > 1
    assert list_failed(report) == [] and report.checks[-1].name == "same bits in company"


@pytest.mark.parametrize("planted", [0, 12])
def test_rows_decode_in_any_width_where_their_products_do_not_depend_on_it(
    zoo: Zoo, gpu: pytest.MonkeyPatch, planted: int
) -> None:
    """The twin: from so many rows on, products differ by a little. Then steps have one width, as before."""

    def multiply(layer: Any, x: mx.array, gated: bool, added: mx.array | None) -> mx.array:
        rows = multiply_rows(layer, x, gated, added)
        return rows * (1 + 1e-6) if planted and x.shape[0] > planted else rows

    gpu.setattr(even_products, "can_multiply_plain", lambda layer, dtype: True)
    gpu.setattr(skinny_gemm, "multiply_few_rows", multiply)
    report = probe_model(zoo.text("llama"), reproducible=True)
    assert report.methods.any_width is (planted == 0) and report.methods.decode == "fused"
    assert list_failed(report) == (["same bits in any width"] if planted else [])
    last = "same bits in company" if planted else "same bits in any width"
    assert report.checks[-1].name == last


@pytest.mark.parametrize("planted", ["", "gate", "sum"])
def test_what_is_made_with_a_product_is_compared(zoo: Zoo, gpu: pytest.MonkeyPatch, planted: str) -> None:
    """The twins: a gate or a sum of the next output. Then layers are the library's."""
    made = {"gate": 0, "sum": 0}

    def multiply(layer: Any, x: mx.array, gated: bool, added: mx.array | None) -> mx.array:
        kind = "gate" if gated else "sum" if added is not None else ""
        if kind:
            made[kind] += 1
        if kind and kind == planted:
            layer = {"weight": mx.roll(layer["weight"], 1, axis=0)}
        return multiply_rows(layer, x, gated, added)

    use_operations(gpu, Sound())
    gpu.setattr(even_products, "can_multiply_plain", lambda layer, dtype: True)
    gpu.setattr(skinny_gemm, "multiply_few_rows", multiply)
    report = probe_model(zoo.text("llama"), reproducible=True)
    assert all(made.values()) and report.methods.decode == ("compiled" if planted else "fused")
    assert list_failed(report) == (["kernels of layers"] if planted else [])


@pytest.mark.parametrize("planted", ["", "gate", "sum"])
def test_what_is_made_with_a_quantized_product_is_compared(
    planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer has weights of another form, which are compared too: the twins plant there alone."""
    caller = make_caller("llama", mx.bfloat16, bits=4)
    other = caller.model.layers[1].fused

    def multiply(layer: Any, x: mx.array, gated: bool = False, added: mx.array | None = None) -> mx.array:
        kind = "gate" if gated else "sum" if added is not None else ""
        found = multiply_rows(layer, x, gated, added)
        return mx.roll(found, 1, axis=-1) if planted and kind == planted and layer.bits == 8 else found

    use_operations(monkeypatch, Sound())
    for layer in (other.gated.layer, other.output, other.middle):
        weight = dequantize_weight(layer, mx.bfloat16)
        layer.bits = 8
        layer.weight, layer.scales, layer.biases = mx.quantize(weight, layer.group_size, 8)
    use_packed_products(caller.model, multiply, monkeypatch)
    assert check_layers(caller.model).passed is (planted == "")


@pytest.mark.parametrize("family", mark_sweep(["gemma3_text", "olmo2"], ["olmo2"]))
def test_another_family_decodes_as_before(zoo: Zoo, gpu: pytest.MonkeyPatch, family: str) -> None:
    report = probe_model(zoo.text(family))
    assert report.methods.decode == "compiled" and list_compared(report) == []


def test_layers_are_the_librarys_without_a_check_or_with_adapters(zoo: Zoo, gpu: pytest.MonkeyPatch) -> None:
    assert probe_model(zoo.text("llama"), load_check=False).methods.decode == "ragged"
    caller = make_caller("llama", fused=False)
    assert list_fused(caller.model) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(
    zoo: Zoo, gpu: pytest.MonkeyPatch, fault: type, caplog: pytest.LogCaptureFixture
) -> None:
    use_operations(gpu, fault())
    with caplog.at_level(logging.WARNING):
        report = probe_model(zoo.text("qwen3"))
    assert list_failed(report) == ["kernels of layers"] and report.methods.decode == "compiled"
    assert "instead: layers as the library computes them" in caplog.text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_each_type(fault: type, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = make_caller("qwen3", getattr(mx, dtype))
    use_operations(monkeypatch, Sound())
    assert check_layers(caller.model).passed
    use_operations(monkeypatch, fault())
    found = check_layers(caller.model).passed
    assert not found or (fault is ByCompany and dtype != "float32")  # below the rounding of half precision


def scale_logits(layer: FusedLayer) -> None:
    layer.scale *= 1.5


def lose_norm(layer: FusedLayer) -> None:
    layer.second = NormRule(mx.ones_like(layer.second.weight) * 2, layer.second.eps)


def lose_follower(layer: FusedLayer) -> None:
    if layer.follower is not None:
        layer.follower = layer.follower[0], NormRule(-layer.follower[1].weight, 1e-6)


@pytest.mark.parametrize("plant", [scale_logits, lose_norm, lose_follower])
def test_a_fault_of_the_whole_layer_is_found_in_the_logits(
    zoo: Zoo, gpu: pytest.MonkeyPatch, plant: Any
) -> None:
    """Each operation is right by itself."""
    original = fused_blocks.FusedLayer.compute

    def compute(self: FusedLayer, *given: Any) -> mx.array:
        before = self.scale, self.second, self.follower
        plant(self)
        found = original(self, *given)
        self.scale, self.second, self.follower = before
        return found

    gpu.setattr(fused_blocks.FusedLayer, "compute", compute)
    report = probe_model(zoo.text("qwen3"))
    assert list_failed(report) == ["decode fused"] and report.methods.decode == "compiled"
