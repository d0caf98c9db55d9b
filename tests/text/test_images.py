"""Images: what is read, what is refused, and what comes out."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mlxrun.config.settings import MediaSettings
from mlxrun.errors import MediaError
from mlxrun.text.images import MediaLoader, decode_image

MANY = 10**9


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def plain(size: tuple[int, int] = (3, 2), colour: str = "red") -> Image.Image:
    return Image.new("RGB", size, colour)


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def load(url: str, base: Path | None = None, **options: Any) -> Image.Image:
    return asyncio.run(MediaLoader(MediaSettings(**options), base).load(url, "messages[0]"))


def refused(url: str, base: Path | None = None, **options: Any) -> str:
    with pytest.raises(MediaError) as caught:
        load(url, base, **options)
    assert caught.value.param == "messages[0]"
    assert str(caught.value).startswith("messages[0]: ")
    return str(caught.value)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats_come_out_as_rgb(form: str) -> None:
    image = load(data_url(encoded(plain(), form), f"image/{form.lower()}"))
    assert (image.mode, image.size) == ("RGB", (3, 2))
    assert image.getpixel((0, 0))[0] > 240


def test_exif_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    assert decode_image(encoded(plain(), "JPEG", exif=exif.tobytes()), MANY).size == (2, 3)


def test_transparency_lies_on_white() -> None:
    clear = Image.new("RGBA", (1, 1), (0, 0, 0, 0))
    half = Image.new("LA", (1, 1), (0, 128))
    palette = Image.new("P", (1, 1), 0)
    assert decode_image(encoded(clear), MANY).getpixel((0, 0)) == (255, 255, 255)
    assert decode_image(encoded(half), MANY).getpixel((0, 0)) == (127, 127, 127)
    assert decode_image(encoded(palette, transparency=0), MANY).getpixel((0, 0)) == (255, 255, 255)


def test_first_frame_of_an_animation() -> None:
    data = encoded(plain(colour="red"), "GIF", save_all=True, append_images=[plain(colour="blue")])
    assert decode_image(data, MANY).getpixel((0, 0)) == (255, 0, 0)


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    grey = Image.new("I;16", (1, 1), 0x4000)
    assert decode_image(encoded(grey), MANY).getpixel((0, 0)) == (64, 64, 64)


def test_the_same_bytes_give_the_same_pixels() -> None:
    data = encoded(plain((40, 30)), "JPEG", quality=50)
    assert decode_image(data, MANY).tobytes() == decode_image(data, MANY).tobytes()


def test_pixels_are_counted_from_the_header_before_decoding() -> None:
    """A header that claims 400 million pixels is refused though hardly any data follows."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0))
    bomb = b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    assert "20000 x 20000 pixels, more than media.max_pixels" in refused(data_url(bomb))
    assert "max_pixels (5)" in refused(data_url(encoded(plain())), max_pixels=5)
    assert load(data_url(encoded(plain())), max_pixels=6).size == (3, 2)


def test_broken_images_are_media_errors() -> None:
    """Cut, empty, not an image, and a vector format that PIL might want a program for."""
    good = encoded(plain((64, 64)), "JPEG")
    for data in (b"", b"hello", good[: len(good) // 2], b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"):
        assert "not a readable image" in refused(data_url(data))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_damage_crashes_the_decoder(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"]))
    raw = bytearray(encoded(plain((9, 7)), form))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        image = decode_image(bytes(raw), 10_000)
    except MediaError:
        return
    assert image.mode == "RGB"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:text/plain;base64,aGk=", "expected data:image/"),
        ("data:image/png,abc", "must be base64"),
        ("data:image/png;base64,a b", "not valid base64"),
        ("data:image/png;base64,\u00e9", "not valid base64"),
        ("data:nonsense", "expected data:image/"),
        ("ftp://model_info/x.png", "ftp: URLs are not supported; use a data: URL"),
        ("file:///etc/passwd", "file: URLs are not supported"),
        ("https://example.com/x.png", "set media.allow_urls: true"),
        ("x.png", "not supported on the server"),
        ("", "the url is empty"),
    ],
)
def test_refused_urls(url: str, words: str) -> None:
    assert words in refused(url)


def test_encoded_bytes_are_limited() -> None:
    data = encoded(plain())
    assert "media.max_bytes" in refused(data_url(data), max_bytes=len(data) - 1)
    assert load(data_url(data), max_bytes=len(data)).size == (3, 2)
    assert "media.max_bytes" in refused("data:image/png;base64," + "A" * 4000, max_bytes=1000)


def test_paths_are_relative_to_the_job(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a b.png").write_bytes(encoded(plain()))
    for url in ("images/a b.png", "./images/../images/a b.png", str(tmp_path / "images" / "a b.png")):
        assert load(url, tmp_path).size == (3, 2)
    assert "'images/no.png' does not exist" in refused("images/no.png", tmp_path)
    assert "not a file" in refused("images", tmp_path)
    assert "media.max_bytes" in refused("images/a b.png", tmp_path, max_bytes=10)


def test_nothing_outside_the_roots_is_read(tmp_path: Path) -> None:
    """Not by `..`, absolute paths or links, and existing files look the same as missing ones."""
    job, secret = tmp_path / "job", tmp_path / "secret.png"
    (job / "in").mkdir(parents=True)
    secret.write_bytes(encoded(plain()))
    (job / "top.png").write_bytes(encoded(plain()))
    (job / "in" / "link.png").symlink_to(secret)
    (job / "in" / "folder").symlink_to(tmp_path)
    (job / "in" / "loop").symlink_to(job / "in" / "loop")
    for url in (
        "../secret.png",
        "../missing.png",
        str(secret),
        "in/link.png",
        "in/folder/secret.png",
        "/etc/hostname",
    ):
        assert "is outside media.roots" in refused(url, job)
    assert "is outside media.roots" in refused("top.png", job, roots=("in",))
    assert load("../secret.png", job, roots=("..",)).size == (3, 2)
    for url in ("in/loop", "a\0b", "x" * 5000):
        assert "cannot be read" in refused(url, job)


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    assert "not a file" in refused("pipe.png", tmp_path)


def test_many_at_once_with_few_slots(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(plain()))

    async def load_all() -> list[Image.Image]:
        loader = MediaLoader(MediaSettings(), tmp_path, parallel=2)
        return await asyncio.gather(*(loader.load("a.png", f"m[{i}]") for i in range(20)))

    assert len(asyncio.run(load_all())) == 20
