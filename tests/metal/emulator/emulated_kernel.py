"""Stands in for `mx.fast.metal_kernel` where there is no Metal: kernels run on an emulated GPU, on a CPU.

What one of Apple's GPUs may refuse is an EmulatorError: more threadgroup memory or threads than all have.
"""

from __future__ import annotations

import math
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from tests.helpers.command_processes import PATIENCE
from tests.metal.emulator.compiler import check_spaces, compile_program
from tests.metal.emulator.errors import EmulatorError
from tests.metal.emulator.kernel_text import Program, make_program, write_metal

MAX_MEMORY = 32 << 10  # bytes of threadgroup memory
# Of a threadgroup. A pipeline has up to 1024, fewer where registers are many: 896 were seen on an M2 Ultra.
MAX_THREADS = 512

Order = Literal["forward", "backward", "random"]
ORDERS: tuple[Order, ...] = ("forward", "backward", "random")


@dataclass(frozen=True)
class Launch:
    """One call of a kernel. `memory`: bytes of threadgroup memory; the counts are of all threads."""

    name: str
    memory: int
    threads: int
    exchanges: int
    barriers: int


@dataclass
class Emulator:
    """`order`: in which a threadgroup's threads take turns. `guard`: whether buffers end where memory faults,
    or begin there."""

    order: Order = "forward"
    guard: Literal["begin", "end"] = "end"
    max_threads: int = MAX_THREADS
    launches: list[Launch] = field(default_factory=list)
    real: Any = mx.fast.metal_kernel

    def make_kernel(self, **given: Any) -> EmulatedKernel:
        """In the place of `mx.fast.metal_kernel`."""
        return EmulatedKernel(self, given)


class EmulatedKernel:
    """A kernel of `emulator`, called as MLX's are; computes at once."""

    def __init__(self, emulator: Emulator, given: dict[str, Any]) -> None:
        self._emulator = emulator
        self._given = given
        self._kernel = emulator.real(**given)
        self._programs: dict[str, tuple[Path, Program]] = {}

    def __call__(self, **call: Any) -> list[mx.array]:
        name, threads = self._given["name"], math.prod(call["threadgroup"])
        if threads > self._emulator.max_threads:
            raise EmulatorError(f"{name}: {threads} threads in a threadgroup")
        mx.eval(call["inputs"])
        path, program = self._compile(call)
        with tempfile.TemporaryDirectory() as folder:
            self._write_buffers(Path(folder), program, call)
            memory, exchanges, barriers = self._run(path, folder, (*call["grid"], *call["threadgroup"]))
            if memory > MAX_MEMORY:
                raise EmulatorError(f"{name}: {memory} bytes of threadgroup memory")
            self._emulator.launches.append(Launch(name, memory, threads, exchanges, barriers))
            return self._read_outputs(Path(folder), program, call)

    def _compile(self, call: dict[str, Any]) -> tuple[Path, Program]:
        arrays = [(array.shape, array.dtype) for array in call["inputs"]]
        key = repr((call.get("template"), arrays, call["output_dtypes"]))
        if key not in self._programs:
            program = make_program(write_metal(self._kernel, call))
            check_spaces(program.checked)
            self._programs[key] = compile_program(program.runnable), program
        return self._programs[key]

    def _run(self, path: Path, folder: str, sizes: tuple[int, ...]) -> tuple[int, int, int]:
        options = (ORDERS.index(self._emulator.order), int(self._emulator.guard == "end"), *sizes)
        run = subprocess.run(
            [path, folder, *map(str, options)], capture_output=True, text=True, timeout=PATIENCE
        )
        if run.returncode:
            raise EmulatorError(f"{self._given['name']}: {run.stderr.strip() or f'exit {run.returncode}'}")
        memory, exchanges, barriers = map(int, run.stdout.split())
        return memory, exchanges, barriers

    def _write_buffers(self, folder: Path, program: Program, call: dict[str, Any]) -> None:
        inputs = dict(zip(self._given["input_names"], call["inputs"], strict=True))
        for number, name in enumerate(program.buffers):
            if name in inputs:
                data = _to_bytes(inputs[name])
            elif name in self._given["output_names"]:
                at = self._given["output_names"].index(name)
                data = bytes(math.prod(call["output_shapes"][at]) * call["output_dtypes"][at].size)
            elif name.endswith("_ndim"):
                data = np.int32(inputs[name.removesuffix("_ndim")].ndim).tobytes()
            else:
                data = np.array(inputs[name.removesuffix("_shape")].shape, np.int32).tobytes()
            (folder / str(number)).write_bytes(data)

    def _read_outputs(self, folder: Path, program: Program, call: dict[str, Any]) -> list[mx.array]:
        names = self._given["output_names"]
        files = [folder / str(program.buffers.index(name)) for name in names]
        shapes, dtypes = call["output_shapes"], call["output_dtypes"]
        return [_from_bytes(*of) for of in zip((f.read_bytes() for f in files), shapes, dtypes, strict=True)]


def _to_bytes(array: mx.array) -> bytes:
    return bytes(np.array(mx.contiguous(array).reshape(-1).view(mx.uint8)))


def _from_bytes(data: bytes, shape: Any, dtype: mx.Dtype) -> mx.array:
    return mx.array(np.frombuffer(data, np.uint8)).view(dtype).reshape(shape)
