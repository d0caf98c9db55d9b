"""Kernels are compiled for CUDA, and lie where MLX looks. That MLX finds them is seen on a GPU only."""

from __future__ import annotations

import logging
import resource
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.model.kernels import kept_kernels
from mlxrun.model.kernels.kept_kernels import (
    VERSIONS,
    CompileError,
    KeptKernel,
    compile_text,
    find_architecture,
    find_folder,
    find_nvrtc,
    hash_text,
    name_kernel,
    write_text,
)

GIVEN = {
    "name": "doubled",
    "input_names": ["x", "scale"],
    "output_names": ["y", "z"],
    "source": "  y[threadIdx.x] = T(N * float(x[threadIdx.x]) * x_shape[0] * scale[0]);\n// x_shape x_ndim\n",
    "header": "#include <cuda_bf16.h>\n// 0123\n",
}
CALL: dict[str, Any] = {
    "inputs": [mx.zeros((2, 3), mx.bfloat16), mx.array(1)],
    "template": [("T", mx.bfloat16), ("N", 2)],
    "output_dtypes": [mx.bfloat16, mx.float32],
}
# As MLX's custom_kernel.cpp writes it.
TEXT = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

#include <cuda_bf16.h>
// 0123
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_doubled_bfloat16_t_2(
    const __nv_bfloat16* x,
    const __grid_constant__ Shape x_shape,
    const __grid_constant__ int x_ndim,
    const int32_t* scale,
    __nv_bfloat16* y,
    float* z) {
  using T = __nv_bfloat16;
  constexpr int N = 2;

  y[threadIdx.x] = T(N * float(x[threadIdx.x]) * x_shape[0] * scale[0]);
// x_shape x_ndim

}

} // namespace mlx::core::cu
"""
# std::hash<std::string> of libstdc++, computed by a program in C++.
HASHES = {
    "": 0x553E93901E462A6E,
    "a": 0x454DDEE488C1ED6B,
    "abcdefgh": 0x783DB3E38DB898BB,
    "__global__ void kernel(\n": 0x5A508A1A04227CB,
    "x" * 1000: 0x787C888415FE47CE,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if find_nvrtc() is None:
        pytest.skip("CUDA kernels are compiled where the packages nvidia-cuda-* are: Linux on x86-64")
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(kept_kernels, "find_architecture", lambda: "sm_90a")
    monkeypatch.setattr(mx, "__version__", VERSIONS[0])
    return tmp_path / "kept"


def call_kernel(given: dict[str, Any] = GIVEN, call: dict[str, Any] = CALL) -> list[Any]:
    called: list[Any] = []
    KeptKernel(lambda **own: called.append(own) or [], given)(**call)
    assert called == [call], "MLX gets the call as it is"
    return called


def test_texts_are_those_of_mlx() -> None:
    assert write_text(GIVEN, CALL, for_mlx=True) == TEXT
    assert name_kernel(GIVEN, CALL) == "custom_kernel_doubled_bfloat16_t_2"
    assert {text: hash_text(text) for text in HASHES} == HASHES


def test_a_kernel_lies_where_mlx_looks(folder: Path) -> None:
    call_kernel()
    name = f"custom_kernel_doubled_bfloat16_t_2_{hash_text(TEXT):x}"
    assert {path.name for path in folder.iterdir()} == {f"{name}.ptx", f"{name}.txt"}
    code = (folder / f"{name}.ptx").read_bytes()
    assert code.startswith(b"\x7fELF"), "machine code"
    names = "mlx::core::cu::custom_kernel_doubled_bfloat16_t_2\tcustom_kernel_doubled_bfloat16_t_2\n"
    assert (folder / f"{name}.txt").read_text() == names and b"custom_kernel_doubled_bfloat16_t_2" in code


def test_each_form_is_compiled_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(
        kept_kernels, "compile_text", lambda *args: compiled.append(args[0]) or compile_text(*args)
    )
    kernel = KeptKernel(lambda **own: [], GIVEN)
    other = CALL | {"template": [("T", mx.bfloat16), ("N", 3)]}
    scaled = CALL | {"inputs": [CALL["inputs"][0], mx.array(1.5)]}
    for call in (CALL, other, scaled) * 2:
        kernel(**call)
    assert len(compiled) == 3
    call_kernel()
    assert len(compiled) == 3, "another process finds it"


@pytest.mark.parametrize("kept", [0, 30, 60, 0.5, -1])
@pytest.mark.parametrize("suffix", [".ptx", ".txt"])
def test_files_that_were_cut_short_are_written_again(folder: Path, suffix: str, kept: float) -> None:
    """MLX fails with them, now and at each start. The first bytes, half of them, or all but one are left."""
    call_kernel()
    whole = {path: path.read_bytes() for path in folder.iterdir()}
    (cut,) = folder.glob(f"*{suffix}")
    cut.write_bytes(whole[cut][: int(kept * len(whole[cut])) if 0 < kept < 1 else int(kept)])
    call_kernel()
    assert {path: path.read_bytes() for path in folder.iterdir()} == whole
    cut.unlink()
    call_kernel()
    assert {path: path.read_bytes() for path in folder.iterdir()} == whole


def test_a_full_disk_leaves_nothing_behind(folder: Path) -> None:
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, usual[1]))
    try:
        call_kernel()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert [path.suffix for path in folder.iterdir()] == [".txt"], "which MLX does not read by itself"


@pytest.mark.parametrize("problem", ["version", "device", "folder", "text", "type", "name"])
def test_mlx_compiles_by_itself_else(
    problem: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given, call = dict(GIVEN), dict(CALL)
    match problem:
        case "version":
            monkeypatch.setattr(mx, "__version__", "0.99.0")
        case "device":
            monkeypatch.setattr(kept_kernels, "find_architecture", find_architecture)
        case "folder":
            folder.write_text("a file")
        case "text":
            given["source"] = "no code\n"
        case "type":
            call["output_dtypes"] = [mx.bfloat16, mx.complex64]
        case "name":
            given["name"] = "n" * 300
    with caplog.at_level(logging.DEBUG, logger=kept_kernels.__name__):
        call_kernel(given, call)
    assert not folder.is_dir()
    assert ("by itself" in caplog.text) == (problem in ("folder", "text", "type"))


def test_without_a_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_kernels, "find_nvrtc", lambda: None)
    with pytest.raises(CompileError, match="NVRTC is not installed"):
        compile_text("", "sm_80")


def test_the_folder_is_that_of_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/somewhere")
    assert find_folder() == Path("/somewhere/mlx", mx.__version__, "ptx")
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "/kept")
    assert find_folder() == Path("/kept")
