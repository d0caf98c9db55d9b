"""Files at URLs of fsspec: read, replaced whole, and errors that say what is lacking."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from mlxrun.core.errors import ConfigError, JobError
from mlxrun.jobs.run.remote_file import RemoteFile, is_url


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a file that is not there yet, in a folder that is not either."""
    return f"{request.param}://{tmp_path}/there/a.jsonl"


def test_what_is_a_url() -> None:
    assert all(map(is_url, ("s3://b/k", "hf://datasets/o/n/f", "file:///x", "simplecache::s3://b/k")))
    assert not any(map(is_url, ("a.jsonl", "/tmp/a:b", "./s3:/x", "-")))


def test_a_file_is_replaced_and_read(url: str, tmp_path: Path) -> None:
    local, back, file = tmp_path / "local", tmp_path / "back", RemoteFile(url)
    assert file.read_stamp() is None and file.name == "a.jsonl"
    stamps = []
    for text in ("one", "two!"):
        local.write_text(text)
        file.upload(local)
        stamps.append(file.read_stamp())
        file.download(back)
        assert back.read_text() == text
    assert None not in stamps and stamps[0] != stamps[1]
    assert file.read_stamp() == stamps[1]
    file.find_sibling("run/b").upload(local)
    assert RemoteFile(url.replace("a.jsonl", "run/b")).read_stamp() is not None
    file.find_sibling("a.mark").write(b"here")
    assert sorted(file.list_siblings("a")) == ["a.jsonl", "a.mark"] and file.list_siblings("x") == []
    file.remove()
    file.remove()
    assert file.read_stamp() is None
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".tmp"]


def test_a_torn_upload_shows_nothing(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before stays, whenever it breaks off."""
    local, back, file = tmp_path / "local", tmp_path / "back", RemoteFile(url)
    local.write_text("old")
    file.upload(local)
    local.write_text("newer")
    put = type(file._fs).put_file

    def tear(self: Any, source: str, target: str, **more: Any) -> None:
        Path(source).write_text("new")  # so much of it
        put(self, source, target, **more)
        raise OSError("the network is gone")

    monkeypatch.setattr(type(file._fs), "put_file", tear)
    with pytest.raises(JobError, match=r"a\.jsonl: it cannot be written: OSError: the network is gone"):
        file.upload(local)
    file.download(back)
    assert back.read_text() == "old"


def test_fewer_bytes_than_were_sent(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local, file = tmp_path / "local", RemoteFile(url)
    local.write_text("all of it")
    monkeypatch.setattr(
        type(file._fs), "put_file", lambda self, source, target, **_: self.pipe_file(target, b"all")
    )
    with pytest.raises(JobError, match="3 bytes arrived of 9"):
        file.upload(local)


def test_places_that_cannot_be_used(url: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="there is no such file"):
        RemoteFile(url).download(tmp_path / "x")
    RemoteFile(url).check_writable()
    assert RemoteFile(url + ".check").read_stamp() is None
    with pytest.raises(JobError, match="it is a folder"):
        RemoteFile(url.rpartition("/")[0]).read_stamp()
    with pytest.raises(ConfigError, match="nothing can be written to such URLs"):
        RemoteFile("https://localhost/a.jsonl").check_writable()
    folder = tmp_path / "file"
    folder.write_text("")
    with pytest.raises(JobError, match="it cannot be written"):
        RemoteFile(f"file://{folder}/a.jsonl").check_writable()


def test_where_no_folder_can_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As below /proc, whose error is that of a file that is not there."""
    file = RemoteFile("memory://folder/a.jsonl")
    monkeypatch.setattr(file._fs, "makedirs", Mock(side_effect=FileNotFoundError("folder")))
    with pytest.raises(JobError, match="it cannot be written: nothing can be created there"):
        file.check_writable()


def test_an_output_in_memory_gets_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    RemoteFile("memory://a.jsonl").check_writable()
    assert "memory://a.jsonl: it is in the memory of this process" in caplog.text


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("nonsense://a/b", "Protocol not known: nonsense"),
        ("s3://bucket/a", r"beside mlxrun\[remote\], a package for such URLs is needed: Install s3fs"),
        ("memory://", "names no file"),
    ],
)
def test_urls_that_nothing_here_can_reach(url: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ConfigError, match=reason):
        RemoteFile(url)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ConfigError, match=r"pip install 'mlxrun\[remote\]'"):
        RemoteFile("s3://bucket/a")
