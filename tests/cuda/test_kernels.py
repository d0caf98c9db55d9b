"""Every kernel compiles for CUDA, in the shapes and types that models have, and has enough registers. What
kernels compute: tests/metal, from the same texts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.model.fused.operations import KERNELS, NormRule
from mlxrun.model.hooks import skinny_gemm
from mlxrun.model.hooks.skinny_gemm import multiply_few_rows
from mlxrun.model.kernels import kernel_source
from mlxrun.model.kernels.kept_kernels import RESIDENT_BLOCKS, CompileError, find_nvrtc
from tests.cuda.compiler import Recorder, measure_text
from tests.helpers.custom_kernels import use_maker
from tests.metal.attention_cases import Case, make_attention
from tests.metal.layer_cases import HEADS

TYPES = {mx.float16: "sm_80", mx.bfloat16: "sm_90a", mx.float32: "sm_90a"}  # for an A100, and an H200
FEW_SPILLED = 32  # bytes
CASES = [
    Case(16, 8, 128, 128, mx.bfloat16, joined=True),
    Case(32, 8, 128, 128, mx.float16, window=200, sinks=True),
    Case(9, 3, 64, 64, mx.float32, cap=20.0),
    Case(8, 4, 256, 256, mx.bfloat16, cap=50.0, window=200),
    Case(16, 1, 512, 512, mx.bfloat16, turn_dim=64),
]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    if find_nvrtc() is None:
        pytest.skip("CUDA kernels are compiled where the packages nvidia-cuda-* are: Linux on x86-64")
    recorder = Recorder()
    with use_maker("cuda", recorder.make, monkeypatch):
        yield recorder


def find_spills(recorder: Recorder, architecture: str) -> list[str]:
    """The kernels that keep numbers in memory for want of registers. CompileError if one does not compile. If
    several blocks share a processor, each has fewer registers, and may lack a few."""
    texts = [(name, text) for name, made in recorder.texts.items() for text in dict.fromkeys(made)]
    assert texts
    return [
        f"{name}: {compiled}"
        for name, text in texts
        if (compiled := measure_text(text, architecture)).spilled > (RESIDENT_BLOCKS in text) * FEW_SPILLED
    ]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case: Case, recorder: Recorder) -> None:
    make_attention(case, (1, 300)).compute()
    assert len(recorder.texts) == 2 and find_spills(recorder, TYPES[case.dtype]) == []


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_layers(dtype: mx.Dtype, recorder: Recorder) -> None:
    x = mx.zeros((2, 1, 1024), dtype)
    KERNELS.add_norm(x, x, NormRule(mx.ones(1024, dtype), 1e-6))
    KERNELS.gate(x)
    for name in ("normed", "a traditional part", "listed frequencies", "nothing"):
        rule = HEADS[name].make_rule(dtype)
        width = (rule.heads + 2 * rule.kv_heads) * rule.size
        KERNELS.make_heads(mx.zeros((2, 1, width), dtype), rule, mx.array([0, 1]))
    assert len(recorder.texts) == 6 and find_spills(recorder, TYPES[dtype]) == []


class QuantizedWeights(dict[str, mx.array]):
    """A quantized layer, as far as the kernel reads it."""

    def __init__(self, bits: int) -> None:
        self.bits, self.group_size = bits, 64


def make_weights(bits: int, outputs: int, dtype: mx.Dtype) -> Any:
    """A weight of 1,024 inputs; 16 bits: a plain one."""
    if bits == 16:
        return {"weight": mx.zeros((outputs, 1024), dtype)}
    layer: Any = QuantizedWeights(bits)
    layer["weight"] = mx.zeros((outputs, 1024 * bits // 32), mx.uint32)
    layer["scales"] = layer["biases"] = mx.zeros((outputs, 16), dtype)
    return layer


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_products(bits: int, dtype: mx.Dtype, recorder: Recorder) -> None:
    """With few outputs and with many, and with what follows a product."""
    for rows in skinny_gemm.KERNELS:
        x = mx.zeros((rows, 1, 1024), dtype)
        for outputs in (1024, 65536):
            multiply_few_rows(make_weights(bits, outputs, dtype), x)
        multiply_few_rows(make_weights(bits, 6144, dtype), x, gated=True)
        multiply_few_rows(make_weights(bits, 1024, dtype), x, added=mx.zeros((rows, 1, 1024), dtype))
    assert find_spills(recorder, TYPES[dtype]) == []


def test_a_kernel_that_does_not_compile_is_found(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_source, "ADD_NORM", kernel_source.ADD_NORM.replace("RSQRT", "SQRT_OF", 1))
    x = mx.zeros((2, 1, 64))
    KERNELS.add_norm(x, x, NormRule(mx.ones(64), 1e-6))
    with pytest.raises(CompileError, match="SQRT_OF"):
        find_spills(recorder, "sm_80")
