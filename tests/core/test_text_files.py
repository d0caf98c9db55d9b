"""What is read of a path: regular files in UTF-8, of a size that can be meant; all else is an OSError."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from mlxrun.core.text_files import check_encoding, open_regular, read_regular, read_text_file


def test_files_in_utf8_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for text in ("", "a", "ab", "äö", "\ufeffab", "x" * 100):
        path.write_text(text, encoding="utf-8")
        assert read_text_file(path) == text.removeprefix("\ufeff")
    assert read_regular(path) == b"x" * 100
    path.write_bytes(b"\xff\x00\xfe")
    with pytest.raises(UnicodeDecodeError):
        read_text_file(path)


@pytest.mark.parametrize("text", ["a: 1\n", '{"a"', "ab"])
@pytest.mark.parametrize(
    ("codec", "name"),
    [
        ("utf-16", "UTF-16 (little-endian)"),
        ("utf-16-le", "UTF-16 (little-endian)"),
        ("utf-16-be", "UTF-16 (big-endian)"),
        ("utf-32", "UTF-32 (little-endian)"),
        ("utf-32-le", "UTF-32 (little-endian)"),
        ("utf-32-be", "UTF-32 (big-endian)"),
    ],
)
def test_other_encodings_are_named(text: str, codec: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode(codec))
    with pytest.raises(OSError) as caught:
        read_text_file(path)
    assert caught.value.strerror == (
        f"it is in {name}, and must be in UTF-8 (iconv -f {name[:6]} -t UTF-8 makes it so)"
    )


@pytest.mark.parametrize("start", [b"", b"\0", b"a", b"\0\0\0\0", b'{"a', b"\xef\xbb\xbfa"])
def test_other_beginnings_are_no_encoding(start: bytes) -> None:
    check_encoding(start)


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    """Nothing waits for a writer, nor reads without end."""
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "s"))
        for path, said in (
            (tmp_path / "fifo", "it is a FIFO (named pipe), not a regular file"),
            (Path("/dev/zero"), "it is a device, not a regular file"),
            (tmp_path, "Is a directory"),
            (tmp_path / "s", None),
            (tmp_path / "none", "No such file or directory"),
            (tmp_path / ("x" * 300), "File name too long"),
            (tmp_path / "a\0b", "its name has a NUL character"),
        ):
            with pytest.raises(OSError) as caught:
                open_regular(path)
            assert said is None or caught.value.strerror == said


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").symlink_to("a")
    assert read_text_file(tmp_path / "b") == "x"


def test_large_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 11)
    assert read_regular(tmp_path / "a", 11) == b"x" * 11
    with pytest.raises(OSError, match="it has more than 10 bytes"):
        read_regular(tmp_path / "a", 10)
