"""The emulated GPU by small kernels: what it computes, what it refuses, and what it keeps."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from tests.metal.emulator import compiler
from tests.metal.emulator.emulated_kernel import MAX_MEMORY, Emulator
from tests.metal.emulator.errors import EmulatorError

THREAD = "const uint t = thread_position_in_threadgroup.x;\n"
AT = "const uint i = thread_position_in_grid.x;\n"


def run(emulator: Emulator, source: str, array: mx.array, threads: int, size: int = 64) -> mx.array:
    """`source`, a kernel of `in_` and `out`, which has as many numbers as the grid has threads."""
    kernel = emulator.make_kernel(name="small", input_names=["in_"], output_names=["out"], source=source)
    call: dict[str, Any] = {
        "inputs": [array],
        "template": [("T", array.dtype)],
        "grid": (size, 1, 1),
        "threadgroup": (threads, 1, 1),
        "output_shapes": [(size,)],
        "output_dtypes": [array.dtype],
    }
    return kernel(**call)[0]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_threads_of_a_threadgroup_exchange_numbers(dtype: mx.Dtype, emulator: Emulator) -> None:
    source = AT + "out[i] = T(simd_shuffle_xor(float(in_[i]), 5) + float(in_shape[0]));"
    array = mx.arange(64).astype(dtype)
    expected = mx.array([(i ^ 5) + 64 for i in range(64)]).astype(dtype)
    assert mx.array_equal(run(emulator, source.replace("in_shape", "in__shape"), array, 32), expected).item()


def test_a_barrier_separates_writes_from_reads(emulator: Emulator) -> None:
    source = (
        AT
        + THREAD
        + "threadgroup float all[32]; all[t] = in_[i];\n"
        + "threadgroup_barrier(mem_flags::mem_threadgroup); out[i] = all[31 - t];"
    )
    array = mx.arange(64).astype(mx.float32)
    expected = array.reshape(2, 32)[:, ::-1].reshape(-1)
    assert mx.array_equal(run(emulator, source, array, 32), expected).item()
    unordered = source.replace("threadgroup_barrier(mem_flags::mem_threadgroup);", "")
    assert not mx.array_equal(run(emulator, unordered, array, 32), expected).item()


def test_the_last_threadgroup_may_be_smaller(emulator: Emulator) -> None:
    source = AT + "out[i] = float(threads_per_threadgroup.x);"
    found = run(emulator, source, mx.zeros(8), 32, size=40)
    assert found.tolist() == [32.0] * 32 + [8.0] * 8


def test_numbers_round_as_mlx_rounds(emulator: Emulator) -> None:
    array = mx.random.normal((512,), key=mx.random.key(2))
    for dtype in (mx.float16, mx.bfloat16):
        narrow = array.astype(dtype)
        found = run(emulator, AT + "out[i] = T(float(in_[i]) * 1.0009765625f);", narrow, 64, size=512)
        exact = (narrow.astype(mx.float32) * 1.0009765625).astype(dtype)
        assert mx.array_equal(found, exact).item()


def test_arithmetic_of_two_halves_rounds(emulator: Emulator) -> None:
    array = mx.full((8,), 0.1, mx.float16)
    found = run(emulator, AT + "out[i] = in_[i] * in_[i] + in_[i];", array, 8, size=8)
    assert mx.array_equal(found, array * array + array).item()


REFUSED = {
    "a thread waits for none": (
        THREAD + "if (t < 40) threadgroup_barrier(mem_flags::mem_threadgroup); out[t] = 0.0f;",
        "has returned",
    ),
    "two barriers": (  # so different around them that no compiler makes one of both
        THREAD
        + "threadgroup float all[64];\n"
        + "if (t < 32) { all[t] = 1.0f; threadgroup_barrier(mem_flags::mem_none); }\n"
        + "else { threadgroup_barrier(mem_flags::mem_none); all[t] = in_[t]; } out[t] = all[t];",
        "different barriers",
    ),
    "an exchange with who is gone": (
        THREAD + "if (t % 32 > 15) return;\nout[t] = simd_shuffle_xor(1.0f, 16);",
        "different places|has returned",
    ),
    "a write past the end": (AT + "out[i + 64] = 0.0f;", "outside of a buffer"),
    "a write before the start": (AT + "out[-4096 + int(i)] = 0.0f;", "outside of a buffer"),
    "a write to an input": (AT + "((device float*)(in_))[i] = 0.0f; out[i] = 0.0f;", "reinterpret_cast"),
    "an index of no element": (THREAD + "float own[4]; own[t] = 0.0f; out[t] = own[t / 2];", "undefined"),
    "too much memory": (
        THREAD + f"threadgroup float all[{MAX_MEMORY // 4 + 1}]; all[t] = 1.0f; out[t] = all[t];",
        "bytes of threadgroup memory",
    ),
    "a pointer into threadgroup memory": ("threadgroup float* own = nullptr; out[0] = *own;", "not emulated"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_kernel_may_not_do_is_said(name: str, emulator: Emulator) -> None:
    source, message = REFUSED[name]
    with pytest.raises(EmulatorError, match=message):
        run(emulator, source, mx.zeros(64), 64)


def test_more_threads_than_every_chip_has_are_refused(emulator: Emulator) -> None:
    with pytest.raises(EmulatorError, match="1024 threads"):
        run(emulator, AT + "out[i] = 0.0f;", mx.zeros(8), 1024, size=2048)


def test_a_program_is_compiled_once(
    emulator: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTS_CACHE_HOME", str(tmp_path))
    compiler._compile_machine.cache_clear()
    good, bad = AT + "out[i] = 1.0f;", AT + "out[i] = nothing;"
    run(emulator, good, mx.zeros(8), 64)
    with pytest.raises(EmulatorError, match="nothing"):
        run(emulator, bad, mx.zeros(8), 64)
    monkeypatch.setattr(subprocess, "run", refuse_compiler(subprocess.run))
    assert run(emulator, good, mx.zeros(8), 64).tolist() == [1.0] * 64
    with pytest.raises(EmulatorError, match="nothing"):
        run(emulator, bad, mx.zeros(8), 64)
    with pytest.raises(AssertionError, match="compiled again"):
        run(emulator, AT + "out[i] = 2.0f;", mx.zeros(8), 64)
    compiler._compile_machine.cache_clear()


def refuse_compiler(real: Any) -> Any:
    def run_others(command: Any, **options: Any) -> Any:
        assert "clang++" not in str(command[0]), "compiled again"
        return real(command, **options)

    return run_others
