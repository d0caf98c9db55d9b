"""Compiles custom kernels for CUDA and leaves them where MLX looks for compiled ones.

MLX compiles a custom kernel anew in each process, behind headers of its own. That takes 1.6 s each on an
H200's host, and the kernel's own text takes 0.1 of it. MLX looks into its folder of compiled kernels first,
but keeps no custom ones there. So they are compiled here without these headers, and written under the names
that MLX looks for.

This holds for the versions of MLX in VERSIONS. MLX compiles by itself with any other one, or if anything
fails here. Sources: custom_kernel.cpp and jit_module.cpp of MLX's CUDA backend.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxrun.core.processes import list_mapped_files

log = logging.getLogger(__name__)

VERSIONS = ("0.32.4",)  # of MLX
LONGEST_NAME = 245  # characters: MLX cuts longer names into folders
_MLX_HEAD = '\n#include "mlx/backend/cuda/device/utils.cuh"\n\n#include <cooperative_groups.h>\n\n'
# What kernels use of these headers. MAX_NDIM is 10.
_HEAD = """
struct Shape { int numbers[10]; __device__ int operator[](int i) const { return numbers[i]; } };
using int32_t = int;
using uint32_t = unsigned;
"""
RESIDENT_BLOCKS = "RESIDENT_BLOCKS"  # a macro of a header: blocks that a processor has registers for
# How MLX names a type in code, and in the name of a kernel.
_TYPES = {
    mx.float32: ("float", "float"),
    mx.float16: ("__half", "float16_t"),
    mx.bfloat16: ("__nv_bfloat16", "bfloat16_t"),
    mx.int32: ("int32_t", "int32_t"),
    mx.uint32: ("uint32_t", "uint32_t"),
}


class CompileError(Exception):
    """What NVRTC says of a text."""


class KeptKernel:
    """A kernel of `mx.fast.cuda_kernel` that was made with `given`. Before its first call in a form, MLX's
    folder gets what is compiled for that form."""

    def __init__(self, kernel: Any, given: Mapping[str, Any]) -> None:
        self._kernel, self._given = kernel, given
        self._forms: set[tuple[Any, ...]] = set()

    def __call__(self, **call: Any) -> list[mx.array]:
        form = (*call["template"], *[array.dtype for array in call["inputs"]])
        if form not in self._forms:
            self._forms.add(form)
            keep_compiled(self._given, call)
        results: list[mx.array] = self._kernel(**call)
        return results


def keep_compiled(given: Mapping[str, Any], call: Mapping[str, Any]) -> None:
    """Make sure that MLX finds a kernel in its folder. Logs what prevents it."""
    architecture = find_architecture()
    if not architecture or mx.__version__ not in VERSIONS:
        return
    try:
        name, text = name_kernel(given, call), write_text(given, call)
        file = find_folder() / f"{name}_{hash_text(write_text(given, call, for_mlx=True)):x}.ptx"
        names = f"mlx::core::cu::{name}\t{name}\n".encode()
        if len(file.stem) > LONGEST_NAME or _is_whole(file, names):
            return
        compiled, _ = compile_text(text, architecture)
        file.parent.mkdir(parents=True, exist_ok=True)
        # MLX reads the second one first, and only if that is here the other.
        _write(file.with_suffix(".txt"), names)
        _write(file, compiled)
    except Exception as error:  # whatever it is, MLX needs none of this
        log.debug("MLX compiles %s by itself: %s", given["name"], error)


def _is_whole(file: Path, names: bytes) -> bool:
    """Whether a compiled kernel and the file of its `names` are here. MLX would fail with what a power cut
    has left of them."""
    try:
        code = file.read_bytes()
        starts, sizes = struct.unpack_from("<QQ", code, 0x20), struct.unpack_from("<HHHH", code, 0x36)
        known = file.with_suffix(".txt").read_bytes()
    except (FileNotFoundError, struct.error):
        return False
    # An ELF file ends with one of the two tables that its header describes.
    ends = (start + size * count for start, size, count in zip(starts, sizes[::2], sizes[1::2], strict=True))
    return known == names and len(code) >= max(ends) > 0


def _write(path: Path, content: bytes) -> None:
    """Write a file that other processes see whole or not at all."""
    handle, part = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(part, path)
    except OSError:  # such as a full disk
        with suppress(OSError):
            os.unlink(part)
        raise


def find_folder() -> Path:
    """Where MLX looks for compiled kernels."""
    given = os.environ.get("MLX_PTX_CACHE_DIR")
    names = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # as std::filesystem::temp_directory_path
    base = next((os.environ[name] for name in names if os.environ.get(name)), "/tmp")
    return Path(given) if given else Path(base, "mlx", mx.__version__, "ptx")


def find_architecture() -> str:
    """What kernels are compiled for, such as `sm_90a`; empty without an NVIDIA GPU."""
    if mx.default_device() != mx.gpu or mx.metal.is_available():
        return ""
    info = mx.device_info(mx.default_device())
    major, minor = info["compute_capability_major"], info["compute_capability_minor"]
    return f"sm_{major}{minor}{'a' if int(major) >= 9 else ''}"


def name_kernel(given: Mapping[str, Any], call: Mapping[str, Any]) -> str:
    """The name that MLX gives a kernel of this `call`."""
    values = (_TYPES[value][1] if isinstance(value, mx.Dtype) else value for _, value in call["template"])
    return "".join([f"custom_kernel_{given['name']}", *(f"_{value}" for value in values)])


def write_text(given: Mapping[str, Any], call: Mapping[str, Any], for_mlx: bool = False) -> str:
    """The code of a kernel; `for_mlx`: to the letter as MLX writes it. An input's shape is an argument if the
    source names it. KeyError for a type that no kernel here has."""
    source, arguments = given["source"], list[str]()
    for name, array in zip(given["input_names"], call["inputs"], strict=True):
        arguments.append(f"const {_TYPES[array.dtype][0]}* {name}")
        for form, kind in (("shape", "Shape"), ("ndim", "int")):
            if f"{name}_{form}" in source and array.ndim:
                arguments.append(f"const __grid_constant__ {kind} {name}_{form}")
    outputs = zip(given["output_names"], call["output_dtypes"], strict=True)
    arguments += [f"{_TYPES[dtype][0]}* {name}" for name, dtype in outputs]
    constants = "".join(_write_constant(*constant) for constant in call["template"])
    joined = ",\n    ".join(arguments)
    bounds = ""
    if RESIDENT_BLOCKS in given["header"] and not for_mlx:
        bounds = f"__launch_bounds__({math.prod(call['threadgroup'])}, {RESIDENT_BLOCKS}) "
    name = name_kernel(given, call)
    body = f"__global__ void {bounds}{name}(\n    {joined}) {{\n{constants}\n{source}\n}}\n"
    if not for_mlx:
        return f'{_HEAD}{given["header"]}\nextern "C" {body}'
    before = "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
    return f"{_MLX_HEAD}{given['header']}{before}{body}\n}} // namespace mlx::core::cu\n"


def _write_constant(name: str, value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return f"  using {name} = {_TYPES[value][0]};\n"
    return f"  constexpr int {name} = {value};\n"


@lru_cache(maxsize=1)
def find_nvrtc() -> tuple[Any, Sequence[Path]] | None:
    """NVIDIA's compiler and the folders of its headers: the one that MLX loaded, or that of the package
    nvidia-cuda-nvrtc; None: not here."""
    loaded = [path for path in map(Path, list_mapped_files()) if path.name.startswith("libnvrtc.so")]
    spec = find_spec("nvidia.cu13") if find_spec("nvidia") else None
    packages = list(map(Path, (spec.submodule_search_locations or ()) if spec else ()))
    libraries = [
        *loaded,
        *(file for folder in packages for file in folder.glob("lib/libnvrtc.so.*")),
    ]
    if not libraries:
        return None
    package = libraries[0].parent.parent  # CUDA 12 has its headers in another one
    homes = [package, package.parent / "cuda_runtime"]
    homes += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    folders = [home / "include" for home in (*homes, Path("/usr/local/cuda"))]
    own = [folder for folder in folders if (folder / "cuda_fp16.h").exists()][:1]
    bundled = Path(mx.__file__).parent / "include"
    return ctypes.CDLL(str(libraries[0])), [*own, *(folder / "cccl" for folder in (bundled, *own))]


def compile_text(text: str, architecture: str, options: Sequence[str] = ()) -> tuple[bytes, str]:
    """The machine code of a text, and what NVRTC says of it. CompileError if NVRTC refuses the text, or is
    not here."""
    found = find_nvrtc()
    if found is None:
        raise CompileError("NVRTC is not installed")
    nvrtc, folders = found
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    options = ["--device-as-default-execution-space", f"--gpu-architecture={architecture}", *options]
    options += [f"--include-path={folder}" for folder in folders]
    listed = (ctypes.c_char_p * len(options))(*map(str.encode, options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), listed)
    report = _read(nvrtc, "ProgramLog", program).rstrip(b"\0").decode()
    code = b"" if failed else _read(nvrtc, "CUBIN", program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise CompileError(report)
    return code, report


def _read(nvrtc: Any, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    content = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, content)
    return content.raw


def hash_text(text: str) -> int:
    """`std::hash` of a text as libstdc++ computes it: MurmurHash64A with its seed."""
    content, factor, most = text.encode(), 0xC6A4A7935BD1E995, (1 << 64) - 1
    value = 0xC70F6907 ^ (len(content) * factor & most)
    whole = len(content) // 8 * 8
    for start in range(0, whole, 8):
        part = int.from_bytes(content[start : start + 8], "little") * factor & most
        value = (value ^ ((part ^ part >> 47) * factor & most)) * factor & most
    if content[whole:]:
        value = (value ^ int.from_bytes(content[whole:], "little")) * factor & most
    value = (value ^ value >> 47) * factor & most
    return value ^ value >> 47
