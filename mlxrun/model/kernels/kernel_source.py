"""The custom kernels. Their sources are the files beside this module, each one text for CUDA and Metal.

The headers of each language define what the other one spells differently. Who compiles a kernel defines
macros for its shape. Each file says in the comment at its top what its kernel computes, of what arrays.

The kernels of a decoder layer (`ADD_NORM`, `TURN`, `GATE`) round where the library's own kernels round. Norms
are computed in float32, and rounded before they are multiplied by the weight. SiLU and its product are
rounded after each operation. A row's result does not depend on the rows beside it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxrun.model.kernels.kept_kernels import KeptKernel, find_architecture

PAGE = 256  # tokens of a page
SHARED_NUMBERS = {"cuda": 10240, "metal": 6144}  # float32 numbers that a block's threads may share
_FOLDER = Path(__file__).parent
_INCLUDED = re.compile(r'^#include "(\w+)\.h"\n', re.MULTILINE)


def _read(name: str) -> str:
    """A file, with those of this folder that it includes. It has no comments of whole lines, as a kernel is
    compiled for many shapes."""
    lines = (_FOLDER / f"{name}.h").read_text(encoding="utf-8").splitlines(keepends=True)
    text = "".join(line for line in lines if not line.startswith("//"))
    return _INCLUDED.sub(lambda found: _read(found[1]), text)


def _read_headers(part: str) -> dict[str, str]:
    """The headers of both languages, with what the kernels of one kind need besides."""
    return {language: HEADERS[language] + _read(f"{part}_{language}") for language in HEADERS}


HEADERS = {language: _read(language) + _read("vector") for language in ("cuda", "metal")}
LAYER_HEADERS, GEMM_HEADERS = _read_headers("layer"), _read_headers("gemm")
_PLACES = _read("places")
SPLIT, JOIN = _PLACES + _read("attention_split"), _PLACES + _read("attention_join")
ADD_NORM, TURN, GATE = _PLACES + _read("add_norm"), _PLACES + _read("turn"), _PLACES + _read("gate")
SKINNY_GEMM = _PLACES + _read("skinny_gemm")


# Files by their text, those that include others before these.
_FILES = {
    _read(path.stem): path for path in sorted(_FOLDER.glob("*.h"), key=lambda path: -path.stat().st_size)
}


def make_kernel(
    backend: str, name: str, inputs: Sequence[str], outputs: Sequence[str], source: str, header: str
) -> Any:
    """A kernel with arguments of these names. It is compiled when it first runs.

    On CUDA, MLX hashes the text of a kernel in each launch, which takes the host a microsecond for 6 KB. So
    the text includes the files, and has a digest of what they contain.
    """
    named = {"name": name, "input_names": list(inputs), "output_names": list(outputs)}
    if backend != "cuda":
        return mx.fast.metal_kernel(**named, source=source, header=header)
    content = repr((source, header, find_architecture(), mx.__version__)).encode()
    digest = hashlib.blake2b(content, digest_size=6).hexdigest()
    header = f"{_include_files(header)}// {digest}\n"
    given = {**named, "source": _include_files(source, inputs), "header": header}
    return KeptKernel(mx.fast.cuda_kernel(**given), given)


def _include_files(text: str, inputs: Sequence[str] = ()) -> str:
    """The text with lines that include its files. MLX finds in it which inputs' shapes a kernel takes."""
    named = (f"{name}_{form}" for name in inputs for form in ("shape", "strides", "ndim"))
    taken = " ".join(name for name in named if name in text)
    for known, path in _FILES.items():
        text = text.replace(known, f'#include "{path}"\n')
    return f"{text}// {taken}\n" if taken else text
