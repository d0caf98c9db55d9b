"""SiLU on a CPU is the library's, but for rounding; a number has the same bits in any company."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import llama

from benchmarks.tiny.text_configs import make_text_config
from mlxrun.model.fused import quick_gates
from mlxrun.model.fused.quick_gates import hook_gates, multiply_gate

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="for CPUs")
TOKENS = mx.array([[1, 5, 9, 2, 7]])


def make_model(family: str = "llama") -> Any:
    module = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(3)
    return module.Model(module.ModelArgs.from_dict(dict(make_text_config(family))))


@pytest.mark.parametrize("least", [1, 1 << 60], ids=["numpy", "graph"])
def test_it_is_silu_within_rounding(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_gates, "NUMPY_NUMBERS", least)
    gate = np.concatenate([np.linspace(-86, 86, 9001), [0.0, -0.0, 1e-30, -1e-30, 1e30]]).astype(np.float32)
    up = np.linspace(-3, 3, len(gate)).astype(np.float32)
    exact = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64))) * up
    found = np.array(multiply_gate(mx.array(gate)[None], mx.array(up)[None])[0], np.float64)
    assert np.abs(found - exact).max(where=exact == 0, initial=0) == 0
    assert (np.abs(found - exact) / np.maximum(np.abs(exact), 1e-300)).max() < 1e-6


@pytest.mark.parametrize("least", [1, 1 << 60], ids=["numpy", "graph"])
def test_it_is_small_far_below_zero_and_keeps_nan(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_gates, "NUMPY_NUMBERS", least)
    gate = mx.array([[-88.0, -1e3, -1e9, float("nan"), float("inf")]])
    found = multiply_gate(gate, mx.ones((1, 5)))[0].tolist()
    assert max(map(abs, found[:3])) < 1e-25 and np.isnan(found[3]) and found[4] == float("inf")


@pytest.mark.parametrize("tokens", [1, quick_gates.NUMPY_NUMBERS // 19 + 1], ids=["graph", "numpy"])
def test_a_row_has_the_same_bits_in_any_company(tokens: int) -> None:
    gate, up = (mx.random.normal((3, tokens, 19), key=mx.random.key(seed)) * 4 for seed in (0, 1))
    alone = [np.array(multiply_gate(gate[row : row + 1] + 0, up[row : row + 1]))[0] for row in range(3)]
    assert np.array_equal(np.array(multiply_gate(gate, up)), alone)


def test_arrays_whose_numbers_lie_apart_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quick_gates, "NUMPY_NUMBERS", 1)
    whole = mx.random.normal((6, 8))
    gate, copied = whole[:, ::2], np.array(whole)
    found = multiply_gate(gate, mx.ones_like(gate))
    assert mx.allclose(found, nn.silu(gate), atol=1e-6).item() and np.array_equal(np.array(whole), copied)


@pytest.mark.parametrize(
    ("family", "is_covered"), [("llama", True), ("qwen3", True), ("mixtral", False), ("gemma", False)]
)
def test_a_model_with_the_hook_answers_as_without(family: str, is_covered: bool) -> None:
    model = make_model(family)
    library = model(TOKENS)
    mx.eval(library)
    assert hook_gates(model) == len(model.layers) * is_covered
    found = model(TOKENS)
    assert mx.allclose(found, library, rtol=1e-4, atol=1e-5).item()
    assert hook_gates(model) == 0, "twice"
    assert mx.array_equal(model(TOKENS), found).item()


def test_other_types_are_computed_by_the_library() -> None:
    model = make_model()
    model.set_dtype(mx.float16)
    library = model(TOKENS)
    mx.eval(library)
    assert hook_gates(model) and mx.array_equal(model(TOKENS), library).item()


class SwappedMLP(llama.MLP):
    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(self.gate_proj(x) * nn.silu(self.up_proj(x)))  # type: ignore[no-any-return]


def test_another_mlp_is_left_alone() -> None:
    model = make_model()
    for layer in model.layers:
        layer.mlp.__class__ = SwappedMLP
    assert hook_gates(model) == 0


def test_a_machine_that_computes_it_otherwise_gets_the_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(quick_gates, "multiply_gate", lambda gate, up: nn.silu(gate) * up * 1.001)
    assert hook_gates(make_model()) == 0
    assert "differs on this machine" in caplog.text
