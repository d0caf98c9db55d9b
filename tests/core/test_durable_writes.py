"""On macOS the disk itself is asked to write; everywhere else, and where it cannot be asked, `fsync` is."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from pathlib import Path

import pytest

import mlxrun
from mlxrun.core.durable_writes import sync_handle, write_atomically

FULL = 51  # F_FULLFSYNC, as macOS numbers it


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the system is asked, on a macOS whose fcntl and fsync are replaced."""
    made: list[str] = []

    def call(handle: int, command: int) -> int:
        assert (handle, command) == (7, FULL)
        made.append("fcntl")
        return 0

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", call)
    monkeypatch.setattr(os, "fsync", lambda handle: made.append(f"fsync {handle}"))
    return made


def fail_with(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(handle: int, command: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "fcntl", fail)


def test_macos_asks_the_disk(calls: list[str]) -> None:
    sync_handle(7)
    assert calls == ["fcntl"]


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.EINVAL, errno.ENOTTY])
def test_a_file_system_that_does_not_know_it(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fail_with(monkeypatch, number)
    sync_handle(7)
    assert calls == ["fsync 7"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_is_no_success(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    fail_with(monkeypatch, number)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        sync_handle(7)
    assert calls == []


def test_other_systems_sync(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fcntl, "F_FULLFSYNC")
    sync_handle(7)
    assert calls == ["fsync 7"]


def test_a_real_file_and_its_folder(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "x"):
        handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_WRONLY | os.O_CREAT)
        try:
            sync_handle(handle)
        finally:
            os.close(handle)


def test_links_and_modes_stay(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    real, link = tmp_path / "other/x", tmp_path / "x"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to("other/x")
    write_atomically(link, b"new")
    assert link.is_symlink() and real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["other", "x", "x"]


def test_nothing_else_calls_fsync() -> None:
    """A call of its own would not reach the disk of a Mac."""
    root = Path(mlxrun.__file__).parent
    found = [path.name for path in root.rglob("*.py") if "os.fsync" in path.read_text(encoding="utf-8")]
    assert found == ["durable_writes.py"]
