"""Opens and reads the files that a user names: regular files, in UTF-8, of a limited size.

A FIFO or a device would block, or be read without end. Only a pipe that the shell opened surely has a writer.
All problems are OSErrors whose `strerror` says what is wrong, so callers treat them like a missing file.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

MAX_TEXT = 1 << 20  # bytes of a config, a suite or a template, whose parsers take seconds for a megabyte
_KINDS = (
    (stat.S_ISFIFO, "a FIFO (named pipe)"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISSOCK, "a socket"),
)
_STREAMS = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
# UTF-32 first: its mark in little-endian order begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32 (little-endian)"),
    (codecs.BOM_UTF32_BE, "UTF-32 (big-endian)"),
    (codecs.BOM_UTF16_LE, "UTF-16 (little-endian)"),
    (codecs.BOM_UTF16_BE, "UTF-16 (big-endian)"),
)


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading. OSError if it is not a regular file; the system refuses folders."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError:
        raise OSError(errno.EINVAL, "its name has a NUL character") from None
    mode = os.fstat(handle).st_mode
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), None)
    if kind is not None:
        os.close(handle)
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")
    if stat.S_ISDIR(mode):
        os.close(handle)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return os.fdopen(handle, "rb")


def explain_missing_file(path: Path) -> str | None:
    """Why a path is not that of a file; None if it is."""
    if path.is_file():
        return None
    return "it is a folder, not a file" if path.is_dir() else "there is no such file"


def is_stream(path: Path) -> bool:
    """Whether a path is a stream that the shell opened for this process: /dev/stdin, or <(...)."""
    return str(path).startswith(_STREAMS)


def read_regular(path: Path, most: int = MAX_TEXT, *, streams: bool = False) -> bytes:
    """The content of a regular file. OSError if it has more than `most` bytes. `streams`: also read a pipe
    that the shell opened, which is empty afterwards."""
    is_pipe = streams and is_stream(path) and path.is_fifo()
    with path.open("rb") if is_pipe else open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return data


def stamp_file(path: Path) -> list[int] | None:
    """The size of a file and the time of its last change in ns. None if it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]


def read_json(path: Path) -> Any:
    """Read a JSON file. OSError if it is not a regular file."""
    with open_regular(path) as file:
        return json.loads(file.read())


def check_encoding(start: bytes) -> None:
    """OSError that names the encoding if a file with this beginning is in UTF-16 or UTF-32."""
    name = next((name for mark, name in _MARKS if start.startswith(mark)), None) or _guess_encoding(start[:4])
    if name is not None:
        short = name[:6]
        raise OSError(
            errno.EILSEQ, f"it is in {name}, and must be in UTF-8 (iconv -f {short} -t UTF-8 makes it so)"
        )


def _guess_encoding(start: bytes) -> str | None:
    """The encoding of a text without a mark whose first two characters are of ASCII; None for UTF-8."""
    zeros = "".join("0" if byte == 0 else "x" for byte in start)
    order = "big" if zeros.startswith("0") else "little"
    width = {"x0": 16, "0x": 16, "x0x0": 16, "0x0x": 16, "x000": 32, "000x": 32}.get(zeros)
    return f"UTF-{width} ({order}-endian)" if width else None


def read_text_file(path: Path, most: int = MAX_TEXT) -> str:
    """The text of a regular file in UTF-8, without its byte order mark. OSError as `read_regular` and
    `check_encoding`; UnicodeDecodeError for another encoding."""
    data = read_regular(path, most)
    check_encoding(data[:4])
    return data.decode("utf-8-sig")
