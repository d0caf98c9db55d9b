"""The text of a custom Metal kernel as MLX itself makes it, and as clang++ takes it.

MLX prints the text of a kernel (`verbose`) when a call is exported, also where there is no Metal. Two forms
are made of it: `Program.runnable`, with a table of its buffers for machine.cpp, and `Program.checked`, of
which only the address spaces are verified.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from tests.metal.emulator.errors import EmulatorError

_INSTANCE = re.compile(r'template \[\[host_name\("[^"]+"\)\]\] \[\[kernel\]\] decltype\((.*)\) (.*);')
_ARGUMENT = re.compile(
    r"(?P<type>(?:const )?(?:device|constant) \w+)(?P<form>[*&]) (?P<buffer>\w+) \[\[buffer\(\d+\)\]\]"
    r"|uint3? \w+ \[\[(?P<attribute>\w+)\]\]"
)
_STRUCT = re.compile(r"(struct\b[^;{]*?\b(\w+)\s*\{)([^{}]*)\}")
_POINTER_CAST = re.compile(r"\(\s*((?:const\s+)?[A-Za-z_][\w:<>, ]*\*)\s*\)(\s*\()?")
_ARRAY_POINTER = re.compile(r"\b(?:SHARED|threadgroup)\s+(?:const\s+)?\w+\s*\*")
_DOUBLE = re.compile(r"(?<![\w.])\d+(?:\.\d*(?:[eE][-+]?\d+)?|[eE][-+]?\d+)(?![\w.])")
_ATTRIBUTES = {
    "thread_position_in_threadgroup": "position",
    "threadgroup_position_in_grid": "machine::group",
    "thread_position_in_grid": "machine::place_in_grid(position)",
    "threads_per_threadgroup": "machine::group_size",
    "threadgroups_per_grid": "machine::groups",
    "threads_per_grid": "machine::grid",
    "thread_index_in_threadgroup": "machine::thread_index()",
    "thread_index_in_simdgroup": "machine::thread_index() % machine::SIMD",
    "simdgroup_index_in_threadgroup": "machine::thread_index() / machine::SIMD",
}


@dataclass(frozen=True)
class Program:
    """`buffers`: the names of a kernel's arguments in order; those of shapes end in `_shape`, numbers of
    axes in `_ndim`."""

    runnable: str
    checked: str
    buffers: tuple[str, ...]


@contextmanager
def _capture_stdout(found: list[str]) -> Iterator[None]:
    """Collects what native code prints."""
    sys.stdout.flush()
    with tempfile.TemporaryFile() as file:
        saved = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            ctypes.CDLL(None).fflush(None)
            os.dup2(saved, 1)
            os.close(saved)
            file.seek(0)
            found.append(file.read().decode())


def write_metal(kernel: Any, call: dict[str, Any]) -> str:
    """What MLX would compile for this call of `kernel`, an object of `mx.fast.metal_kernel`."""

    def trace(*inputs: mx.array) -> Any:
        return kernel(**{**call, "inputs": list(inputs), "verbose": True})

    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder, _capture_stdout(found):
        inputs = [mx.zeros(array.shape, array.dtype) for array in call["inputs"]]
        mx.export_function(f"{folder}/traced.mlxfn", trace, *inputs)
    text = re.search(r"```\n(.*)\n```", found[0], re.S)
    if text is None:
        raise EmulatorError(f"MLX printed no kernel: {found[0][:200]!r}")
    return text[1]


def make_program(metal: str) -> Program:
    """Make what clang++ takes of `metal`; EmulatorError for what the emulator cannot represent."""
    if doubles := _DOUBLE.findall(metal):
        raise EmulatorError(f"numbers without the suffix f are double on CUDA: {', '.join(doubles)}")
    if pointer := _ARRAY_POINTER.search(metal):
        raise EmulatorError(f"pointers into threadgroup memory are not emulated: {pointer[0]}")
    name, body = _instantiate(metal)
    body = '#include "metal_stdlib.h"\n#line 1 "kernel.metal"\n' + _STRUCT.sub(
        r"\1 METAL_COPIES(\2) \3}", body
    )
    names, table = _make_table(name, body)
    return Program(body + table, _POINTER_CAST.sub(_keep_space, body), names)


def _instantiate(metal: str) -> tuple[str, str]:
    """The kernel's name with the values of its template, and a text in which C++ instantiates it."""
    if found := _INSTANCE.search(metal):
        return found[1], metal.replace(found[0], f"template decltype({found[1]}) {found[1]};")
    plain = re.search(r"\[\[kernel\]\] void (\w+)\(", metal)
    assert plain is not None, "MLX writes kernels as void functions"
    return plain[1], metal


def _keep_space(cast: re.Match[str]) -> str:
    """A cast of C's, which may change the address space, as one that may not."""
    if cast[2] is None:
        raise EmulatorError(f"write what is cast in parentheses: {cast[0]}")
    return f"reinterpret_cast<{cast[1]}>{cast[2]}"


def _make_table(name: str, text: str) -> tuple[tuple[str, ...], str]:
    """The names of the buffers, and the definitions that machine.h asks of a kernel."""
    head = text[text.index("[[kernel]] void") :]
    given: list[str] = []
    names: list[str] = []
    writes: list[str] = []
    for found in _ARGUMENT.finditer(head[: head.index(") {") + 1]):
        if found["attribute"]:
            given.append(_ATTRIBUTES[found["attribute"]])
            continue
        reference = "*" if found["form"] == "&" else ""
        given.append(f"{reference}({found['type']}*)buffers[{len(names)}]")
        names.append(found["buffer"])
        writes.append(str(int(not found["type"].startswith("const "))))
    return tuple(names), (
        f'\n#line 1 "table"\nconst unsigned kernel_buffers = {len(names)};\n'
        f"const unsigned char kernel_writes[] = {{{', '.join(writes)}}};\n"
        "void kernel_thread(unsigned char** buffers, machine::Place position) {\n"
        f"  {name}({', '.join(given)});\n}}\n"
    )
