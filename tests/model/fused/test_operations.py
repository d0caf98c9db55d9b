"""The sources of the kernels are complete in both languages. What they compute: tests/metal."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.model.fused import operations
from mlxrun.model.fused.operations import ARRAYS, KERNELS, HeadRule, NormRule, RotaryRule, choose_operations
from mlxrun.model.kernels import kernel_source
from tests.helpers.custom_kernels import expand_files, use_maker


def test_both_languages_define_the_same_names() -> None:
    cuda, metal = (
        set(re.findall(r"#define ([A-Z_0-9]+)", text)) for text in kernel_source.LAYER_HEADERS.values()
    )
    assert cuda == metal and len(cuda) == 14


class Recorder:
    """In the place of MLX's functions that make kernels."""

    def __init__(self) -> None:
        self.made: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []

    def make(self, **given: Any) -> Any:
        self.made.append(given)
        return self.call

    def call(self, **given: Any) -> list[mx.array]:
        self.calls.append(given)
        return [mx.zeros(shape) for shape in given["output_shapes"]]


def test_a_form_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another shape, type or number is another form."""
    recorder = Recorder()
    x, heads = mx.zeros((2, 1, 64)), mx.zeros((2, 1, 256))
    norms = [NormRule(mx.full(64, weight), eps) for weight, eps in ((1, 1e-6), (2, 1e-6), (1, 1e-5))]
    rules = [HeadRule(2, 1, 64, (norm, norm), RotaryRule(64, False, 1e4, 1.0)) for norm in norms]
    with use_maker("metal", recorder.make, monkeypatch):
        for norm, rule in zip(norms, rules, strict=True):
            KERNELS.add_norm(x, x, norm)
            KERNELS.make_heads(heads, rule, mx.array([0, 1]))
            KERNELS.gate(x)
        assert operations.plan_launch.cache_info().misses == len(recorder.made) == 2 + 2 + 1
        KERNELS.gate(mx.zeros((3, 1, 64)))
        KERNELS.gate(x.astype(mx.float16))
        assert operations.plan_launch.cache_info().misses == 7 and len(recorder.made) == 5
    weights = [call["inputs"][2] for call in recorder.calls if len(call["output_shapes"]) == 2][:6:2]
    assert [weight[0].item() for weight in weights] == [1, 2, 1]
    assert [call["grid"] for call in recorder.calls[-2:]] == [(768, 1, 1), (512, 1, 1)]


@pytest.mark.parametrize("backend", ["cuda", "metal"])
def test_nothing_is_left_to_spell(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name in capitals is a macro or a constant of the kernel."""
    recorder = Recorder()
    norm, listed = NormRule(mx.ones(64), 1e-6), RotaryRule(64, False, None, 1.0, mx.ones(32))
    with use_maker(backend, recorder.make, monkeypatch):
        KERNELS.add_norm(mx.zeros((2, 1, 64)), mx.zeros((2, 1, 64)), norm)
        for rotary in (None, listed, RotaryRule(64, True, 1e4, 1.0)):
            for norms in (None, (norm, norm)):
                rule = HeadRule(2, 1, 64, norms, rotary)
                KERNELS.make_heads(mx.zeros((2, 1, 256)), rule, mx.array([0, 1]))
        KERNELS.gate(mx.zeros((2, 1, 64)))
    assert len(recorder.made) == len(recorder.calls) == 8
    for made, call in zip(recorder.made, recorder.calls, strict=True):
        kept = list[bool]()
        source = ""
        header, text = expand_files(made["header"]), expand_files(made["source"])
        macros = dict(re.findall(r"#define (\w+) (.*)", header))
        for line in text.splitlines():
            if found := re.match(r"#if (\w+)", line):
                kept.append(bool(int(macros.get(found[1], "0"))))
            elif line == "#else":
                kept[-1] = not kept[-1]
            elif line == "#endif":
                kept.pop()
            elif all(kept) and not line.startswith("#define"):
                source += line + "\n"
        constants = {name for name, _ in call["template"]}
        known = set(re.findall(r"#define (\w+)", header + text)) | constants
        assert set(re.findall(r"\b[A-Z][A-Z_0-9]{2,}\b", source)) <= known
        assert len(made["input_names"]) == len(call["inputs"])
        assert source.count("{") == source.count("}")
        threads, limit = call["threadgroup"][0], operations.MAX_THREADS[backend]
        assert threads % 32 == 0 and threads <= limit and call["grid"][0] % threads == 0


def test_a_cpu_has_no_kernels() -> None:
    assert choose_operations() is (ARRAYS if mx.default_device() == mx.cpu else KERNELS)
