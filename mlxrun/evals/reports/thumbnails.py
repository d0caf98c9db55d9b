"""Small copies of the images of prompts, as data URLs that a page may contain."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlxrun.config.settings import MediaSettings
from mlxrun.core.errors import MediaError

SIDE = 320  # pixels of a thumbnail's longer side
FULL_SIDE = 1024  # with `--full`
MAX_BYTES = 30_000_000  # of all thumbnails of a report


class Thumbnails:
    """Makes thumbnails of images below `folder`, and of data URLs; nothing is fetched. Those made are kept,
    as many lines may have the same image."""

    def __init__(self, folder: Path, media: Mapping[str, Any], *, full: bool = False) -> None:
        """`media`: the section of the run's config. The images may be wherever they could be for the run."""
        from mlxrun.api.text.media.images import MediaLoader

        known = {key: media[key] for key in ("roots", "max_bytes", "max_pixels") if key in media}
        self._loader = MediaLoader(MediaSettings(**known), folder)
        self._max_pixels = MediaSettings(**known).max_pixels
        self._side = FULL_SIDE if full else SIDE
        self._made: dict[bytes, tuple[str, str]] = {}
        self._bytes = 0

    def make(self, source: str) -> tuple[str, str]:
        """The thumbnail of a data URL or path as a data URL, and a name for the image. Without a thumbnail
        the first is empty, and the second gives the reason."""
        key = hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest()
        if key not in self._made:
            name = "inline image" if source.startswith("data:") else source[:200]
            try:
                self._made[key] = self._encode(source), name
            except MediaError as error:
                self._made[key] = "", f"{name} ({error})"
        return self._made[key]

    def _encode(self, source: str) -> str:
        from mlxrun.api.text.media.image_decoding import decode_image, read_header

        if self._bytes >= MAX_BYTES:
            raise MediaError(f"the images of this report have more than {MAX_BYTES // 10**6} MB")
        data = self._loader.read_local(source)
        header = read_header(data, self._max_pixels)
        image = decode_image(data, max(1, min(header.width, header.height) // (4 * self._side)))
        image.thumbnail((self._side, self._side))
        file = io.BytesIO()
        image.save(file, "WEBP", quality=80)
        url = "data:image/webp;base64," + base64.b64encode(file.getvalue()).decode()
        self._bytes += len(url)
        return url
