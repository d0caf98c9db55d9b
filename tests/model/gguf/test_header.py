"""The header of a GGUF file: every kind of value, and files that are damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from mlxrun.errors import ModelLoadError
from mlxrun.model.gguf.header import GgufTensor, read_header
from tests.helpers.gguf_files import write_gguf

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
        "'' twice": struct.pack("<QQ", 0, 1 << 60) + bytes(200),
        "has no values": struct.pack("<QQ", 1, 0) + struct.pack("<QIQIQ", 0, 1, 0, 0, 0),
        "it has '' twice": struct.pack("<QQ", 1 << 60, 0) + bytes(200),
        "a list of lists": struct.pack("<QQ", 0, 1) + lists,
        "a list of 16777217": struct.pack("<QQ", 0, 1) + lists[:9] + struct.pack("<IIQ", 9, 8, (1 << 24) + 1),
    }.items():
        file.write_bytes(head + data)
        with pytest.raises(ModelLoadError, match=rf"m\.gguf: the header .*{said}"):
            read_header(file)
