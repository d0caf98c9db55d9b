"""Decodes images to RGB, rotated as the EXIF data says, transparency on white, the first frame of animations.

The model's processor reduces large images. An image that is much larger is reduced while it is decoded, to at
least twice the processor's resolution. The factor is a whole number, and depends only on the image's size.
"""

from __future__ import annotations

import io
import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlxrun.core.errors import MediaError

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)
# PIL warns of each tag that it cannot read, and a file may have thousands of them.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")

LARGE_IMAGE = 4_000_000  # pixels; smaller images are never reduced
# Bytes for each pixel: a decoded image has 4, and the processor has it as bytes and as floats too.
KEPT_BYTES = 16
_OVERSAMPLING = 2  # how much of the processor's resolution, in each direction, a reduced image keeps at least
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
_JPEG = ("JPEG", "MPO")  # MPO: with further pictures behind the first one
_HEIC = (b"heic", b"heix")  # brands at the beginning of a file
_BRANDS_END = 64  # bytes
_STRIP_PIXELS = 1 << 20  # that are converted at once
_JPEG_SCALES = (8, 4, 2)  # by which the decoder can reduce at no cost
_ORIENTATION = 0x0112  # EXIF's tag
_MAX_READS = 200_000  # of a decoder; an image of 20 MB in strips of one row needs ten thousand


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The size of an image that is not decoded yet. `decoder_bytes`: the decoder's memory for each pixel."""

    width: int
    height: int
    is_jpeg: bool
    decoder_bytes: int

    @property
    def pixels(self) -> int:
        return self.width * self.height

    def choose_factor(self, side: int | None) -> int:
        """Choose the factor by which width and height are reduced. `side`: see find_image_side."""
        if side is None or self.pixels <= LARGE_IMAGE:
            return 1
        return max(1, min(self.width, self.height) // (_OVERSAMPLING * side))

    def count_kept_bytes(self, factor: int) -> int:
        """Return the bytes that the image takes until the processor is done."""
        return KEPT_BYTES * -(-self.width // factor) * -(-self.height // factor)

    def count_decoder_bytes(self, factor: int) -> int:
        """Return the additional bytes that the image takes while it is decoded."""
        scales = _JPEG_SCALES if self.is_jpeg else ()
        scale = next((each for each in scales if each <= factor), 1)
        return self.decoder_bytes * self.pixels + 4 * self.pixels // scale**2


def read_header(data: bytes, max_pixels: int) -> ImageHeader:
    """Read the header of an image. MediaError if it has more than `max_pixels`, or is no image."""
    try:
        with _open(data) as image:
            if image.width * image.height > max_pixels:
                size = f"{image.width} x {image.height}"
                raise MediaError(f"the image has {size} pixels, more than media.max_pixels ({max_pixels})")
            is_jpeg, is_progressive = image.format in _JPEG, bool(image.info.get("progressive"))
            # The coefficients of a progressive JPEG, at full size; the whole picture in some other decoders.
            extra = 6 if is_progressive else 0 if is_jpeg or image.format in ("PNG", "BMP") else 4
            return ImageHeader(image.width, image.height, is_jpeg, extra)
    except MediaError:
        raise
    except Exception as exc:  # decoders of untrusted bytes raise exceptions of any class
        raise _make_error(data) from exc


def decode_image(data: bytes, factor: int = 1) -> Image:
    """Decode an image to RGB, and reduce it by a factor. MediaError if it is damaged."""
    try:
        with _open(data) as image:
            width = image.width
            if image.format in _JPEG and factor > 1:
                image.draft("RGB", (image.width // factor, image.height // factor))
            image.load()
            scale = round(width / image.width)  # by which the decoder of a JPEG has reduced it
            return _rotate(_convert_to_rgb(image, factor // scale), image.getexif().get(_ORIENTATION, 1))
    except Exception as exc:  # decoders of untrusted bytes raise exceptions of any class
        raise _make_error(data) from exc


def _open(data: bytes) -> Image:
    from PIL import Image as images

    images.MAX_IMAGE_PIXELS = None  # PIL only warns, at a size of its own; `read_header` checks it
    return images.open(_CountedReads(data), formats=_FORMATS)


class _CountedReads(io.BytesIO):
    """A file that is read so many times at most. PIL looks for the parts of a file in Python, a few bytes at
    a time, and would hold up all other threads for a minute where each byte looks like one."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._left = _MAX_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it takes more than {_MAX_READS:,} reads")
        return super().read(size)


def _make_error(data: bytes) -> MediaError:
    logger.debug("image cannot be decoded", exc_info=True)
    if data[4:8] == b"ftyp" and any(brand in data[8:_BRANDS_END] for brand in _HEIC):
        return MediaError("HEIC images, which phones make, are not read; send it as JPEG or PNG")
    return MediaError(f"not a readable image ({', '.join(_FORMATS[:6])}), or a damaged one")


def _convert_to_rgb(image: Image, factor: int) -> Image:
    """Converts and reduces strip by strip, so that no other copy of the whole image is needed."""
    from PIL import Image as images

    found = images.new("RGB", (-(-image.width // factor), -(-image.height // factor)))
    rows = max(1, _STRIP_PIXELS // (image.width * factor)) * factor
    for top in range(0, image.height, rows):
        strip = image.crop((0, top, image.width, min(top + rows, image.height)))
        converted = _convert_strip(strip)
        found.paste(converted.reduce(factor) if factor > 1 else converted, (0, top // factor))
    return found


def _convert_strip(image: Image) -> Image:
    from PIL import Image as images

    if image.has_transparency_data:
        white = images.new("RGBA", image.size, "white")
        return images.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    if image.mode.startswith("I"):
        # 16 bits per pixel, which convert() alone would clip
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    return image.convert("RGB")


def _rotate(image: Image, orientation: int) -> Image:
    """Turns an image upright; `orientation` is EXIF's."""
    from PIL import ImageOps

    if orientation not in range(2, 9):
        return image
    image.getexif()[_ORIENTATION] = orientation
    return ImageOps.exif_transpose(image)
