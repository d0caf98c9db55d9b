"""The file of a bundle: equal bytes for equal files, and nothing that it must not unpack."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxrun.core.errors import JobError
from mlxrun.evals.bundles import archive
from mlxrun.evals.bundles.archive import SUMS, read_sums, unpack_archive, write_archive

Add = Callable[[tarfile.TarFile], object]


def make_archive(folder: Path, name: str = "a.tar.gz") -> Path:
    (folder / "job.jsonl").write_text('{"id": 1}\n')
    path = folder / name
    write_archive(path, "run", {"files/job.jsonl": folder / "job.jsonl", "README.md": b"read"})
    return path


def unpack(path: Path) -> Path:
    folder = path.parent / "unpacked"
    folder.mkdir()
    unpack_archive(path, folder)
    return folder


def write_tar(path: Path, add: Add) -> Path:
    """An archive that somebody else made."""
    with tarfile.open(path, "w:gz") as tar:
        add(tar)
    return path


def add_file(name: str, data: bytes = b"", **facts: object) -> Add:
    def add(tar: tarfile.TarFile) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(data)
        for key, value in facts.items():
            setattr(member, key, value)
        tar.addfile(member, io.BytesIO(data))

    return add


def add_twice(tar: tarfile.TarFile) -> None:
    add_file("run/a", b"1")(tar)
    add_file("run/a", b"2")(tar)


def add_two_folders(tar: tarfile.TarFile) -> None:
    add_file("run/a")(tar)
    add_file("other/a")(tar)


def test_what_was_written_is_unpacked(tmp_path: Path) -> None:
    folder = unpack(make_archive(tmp_path))
    assert (folder / "files/job.jsonl").read_bytes() == b'{"id": 1}\n'
    assert (folder / "README.md").read_bytes() == b"read"
    assert set(read_sums(folder)) == {"files/job.jsonl", "README.md"}


def test_equal_files_make_equal_bytes(tmp_path: Path) -> None:
    """Whatever their times and modes are."""
    first = make_archive(tmp_path).read_bytes()
    (tmp_path / "job.jsonl").chmod(0o600)
    assert make_archive(tmp_path, "b.tar.gz").read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar.gz", "b.tar.gz", "job.jsonl"]


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot be written: it would have the name"):
        write_archive(tmp_path / "a.tar.gz", "run", {"a\nb": b""})
    with pytest.raises(FileNotFoundError):
        write_archive(tmp_path / "a.tar.gz", "run", {"a": tmp_path / "none"})
    assert list(tmp_path.iterdir()) == []


HOSTILE: list[tuple[str, Add, str]] = [
    ("link", add_file("run/a", type=tarfile.SYMTYPE, linkname="/etc/passwd"), "no regular file: 'run/a'"),
    ("hard link", add_file("run/a", type=tarfile.LNKTYPE, linkname="../b"), "no regular file: 'run/a'"),
    ("device", add_file("run/a", type=tarfile.CHRTYPE), "no regular file: 'run/a'"),
    ("pipe", add_file("run/a", type=tarfile.FIFOTYPE), "no regular file: 'run/a'"),
    ("holes", add_file("run/a", type=tarfile.GNUTYPE_SPARSE), "no regular file|damaged"),
    ("absolute", add_file("/tmp/a"), "a path that is not allowed: '/tmp/a'"),
    ("up", add_file("run/../../escaped"), "a path that is not allowed: 'run/../../escaped'"),
    ("no folder", add_file("a"), "a path that is not allowed: 'a'"),
    ("control", add_file("run/a\x1b[2J"), "a path that is not allowed"),
    ("twice", add_twice, "has a member twice: 'run/a'"),
    (
        "long",
        add_file(f"run/{'a' * 300}"),
        r"its member 'run/a+\.\.\. \(304\)' cannot be unpacked: File name too long",
    ),
    ("folders", add_two_folders, "has more than one folder"),
    ("no sums", add_file("run/a"), f"is no bundle: it has no {SUMS}"),
    ("header", add_file("run/a", pax_headers={"comment": "x" * (2 << 20)}), "a header that is too long"),
]


@pytest.mark.parametrize("add, says", [each[1:] for each in HOSTILE], ids=[each[0] for each in HOSTILE])
def test_what_must_not_be_unpacked(tmp_path: Path, add: Add, says: str) -> None:
    path = write_tar(tmp_path / "a.tar.gz", add)
    with pytest.raises(JobError, match=says):
        unpack(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.tar.gz", "unpacked"]


def test_a_careless_program_would_write_outside(tmp_path: Path) -> None:
    """The twin: the member is a real danger."""
    path = write_tar(tmp_path / "a.tar.gz", add_file("run/../../escaped", b"here"))
    (tmp_path / "a/b/run").mkdir(parents=True)
    with tarfile.open(path) as tar:
        tar.extractall(tmp_path / "a/b", filter="fully_trusted")
    assert (tmp_path / "a/escaped").read_bytes() == b"here"


@pytest.mark.parametrize(
    "files, says",
    [
        ({"a": b"1", SUMS: b"0  a\n"}, "a was changed"),
        ({"a": b"1", SUMS: b""}, "a was changed"),
        ({SUMS: b"0  a\n"}, "a is missing"),
        ({SUMS: b"0  a\n\x00\xff\n"}, "gz: line 2 of SHA256SUMS is damaged"),
        ({SUMS: b"0\n"}, "gz: line 1 of SHA256SUMS is damaged: it is not a digest and a name: '0'"),
    ],
)
def test_every_file_has_the_recorded_digest(tmp_path: Path, files: dict[str, bytes], says: str) -> None:
    def add(tar: tarfile.TarFile) -> None:
        for name, data in files.items():
            add_file(f"run/{name}", data)(tar)

    with pytest.raises(JobError, match=says):
        unpack(write_tar(tmp_path / "a.tar.gz", add))


def test_one_changed_byte_is_found(tmp_path: Path) -> None:
    path = make_archive(tmp_path)
    data = gzip.decompress(path.read_bytes())
    path.write_bytes(gzip.compress(data.replace(b"read", b"Read")))
    with pytest.raises(JobError, match=r"README\.md was changed"):
        unpack(path)


@pytest.mark.parametrize("size", [0, 10, 100, 200])
def test_a_file_that_was_cut(tmp_path: Path, size: int) -> None:
    path = make_archive(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(JobError, match=r"a\.tar\.gz: (is damaged, or no bundle|is no bundle|cannot be)"):
        unpack(path)


def test_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file with many bytes, and one with many members; both pass where limits are higher."""
    bytes_bomb = write_tar(tmp_path / "a.tar.gz", add_file("run/a", bytes(1 << 20)))
    assert bytes_bomb.stat().st_size < 2000
    monkeypatch.setattr(archive, "MOST_BYTES", 1000)
    with pytest.raises(JobError, match=r"unpacks to more than \d+,\d+ bytes"):
        unpack(bytes_bomb)
    assert not any((tmp_path / "unpacked").iterdir())
    monkeypatch.setattr(archive, "MOST_BYTES", 1 << 30)
    with pytest.raises(JobError, match="is no bundle: it has no"):
        unpack_archive(bytes_bomb, tmp_path / "unpacked")
    (tmp_path / "many").mkdir()
    monkeypatch.setattr(archive, "MOST_FILES", 2)
    with pytest.raises(JobError, match="has more than 2 files"):
        unpack(make_archive(tmp_path / "many"))


def test_the_limit_holds_for_all_bytes_together(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(bytes(4096)))
    with path.open("rb") as raw, archive.LimitedStream(raw, 1000) as stream:
        assert len(stream.read(900)) == 900
        with pytest.raises(JobError, match="unpacks to more than 1,000 bytes"):
            stream.read(900)
