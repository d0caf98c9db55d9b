"""Loads the images of requests: data URLs, files under the allowed folders, and URLs if the config allows.

The bytes of an image are limited before it is read, its pixels before decoding. The result is RGB, rotated
as the EXIF data says, transparency on white, the first frame of an animation. Every failure is a MediaError.
At most `parallel` images are loaded at once; reading and decoding run on worker threads.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import logging
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mlxrun.config.settings import MediaSettings
from mlxrun.errors import MediaError
from mlxrun.text.field_errors import shorten
from mlxrun.text.image_fetch import fetch_image, is_public

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

_DATA = re.compile(r"data:(?P<type>[^;,]*)(?P<options>(?:;[^;,]*)*),", re.IGNORECASE)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")


class MediaLoader:
    """Loads the images of many requests. `base` is the job file's folder; None (the server) refuses paths."""

    def __init__(
        self,
        settings: MediaSettings,
        base: Path | None,
        *,
        parallel: int = 4,
        public: Callable[[str], bool] = is_public,
    ) -> None:
        self._settings = settings
        self._base = base.resolve() if base is not None else None
        self._roots = (
            [(self._base / root).resolve() for root in settings.roots] if self._base is not None else []
        )
        self._slots = asyncio.Semaphore(parallel)
        self._public = public

    async def load(self, url: str, param: str) -> Image:
        """The image behind `url`; errors name `param`."""
        async with self._slots:
            try:
                data = await self._read(url)
                return await asyncio.to_thread(decode_image, data, self._settings.max_pixels)
            except MediaError as exc:
                raise MediaError(f"{param}: {exc}", param=param) from exc

    async def _read(self, url: str) -> bytes:
        if not url:
            raise MediaError("the url is empty")
        scheme = _SCHEME.match(url)
        if scheme is None:
            return await asyncio.to_thread(self._read_file, url)
        if scheme[1].lower() == "data":
            return await asyncio.to_thread(self._read_data, url)
        if scheme[1].lower() in ("http", "https"):
            if not self._settings.allow_urls:
                raise MediaError(
                    "URLs are not fetched; send the image as a data: URL, or set media.allow_urls: true"
                )
            return await fetch_image(url, self._settings, self._public)
        usable = ["a data: URL"]
        if self._base is not None:
            usable.append("a path")
        if self._settings.allow_urls:
            usable.append("an http(s) URL")
        raise MediaError(f"{scheme[1]}: URLs are not supported; use {' or '.join(usable)}")

    def _read_data(self, url: str) -> bytes:
        head = _DATA.match(url)
        if head is None or not head["type"].lower().startswith("image/"):
            raise MediaError("expected data:image/...;base64,...")
        if not head["options"].lower().endswith(";base64"):
            raise MediaError("data URLs must be base64")
        self._check_bytes((len(url) - head.end()) * 3 // 4 - 2)  # at most two bytes are padding
        try:
            data = base64.b64decode(url[head.end() :].encode("ascii"), validate=True)
        except (ValueError, binascii.Error) as exc:
            raise MediaError("not valid base64") from exc
        self._check_bytes(len(data))
        return data

    def _read_file(self, name: str) -> bytes:
        """Reads a file. Links are resolved before the check, so that none leads out of the roots."""
        name_shown = shorten(name)
        if self._base is None:
            raise MediaError("file paths are not supported on the server; send the image as a data: URL")
        try:
            path = (self._base / name).resolve()
            if not any(path.is_relative_to(root) for root in self._roots):
                raise MediaError(f"{name_shown!r} is outside media.roots")
            info = path.stat()
            if not stat.S_ISREG(info.st_mode):
                raise MediaError(f"{name_shown!r} is not a file")
            self._check_bytes(info.st_size)
            with path.open("rb") as file:
                data = file.read(self._settings.max_bytes + 1)
        except FileNotFoundError as exc:
            raise MediaError(f"{name_shown!r} does not exist (paths are relative to the job file)") from exc
        except (OSError, ValueError, RuntimeError) as exc:  # unreadable, a NUL in the name, a loop of links
            reason = exc.strerror if isinstance(exc, OSError) else str(exc)
            raise MediaError(f"{name_shown!r} cannot be read: {reason}") from exc
        self._check_bytes(len(data))
        return data

    def _check_bytes(self, size: int) -> None:
        if size > self._settings.max_bytes:
            raise MediaError(f"the image has more than media.max_bytes ({self._settings.max_bytes})")


def decode_image(data: bytes, max_pixels: int) -> Image:
    """Decodes an image to RGB. Its size is checked from the header, before any pixel is decoded."""
    from PIL import Image, ImageOps

    Image.MAX_IMAGE_PIXELS = None  # PIL only warns, at a size of its own; the check is below
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            pixels = image.width * image.height
            if pixels > max_pixels:
                size = f"{image.width} x {image.height}"
                raise MediaError(f"the image has {size} pixels, more than media.max_pixels ({max_pixels})")
            image.load()
            return _convert_to_rgb(ImageOps.exif_transpose(image))
    except MediaError:
        raise
    except Exception as exc:  # decoders of untrusted bytes raise exceptions of any class
        logger.debug("image cannot be decoded", exc_info=True)
        raise MediaError(f"not a readable image ({', '.join(_FORMATS[:6])}), or a damaged one") from exc


def _convert_to_rgb(image: Image) -> Image:
    from PIL import Image as images

    if image.has_transparency_data:
        white = images.new("RGBA", image.size, "white")
        return images.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    if image.mode.startswith("I"):
        # 16 bits per pixel, which convert() alone would clip
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    return image.convert("RGB")
