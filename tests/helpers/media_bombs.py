"""Images and videos that lie about their size, their length and their parts, or have too many of these."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence

from PIL import Image


def make_still(kind: str = "GIF", size: tuple[int, int] = (4, 4)) -> bytes:
    """A small grey image."""
    buffer = io.BytesIO()
    Image.new("L", size, 128).convert("RGB").save(buffer, kind)
    return buffer.getvalue()


def make_animation(frames: int) -> bytes:
    """A GIF that repeats its frame."""
    still = make_still()
    start = still.index(b"\x2c\0\0\0\0")
    return still[:-1] + still[start:-1] * frames + b";"


def resize_gif(width: int, height: int) -> bytes:
    """A GIF that says that it has this size."""
    still = make_still()
    return still[:6] + struct.pack("<HH", width, height) + still[10:]


def make_jpeg(*, fill: int = 0, parts: int = 0) -> bytes:
    """A JPEG with so many bytes between its parts, and so many empty parts."""
    still = make_still("JPEG")
    return still[:2] + b"\xff" * fill + b"\xff\xe5\x00\x02" * parts + still[2:]


def make_png(width: int = 4, height: int = 4, *, chunks: int = 0, frames: int = 0) -> bytes:
    """A PNG that says that it has this size, with so many chunks of text, and so many frames."""
    body = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    if frames:
        body += _chunk(b"acTL", struct.pack(">II", frames, 0))
    body += _chunk(b"tEXt", b"a\0b") * chunks
    body += _chunk(b"IDAT", zlib.compress(bytes(13 * 4))) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def make_tiff(tags: int) -> bytes:
    """A TIFF with so many tags whose values would lie behind its end."""
    size = {256: 4, 257: 4, 258: 8, 259: 1, 262: 1, 273: 20 + 12 * (9 + tags), 277: 1, 278: 4, 279: 16}
    entries = [(tag, 4, 1, value) for tag, value in size.items()]
    entries += [(40_000 + at, 3, 1_000_000, 1 << 30) for at in range(tags)]
    head = b"II*\0" + struct.pack("<IH", 8, len(entries))
    return head + b"".join(struct.pack("<HHII", *each) for each in entries) + bytes(64)


def make_avi(
    frames: Sequence[bytes],
    size: tuple[int, int] = (32, 32),
    *,
    rate: tuple[int, int] = (4, 1),
    total: int | None = None,
    streams: int = 1,
    repeat: int = 1,
    codec: bytes = b"MJPG",
) -> bytes:
    """An AVI of these JPEGs, `repeat` times. `rate`: frames of so many seconds; `total`: how many frames it
    says that it has."""
    width, height = size
    count = len(frames) * repeat if total is None else total
    head = _part(b"avih", struct.pack("<14I", 250_000, 0, 0, 16, count, 0, streams, 0, *size, 0, 0, 0, 0))
    about = struct.pack("<IHHIIIIIIII4H", 0, 0, 0, 0, rate[1], rate[0], 0, count, 0, 0, 0, 0, 0, 0, 0)
    picture = struct.pack("<IiiHH4sIiiII", 40, width, height, 1, 24, codec, 0, 0, 0, 0, 0)
    stream = _list(b"strl", _part(b"strh", b"vids" + codec + about) + _part(b"strf", picture))
    data = b"".join(_part(b"00dc", frame) for frame in frames) * repeat
    body = b"AVI " + _list(b"hdrl", head + stream * streams) + _list(b"movi", data)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _part(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def _list(name: bytes, data: bytes) -> bytes:
    return _part(b"LIST", name + data)
