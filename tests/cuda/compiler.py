"""Compiles CUDA kernels as MLX does, with NVIDIA's NVRTC, which needs no GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx

TYPES = {
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.float32: "float",
    mx.int32: "int32_t",
    mx.uint32: "uint32_t",
}
# MLX's header has more; kernels of this package use these.
HEAD = """
struct Shape { int numbers[10]; __device__ int operator[](int i) const { return numbers[i]; } };
using int32_t = int;
using uint32_t = unsigned;
"""


class CompileError(Exception):
    """What NVRTC says of a text."""


@dataclass(frozen=True)
class Compiled:
    """`registers`: of a thread; `spilled`: bytes that it keeps in memory because there are too few."""

    registers: int
    spilled: int


@lru_cache(maxsize=1)
def find_nvrtc() -> tuple[Any, Path] | None:
    """The library and the folder of CUDA's headers, from the packages of pyproject.toml; None: not here."""
    spec = importlib.util.find_spec("nvidia.cu13") if importlib.util.find_spec("nvidia") else None
    for folder in map(Path, spec.submodule_search_locations or () if spec else ()):
        for library in sorted((folder / "lib").glob("libnvrtc.so.*")):
            return ctypes.CDLL(str(library)), folder / "include"
    return None


def compile_text(text: str, architecture: str) -> Compiled:
    """Compile for an architecture, such as `sm_90a`. CompileError if NVRTC refuses the text."""
    found = find_nvrtc()
    assert found is not None
    nvrtc, include = found
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    options = [f"--gpu-architecture={architecture}", "--ptxas-options=-v"]
    options += [f"--include-path={folder}" for folder in (include, include / "cccl")]
    given = (ctypes.c_char_p * len(options))(*map(str.encode, options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    said = log.value.decode()
    if failed:
        raise CompileError(said)
    registers = re.search(r"Used (\d+) registers", said)
    spills = [int(number) for number in re.findall(r"(\d+) bytes spill", said)]
    assert registers is not None, said
    return Compiled(int(registers[1]), max(spills, default=0))


def write_text(given: Mapping[str, Any], call: Mapping[str, Any]) -> str:
    """What MLX compiles for a `call` of a kernel that was made with `given`, as in its custom_kernel.cpp. An
    input's shape is an argument if the source names it."""
    source, arguments = given["source"], list[str]()
    for name, array in zip(given["input_names"], call["inputs"], strict=True):
        arguments.append(f"const {TYPES[array.dtype]}* {name}")
        for form, kind in (("shape", "Shape"), ("ndim", "int")):
            if f"{name}_{form}" in source and array.ndim:
                arguments.append(f"const __grid_constant__ {kind} {name}_{form}")
    outputs = zip(given["output_names"], call["output_dtypes"], strict=True)
    arguments += [f"{TYPES[dtype]}* {name}" for name, dtype in outputs]
    constants = "".join(_write_constant(*constant) for constant in call["template"])
    head = f'{HEAD}{given["header"]}\nextern "C" __global__ void kernel({", ".join(arguments)}) {{\n'
    return f"{head}{constants}{source}\n}}\n"


def _write_constant(name: str, value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {TYPES[value]};\n"
    return f"constexpr int {name} = {value};\n"


class Recorder:
    """In the place of `mx.fast.cuda_kernel`. `texts`: what MLX would compile, by the kernels' names."""

    def __init__(self) -> None:
        self.texts: dict[str, list[str]] = {}

    def make(self, **given: Any) -> Any:
        def call(**called: Any) -> Sequence[mx.array]:
            self.texts.setdefault(given["name"], []).append(write_text(given, called))
            shapes = zip(called["output_shapes"], called["output_dtypes"], strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in shapes]

        return call
