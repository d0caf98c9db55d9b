"""Compiles CUDA kernels with NVIDIA's NVRTC, which needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxrun.model.kernels.kept_kernels import compile_text, write_text


@dataclass(frozen=True)
class Compiled:
    """`registers`: of a thread; `spilled`: bytes that it keeps in memory because there are too few."""

    registers: int
    spilled: int


def measure_text(text: str, architecture: str) -> Compiled:
    """Compile for an architecture, such as `sm_90a`. CompileError if NVRTC refuses the text."""
    _, report = compile_text(text, architecture, ["--ptxas-options=-v"])
    registers = re.search(r"Used (\d+) registers", report)
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill", report)]
    assert registers is not None, report
    return Compiled(int(registers[1]), max(spills, default=0))


class Recorder:
    """In the place of `mx.fast.cuda_kernel`. `texts`: what is compiled, by the kernels' names."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}

    def make(self, **given: Any) -> Any:
        def call(**called: Any) -> Sequence[mx.array]:
            self.texts.setdefault(given["name"], []).append(write_text(given, called))
            shapes = zip(called["output_shapes"], called["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in shapes]

        return call
