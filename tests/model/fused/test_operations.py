"""The sources of the kernels are complete in both languages. What they compute: tests/metal."""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.model.fused import operations
from mlxrun.model.fused.operations import ARRAYS, KERNELS, HeadRule, NormRule, RotaryRule, choose_operations
from mlxrun.model.kernels import kernel_source
from tests.helpers.custom_kernels import expand_files


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


@pytest.mark.parametrize("backend", ["cuda", "metal"])
def test_nothing_is_left_to_spell(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name in capitals is a macro or a constant of the kernel."""
    recorder = Recorder()
    monkeypatch.setattr(mx.fast, f"{backend}_kernel", recorder.make)
    monkeypatch.setattr(operations, "get_backend", lambda: backend)
    operations.compile_kernel.cache_clear()
    norm, listed = NormRule(mx.ones(64), 1e-6), RotaryRule(64, False, None, 1.0, mx.ones(32))
    KERNELS.add_norm(mx.zeros((2, 1, 64)), mx.zeros((2, 1, 64)), norm)
    for rotary in (None, listed, RotaryRule(64, True, 1e4, 1.0)):
        for norms in (None, (norm, norm)):
            rule = HeadRule(2, 1, 64, norms, rotary)
            KERNELS.make_heads(mx.zeros((2, 1, 256)), rule, mx.array([0, 1]))
    KERNELS.gate(mx.zeros((2, 1, 64)))
    operations.compile_kernel.cache_clear()
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
