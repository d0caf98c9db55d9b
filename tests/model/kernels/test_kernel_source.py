"""How kernels are made for each language. What they compute: tests/metal."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from mlxrun.model.kernels import kernel_source
from mlxrun.model.kernels.kernel_source import GEMM_HEADERS, HEADERS, JOIN, SKINNY_GEMM, SPLIT, make_kernel
from tests.helpers.custom_kernels import expand_files

KERNELS = {
    "skinny GEMM": (SKINNY_GEMM, GEMM_HEADERS, ("x", "weight"), "x_shape x_ndim"),
    "split": (SPLIT, HEADERS, ("queries", "keys", "tables"), "keys_shape"),
    "join": (JOIN, HEADERS, ("parts", "lengths"), "parts_shape"),
}


def capture_texts(backend: str, source: str, header: str, inputs: Any, patch: pytest.MonkeyPatch) -> Any:
    """The source and the header that MLX gets."""
    made: dict[str, Any] = {}
    patch.setattr(mx.fast, f"{backend}_kernel", lambda **given: made.update(given))
    make_kernel(backend, "some", inputs, ["y"], source, header)
    return made["source"], made["header"]


@pytest.mark.parametrize("name", KERNELS)
def test_cuda_includes_the_files_of_a_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is short, as MLX hashes it in each launch. It names the inputs whose shapes MLX gives."""
    source, headers, inputs, taken = KERNELS[name]
    header = headers["cuda"] + "\n#define SCALE 1.0f\n"
    short, head = capture_texts("cuda", source, header, inputs, monkeypatch)
    assert len(short) + len(head) < len(source) + len(header) and short.endswith(f"// {taken}\n")
    assert short.count("\n") == 3, "two files, and the names"
    assert expand_files(short) == source and expand_files(head) == header


def test_a_text_of_no_file_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    source, header = capture_texts("cuda", "y[0] = x[0];\n", "", ["x"], monkeypatch)
    assert source == "y[0] = x[0];\n" and expand_files(header) == ""
    wrong = SPLIT.replace("token < stop", "token <= stop", 1)
    found = expand_files(capture_texts("cuda", wrong, "", ["x"], monkeypatch)[0])
    assert found == wrong != SPLIT, "it is not taken for the file"


def test_metal_gets_the_texts_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX finds the names of Metal's attributes in them."""
    found = capture_texts("metal", SPLIT, HEADERS["metal"], ["queries"], monkeypatch)
    assert found == (SPLIT, HEADERS["metal"])


def test_a_text_names_what_its_files_contain(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled is kept under a name of the text, which has only the files' paths."""

    def find_header() -> Any:
        return capture_texts("cuda", SPLIT, HEADERS["cuda"], ["queries"], monkeypatch)[1]

    first = find_header()
    assert find_header() == first
    monkeypatch.setattr(kernel_source, "find_architecture", lambda: "sm_80")
    assert find_header() != first
    other = capture_texts("cuda", JOIN, HEADERS["cuda"], ["queries"], monkeypatch)[1]
    assert other.splitlines()[:-1] == first.splitlines()[:-1] and other != first
