"""The header of a GGUF file: every kind of value, and files that are damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxrun.core.errors import ModelLoadError
from mlxrun.model.load.gguf.architectures import TENSOR_TYPES
from mlxrun.model.load.gguf.header import GgufTensor, read_header
from mlxrun.model.load.weight_check import is_float
from tests.helpers.gguf_files import pack, write_gguf

METADATA = {
    "general.architecture": "llama",
    "a.number": 7,
    "a.share": 0.5,
    "a.switch": True,
    "a.list": [1, 2, 3],
    "a.words": ["one", "zwölf", ""],
    "a.nothing": [],
}


def test_metadata_and_tensors(tmp_path: Path) -> None:
    tensors = {"x.weight": ("F32", (2, 3), b"\0" * 24), "y.weight": ("Q4_0", (2, 32), b"\0" * 36)}
    header = read_header(write_gguf(tmp_path / "m.gguf", METADATA, tensors))
    assert header.metadata == METADATA
    assert header.tensors == {"x.weight": GgufTensor((2, 3), "F32"), "y.weight": GgufTensor((2, 32), "Q4_0")}
    assert header.read("a.number", int) == 7
    assert header.read("a.absent", int, 3) == 3


@pytest.mark.parametrize(("key", "kind"), [("a.number", str), ("a.switch", int), ("a.words", float)])
def test_a_value_of_another_type_is_named(tmp_path: Path, key: str, kind: type) -> None:
    header = read_header(write_gguf(tmp_path / "m.gguf", METADATA, {}))
    with pytest.raises(ModelLoadError, match=rf"m\.gguf: {key} is .*, which is not a {kind.__name__}"):
        header.read(key, kind)


def test_damaged_headers_are_refused(tmp_path: Path) -> None:
    """Cut off anywhere, or with lengths that cannot be."""
    file = write_gguf(tmp_path / "m.gguf", METADATA, {"x.weight": ("F32", (2, 3), b"\0" * 24)})
    whole = file.read_bytes()
    end = whole.index(b"x.weight") + 8 + 4 + 16 + 12
    for size in range(0, end, 7):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelLoadError, match="header of the GGUF file cannot be read"):
            read_header(file)
    bad = {
        "does not begin": b"GGML" + whole[4:],
        "version 9": whole[:4] + struct.pack("<I", 9) + whole[8:],
        "a list of": whole.replace(struct.pack("<IQ", 4, 3), struct.pack("<IQ", 4, 1 << 60)),
        "unknown type 99": whole.replace(
            b"a.number" + struct.pack("<I", 4), b"a.number" + struct.pack("<I", 99)
        ),
    }
    for said, data in bad.items():
        file.write_bytes(data)
        with pytest.raises(ModelLoadError, match=said):
            read_header(file)


def test_lengths_that_make_a_file_too_much_work_are_refused(tmp_path: Path) -> None:
    """Counts are the file's word, and zeros look like metadata and tensors without a name or values."""
    head, file = b"GGUF" + struct.pack("<I", 3), tmp_path / "m.gguf"
    lists = struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
    for said, data in {
        "'' twice": struct.pack("<QQ", 0, 2) + bytes(200),
        "it would have 0 tensors and 1152921504606846976 values": struct.pack("<QQ", 0, 1 << 60) + bytes(200),
        "has no values": struct.pack("<QQ", 1, 0) + struct.pack("<QIQIQ", 0, 1, 0, 0, 0),
        "'' has 0 dimensions": struct.pack("<QQ", 1, 0) + struct.pack("<QIIQ", 0, 0, 0, 0),
        "'t' twice": struct.pack("<QQ", 2, 0) + 2 * struct.pack("<QcIQIQ", 1, b"t", 1, 8, 0, 0),
        "a list of lists": struct.pack("<QQ", 0, 1) + lists,
        "a list of 16777217": struct.pack("<QQ", 0, 1) + lists[:9] + struct.pack("<IIQ", 9, 8, (1 << 24) + 1),
    }.items():
        file.write_bytes(head + data)
        with pytest.raises(ModelLoadError, match=rf"m\.gguf: the header .*{said}"):
            read_header(file)


def write_places(file: Path, *tensors: tuple[str, tuple[int, ...], int], size: int = 64, **more: int) -> Path:
    """A file with tensors of the type F32 at these places, and `size` bytes behind its header."""
    write_gguf(file, METADATA | {f"general.{key}": value for key, value in more.items()}, {})
    head = bytearray(file.read_bytes()[: file.read_bytes().rindex(b"a.nothing") + 9 + 4 + 12])
    head[8:16] = struct.pack("<Q", len(tensors))
    for name, shape, place in tensors:
        head += struct.pack("<Q", len(name)) + name.encode()
        head += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, place)
    file.write_bytes(bytes(head) + b"\0" * (-len(head) % 32) + bytes(size))
    return file


def test_tensors_lie_within_the_file_and_not_on_each_other(tmp_path: Path) -> None:
    """MLX takes the word of the file, and would read what is behind it."""
    file = tmp_path / "m.gguf"
    assert set(read_header(write_places(file, ("x", (8,), 0), ("y", (8,), 32))).tensors) == {"x", "y"}
    for said, tensors in {
        "'y' begins inside another tensor": [("x", (16,), 0), ("y", (8,), 32)],
        "'x' does not lie within the file": [("x", (17,), 0)],
        "'x' does not lie": [("x", (8,), 1 << 60)],
        "'x' does not": [("x", (1 << 40, 1 << 40), 0)],
        "'x' does": [("x", (4,), 4)],
    }.items():
        with pytest.raises(ModelLoadError, match=rf"m\.gguf: the header .*{said}"):
            read_header(write_places(file, *tensors))


def test_an_alignment_that_cannot_be_is_refused(tmp_path: Path) -> None:
    """The library of MLX divides by it."""
    for alignment in (0, 24):
        file = write_gguf(tmp_path / "m.gguf", METADATA | {"general.alignment": alignment}, {})
        with pytest.raises(ModelLoadError, match=f"general.alignment is {alignment}, which is not a power"):
            read_header(file)


def test_rows_are_whole_blocks(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", METADATA, {"x": ("Q4_0", (2, 33), bytes(64))})
    with pytest.raises(ModelLoadError, match="'x' has rows of 33 values, not whole blocks of Q4_0"):
        read_header(file)


def test_a_string_longer_than_the_file_is_refused(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", {"a.word": "word"}, {})
    whole = file.read_bytes()
    file.write_bytes(whole.replace(struct.pack("<Q", 4) + b"word", struct.pack("<Q", 1 << 60) + b"word"))
    with pytest.raises(ModelLoadError, match="ends within its header"):
        read_header(file)


@pytest.mark.parametrize("kind", TENSOR_TYPES)
def test_bytes_in_memory_are_those_that_mlx_takes(tmp_path: Path, kind: str) -> None:
    """Of Q6_K more than twice as many as in the file."""
    shape = (8, 256)
    data = bytes(8 * 210) if kind == "Q6_K" else pack(np.ones(shape, "<f4"), kind)
    file = write_gguf(tmp_path / "a.gguf", {}, {"a.weight": (kind, shape, data)})
    arrays = mx.load(str(file)).values()
    tensor = read_header(file).tensors["a.weight"]
    assert tensor.count_loaded_bytes(None) == sum(array.nbytes for array in arrays)
    floats = [array.astype(mx.float32) if is_float(array) else array for array in arrays]
    assert tensor.count_loaded_bytes(4) == sum(array.nbytes for array in floats)
