"""Decoding images: what comes out, whole and reduced, and how much memory it takes."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from mlxrun.api.text.media import image_decoding
from mlxrun.api.text.media.image_decoding import ImageHeader, decode_image, read_header
from mlxrun.core.errors import MediaError

MANY = 10**9


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def plain(size: tuple[int, int] = (3, 2), colour: str = "red") -> Image.Image:
    return Image.new("RGB", size, colour)


def noise(size: tuple[int, int], mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(size[0])
    data = rng.integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    return Image.fromarray(data, "RGBA").convert(mode)


def test_exif_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    assert decode_image(encoded(plain(), "JPEG", exif=exif.tobytes())).size == (2, 3)


def test_transparency_lies_on_white() -> None:
    clear = Image.new("RGBA", (1, 1), (0, 0, 0, 0))
    half = Image.new("LA", (1, 1), (0, 128))
    palette = Image.new("P", (1, 1), 0)
    assert decode_image(encoded(clear)).getpixel((0, 0)) == (255, 255, 255)
    assert decode_image(encoded(half)).getpixel((0, 0)) == (127, 127, 127)
    assert decode_image(encoded(palette, transparency=0)).getpixel((0, 0)) == (255, 255, 255)


def test_first_frame_of_an_animation() -> None:
    data = encoded(plain(colour="red"), "GIF", save_all=True, append_images=[plain(colour="blue")])
    assert decode_image(data).getpixel((0, 0)) == (255, 0, 0)


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    grey = Image.new("I;16", (1, 1), 0x4000)
    assert decode_image(encoded(grey)).getpixel((0, 0)) == (64, 64, 64)


@pytest.mark.parametrize("brands", [b"heic\0\0\0\0mif1heic", b"mif1\0\0\0\0mif1heixmiaf"])
def test_photos_of_phones_are_refused_by_name(brands: bytes) -> None:
    with pytest.raises(MediaError, match="HEIC images, which phones make, are not read; send it as JPEG"):
        read_header(b"\0\0\0\x18ftyp" + brands + b"\0" * 100, 10_000)


def test_a_jpeg_with_a_second_picture_is_decoded_as_one_without() -> None:
    """As many phones and cameras write them: beside a small picture, or a map of depths."""
    pixels = np.random.default_rng(7).integers(0, 256, (120, 160, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    both = encoded(picture, "MPO", save_all=True, append_images=[plain()])
    single = encoded(picture, "JPEG")
    assert read_header(both, MANY) == read_header(single, MANY)
    assert decode_image(both, 4).tobytes() == decode_image(single, 4).tobytes()


def test_the_same_bytes_give_the_same_pixels() -> None:
    data = encoded(plain((40, 30)), "JPEG", quality=50)
    assert decode_image(data).tobytes() == decode_image(data).tobytes()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_damage_crashes_the_decoder(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"]))
    raw = bytearray(encoded(plain((9, 7)), form))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_header(bytes(raw), 10_000)
        image = decode_image(bytes(raw))
    except MediaError:
        return
    assert image.mode == "RGB"


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "L", "P", "1"])
@pytest.mark.parametrize("factor", [1, 2, 3, 5])
def test_strips_give_what_the_whole_image_gives(
    mode: str, factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Converted, and reduced, at once."""
    data = encoded(noise((67, 53), mode))
    with Image.open(io.BytesIO(data)) as image:
        whole = image_decoding._convert_strip(image)
    expected = whole.reduce(factor) if factor > 1 else whole
    assert decode_image(data, factor).tobytes() == expected.tobytes()
    monkeypatch.setattr(image_decoding, "_STRIP_PIXELS", 500)
    found = decode_image(data, factor)
    assert found.size == expected.size and found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(9))
def test_every_orientation_is_applied(form: str, orientation: int) -> None:
    """Also to an image that is reduced; as PIL applies it to the whole one."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(noise((64, 32)), form, exif=exif.tobytes())
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        expected = ImageOps.exif_transpose(image).convert("RGB")
    found = decode_image(data)
    assert found.size == expected.size and found.tobytes() == expected.tobytes()
    assert decode_image(data, 2).size == (expected.width // 2, expected.height // 2)


@pytest.mark.parametrize(
    ("factor", "size"), [(1, (800, 400)), (2, (400, 200)), (3, (400, 200)), (6, (200, 100))]
)
def test_a_jpeg_is_reduced_by_its_decoder_first(factor: int, size: tuple[int, int]) -> None:
    """By 2, 4 or 8, and then by whole factors; never by more than was asked for."""
    image = noise((100, 50)).resize((800, 400))
    found = decode_image(encoded(image, "JPEG", quality=95), factor)
    assert found.size == size
    expected = image.resize(size, Image.Resampling.BOX)
    difference = np.asarray(found, int) - np.asarray(expected, int)
    assert np.abs(difference).mean() < 8


def test_the_factor_keeps_twice_what_the_processor_keeps() -> None:
    def factor(width: int, height: int, side: int | None) -> int:
        return ImageHeader(width, height, False, 0).choose_factor(side)

    assert factor(7000, 7000, 1000) == 3
    assert factor(7000, 7000, 1751) == 1 and factor(7000, 7000, 1750) == 2
    assert factor(7000, 7000, None) == 1
    assert factor(2000, 2000, 100) == 1  # not a large image
    assert factor(20_000, 2000, 400) == 2  # by the shorter side
    assert factor(20_000, 300, 400) == 1


def test_memory_is_counted_from_the_header() -> None:
    size = (40, 30)
    png = read_header(encoded(plain(size)), MANY)
    assert (png.width, png.height, png.pixels, png.is_jpeg) == (40, 30, 1200, False)
    assert png.count_kept_bytes(1) == 16 * 1200 and png.count_kept_bytes(7) == 16 * 6 * 5
    assert png.count_decoder_bytes(1) == png.count_decoder_bytes(4) == 4 * 1200
    jpeg = read_header(encoded(plain(size), "JPEG"), MANY)
    assert jpeg.count_decoder_bytes(1) == 4 * 1200 and jpeg.count_decoder_bytes(5) == 4 * 1200 // 16
    progressive = read_header(encoded(plain(size), "JPEG", progressive=True), MANY)
    assert progressive.count_decoder_bytes(5) == 6 * 1200 + 4 * 1200 // 16
    assert read_header(encoded(plain(size), "WEBP"), MANY).count_decoder_bytes(1) == 8 * 1200
    with pytest.raises(MediaError, match="40 x 30 pixels, more than media.max_pixels"):
        read_header(encoded(plain(size)), 1199)
