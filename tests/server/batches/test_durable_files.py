"""Documents that are replaced as a whole, second names of files, and errors that name the path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxrun.server.batches import durable_files
from mlxrun.server.batches.durable_files import (
    StorageError,
    convert_errors,
    link_file,
    read_json,
    write_json,
)


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems have no hard links: then it is a copy."""

    def refuse(*args: Any) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(durable_files.os, "link", refuse)
    (tmp_path / "a").write_bytes(b"content")
    link_file(tmp_path / "a", tmp_path / "b")
    (tmp_path / "a").unlink()
    assert (tmp_path / "b").read_bytes() == b"content"


def test_a_second_name_outlives_the_first(tmp_path: Path) -> None:
    """A link, of the same bytes on disk; what a kill left half linked is no obstacle."""
    (tmp_path / "a").write_bytes(b"content")
    (tmp_path / "b.tmp").write_bytes(b"left behind")
    link_file(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a").stat().st_ino == (tmp_path / "b").stat().st_ino
    (tmp_path / "a").unlink()
    assert (tmp_path / "b").read_bytes() == b"content"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b"]


@pytest.mark.parametrize("value", [{}, {"a": "\u0159\u2028\ud800"}, {"a": [None, 1.5, True]}])
def test_documents_come_back(tmp_path: Path, value: dict[str, Any]) -> None:
    write_json(tmp_path / "a.json", {"old": 1})
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_documents_that_are_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.json").write_bytes(data)
    assert read_json(tmp_path / "a.json") == {} == read_json(tmp_path / "b.json")


def test_errors_name_the_path(tmp_path: Path) -> None:
    with (
        pytest.raises(StorageError, match=f"{tmp_path}: cannot be used: No such file"),
        convert_errors(tmp_path),
    ):
        (tmp_path / "a").read_bytes()
