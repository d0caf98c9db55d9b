"""A damaged file of weights is named, whatever loads it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxrun.config.settings import Config, ModelSettings
from mlxrun.core.errors import ModelLoadError
from mlxrun.engine.build import build_engine
from mlxrun.model.load.tensor_files import read_entries, read_tensors
from tests.helpers.model_fixtures import Zoo
from tests.helpers.pooling_models import build_pooling_model


@pytest.mark.parametrize("size", [0, 5, 3000])
def test_a_file_that_was_cut_is_named(zoo: Zoo, tmp_path: Path, size: int) -> None:
    """Without a header, in it or behind it."""
    encoder = build_pooling_model("bert", tmp_path / "bert")
    for source in (zoo.text("llama"), zoo.vision("qwen2_5_vl"), encoder):
        folder = tmp_path / "cut" / source.name
        shutil.copytree(source, folder)
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:size])
        with pytest.raises(ModelLoadError) as caught:
            build_engine(Config(model=ModelSettings(path=str(folder))))
        assert str(caught.value).startswith(f"{file}: ")


def write_file(path: Path, header: Any, data: bytes = b"") -> Path:
    """A safetensors file with this header, as JSON or as it is."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(start: int, stop: int, shape: Sequence[Any] = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


WHOLE = {"a": entry(0, 8), "b": entry(8, 16), "__metadata__": {"format": "pt"}}
BAD_HEADERS: dict[str, tuple[Any, str]] = {
    "twins": ({"a": entry(0, 8), "b": entry(0, 8), "c": entry(8, 16)}, "'b' begins inside another tensor"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12), "c": entry(12, 16, (1,))}, "'b' begins inside another"),
    "hole": ({"a": entry(0, 4, (1,)), "b": entry(8, 16)}, "4 bytes before 'b' that are no tensor"),
    "beyond": ({"a": entry(0, 8), "b": entry(8, 1 << 60, (((1 << 60) - 8) // 4,))}, "the file has 16"),
    "rest": ({"a": entry(0, 8)}, "its tensors have 8 bytes, and the file has 16"),
    "size": ({"a": entry(0, 16), "b": entry(16, 16, (0,))}, r"'a' of shape \[2\] and type F32 has 16 bytes"),
    "negative": ({"a": entry(-8, 8), "b": entry(8, 16)}, "'a' has no type, shape and place"),
    "text": ({"a": entry(0, 8, ("2",)), "b": entry(8, 16)}, "'a' has no type, shape and place"),
    "truth": ({"a": entry(0, 8, (True, 2)), "b": entry(8, 16)}, "'a' has no type, shape and place"),
    "list": ([1], "its header is not a JSON object"),
    "number": ({"a": 1}, "'a' has no type, shape and place"),
    "same name": (
        b'{"a":' + json.dumps(entry(0, 16, (4,))).encode() + b',"a":1}',
        "the key 'a' occurs twice",
    ),
    "deep": (b'{"a":' + b"[" * 100_000, "nested too deeply"),
}


def test_a_file_as_the_format_has_it_is_read(tmp_path: Path) -> None:
    entries = read_entries(write_file(tmp_path / "m.safetensors", WHOLE, bytes(16)))
    assert {name: (each.start, each.stop, each.shape) for name, each in entries.items()} == {
        "a": (0, 8, (2,)),
        "b": (8, 16, (2,)),
    }


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_a_header_that_its_file_cannot_have_is_refused(tmp_path: Path, name: str) -> None:
    header, said = BAD_HEADERS[name]
    file = write_file(tmp_path / "m.safetensors", header, bytes(16))
    for read in (read_entries, read_tensors):
        with pytest.raises(ModelLoadError, match=rf"m\.safetensors: the header .*({said})"):
            read(file)


def test_the_twin_mlx_loads_two_tensors_on_one_place(tmp_path: Path) -> None:
    """Which is why headers are read here."""
    file = write_file(tmp_path / "m.safetensors", BAD_HEADERS["twins"][0], bytes(16))
    assert mx.array_equal(mx.load(str(file))["a"], mx.load(str(file))["b"]).item()


def test_a_header_longer_than_its_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(ModelLoadError, match=f"its header would have {1 << 60} bytes"):
        read_entries(file)


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device"])
def test_what_is_no_file_is_not_opened(
    zoo: Zoo, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe would be waited for without an end: this is in a thread that may be left behind."""
    folder = Path(shutil.copytree(zoo.text("llama"), tmp_path / "m"))
    path = folder / "model.safetensors"
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as made:
            monkeypatch.chdir(folder)  # the name of a socket is short
            made.bind(path.name)
    found: list[str] = []

    def load() -> None:
        try:
            build_engine(Config(model=ModelSettings(path=str(folder))))
        except ModelLoadError as error:
            found.append(str(error))

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    thread.join(60)
    shown = {
        "pipe": "it is a FIFO (named pipe), not a regular file",
        "socket": os.strerror(errno.ENXIO),
        "folder": os.strerror(errno.EISDIR),
        "device": "it is a device, not a regular file",
    }
    assert found == [f"{path}: {shown[kind]}"]
