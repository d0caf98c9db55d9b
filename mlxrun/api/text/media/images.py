"""Loads the images and videos of requests: data URLs, files under the allowed folders, URLs if allowed.

The pages of PDFs are images too. The bytes of a file are limited before it is read, its pixels before
decoding, and the memory of all decoded images and frames while they are in use. Every failure is a
MediaError. At most `parallel` files are read at once; reading and decoding run on worker threads, PDFs and
videos in processes.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mlxrun.api.text.media.documents import (
    BASE64_PDF,
    PDF_START,
    Document,
    PageRef,
    list_pages,
    repeat_images,
)
from mlxrun.api.text.media.image_decoding import LARGE_IMAGE, ImageHeader, decode_image, read_header
from mlxrun.api.text.media.image_fetch import SizeLimit, fetch_media, is_public
from mlxrun.api.text.media.image_memory import get_image_memory
from mlxrun.api.text.media.image_side import find_image_side
from mlxrun.api.text.media.media_support import check_model_takes, get_media_code
from mlxrun.api.text.media.pdf_process import PIXEL_BYTES, draw_pages, measure_pages
from mlxrun.api.text.media.videos import ChosenFrames, choose_frames, read_video
from mlxrun.api.text.messages import DocumentRef, ImageRef, Message, VideoRef
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.config.image_bytes import DEFAULT_IMAGE_BYTES
from mlxrun.config.settings import MediaSettings
from mlxrun.config.video_sampling import Video
from mlxrun.core.errors import MediaError
from mlxrun.core.field_errors import shorten
from mlxrun.core.workers import IMAGES, PDFS, VIDEOS

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")
_DATA = re.compile(r"data:(?P<type>[^;,]*)(?P<options>(?:;[^;,]*)*),", re.IGNORECASE)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_IMAGE, _PDF, _VIDEO = "image/...", "application/pdf", "video/..."  # what data URLs say
_ANY_TYPES = ("", "application/octet-stream", "binary/octet-stream")  # the data itself says what it is


class MediaLoader:
    """Loads the images and videos of many requests. `base` is the job file's folder; None (the server)
    refuses paths. `memory_bytes`: of all decoded images at a time."""

    def __init__(
        self,
        settings: MediaSettings,
        base: Path | None,
        *,
        memory_bytes: int = DEFAULT_IMAGE_BYTES,
        parallel: int = 4,
        public: Callable[[str], bool] = is_public,
    ) -> None:
        self._settings = settings
        self._base = base.resolve() if base is not None else None
        self._roots = (
            [(self._base / root).resolve() for root in settings.roots] if self._base is not None else []
        )
        self._slots = asyncio.Semaphore(parallel)
        self._memory_bytes = memory_bytes
        self._public = public

    async def open_documents(
        self, messages: Sequence[Message], refs: Sequence[ImageRef], model: ModelInfo
    ) -> tuple[list[Message], tuple[ImageRef, ...]]:
        """Messages and their images with the pages of each PDF in its place."""
        check_model_takes(refs, model)
        documents = [ref for ref in refs if isinstance(ref, DocumentRef)]
        if not documents:
            return list(messages), tuple(refs)
        most = self._settings.max_pages
        if len(documents) > most:  # each has a page at least, so none need be opened
            text = f"{len(documents)} PDFs have more pages than media.max_pages ({most})"
            raise _make_error(documents[most], text)
        opened = dict(zip(documents, await _gather(map(self._open_document, documents)), strict=True))
        pages = sum(len(document.sizes) for document in opened.values())
        if pages > most:
            text = f"the PDFs have {pages} pages together, and media.max_pages allows {most}"
            raise _make_error(documents[-1], text)
        found = [
            list_pages(opened[ref], ref.param) if isinstance(ref, DocumentRef) else [ref] for ref in refs
        ]
        return repeat_images(messages, [len(each) for each in found]), tuple(chain.from_iterable(found))

    async def _open_document(self, ref: DocumentRef) -> Document:
        with _name_errors(ref):
            async with self._slots:
                data = await self._read(ref.url, _PDF)
            sizes = await PDFS.run(measure_pages, data, self._settings.max_pages, self._settings.pdf_dpi)
        return Document(data, sizes)

    @asynccontextmanager
    async def load_images(
        self, refs: Sequence[ImageRef], model: ModelInfo
    ) -> AsyncIterator[list[Image | Video]]:
        """The decoded images and videos of a request, for use within the block: their memory counts until its
        end. Of several errors the first in the order of `refs` is raised."""
        if not refs:
            yield []
            return
        check_model_takes(refs, model)
        self._check_count(refs)
        read = await _gather(self._read_image(ref, model) for ref in refs)
        headers = [header for _, header in read]
        is_large = any(isinstance(h, ImageHeader) and h.pixels > LARGE_IMAGE for h in headers)
        side = await IMAGES.run(find_image_side, model) if is_large else None
        factors = [header.choose_factor(side) for header in headers]
        needed = self._count_bytes(headers, factors, refs)
        async with get_image_memory(self._memory_bytes).hold(needed):
            images: list[Image | Video] = []
            for ref, factor in zip(refs, factors, strict=True):
                data, header = read.pop(0)
                with _name_errors(ref):
                    if isinstance(header, ChosenFrames):
                        images.append(await VIDEOS.run(read_video, data, header, self._settings))
                    elif not isinstance(ref, PageRef):
                        images.append(await IMAGES.run(decode_image, data, factor))
                    elif ref.page == 0:  # all pages of a document are in the request, one after the other
                        images += await PDFS.run(draw_pages, data, ref.document.sizes, self._settings.pdf_dpi)
                del data
            yield images

    def _check_count(self, refs: Sequence[ImageRef]) -> None:
        videos = [ref for ref in refs if isinstance(ref, VideoRef)]
        images = [ref for ref in refs if not isinstance(ref, (PageRef, VideoRef))]
        limits = (
            ("images", images, self._settings.max_images),
            ("videos", videos, self._settings.max_videos),
        )
        for name, found, most in limits:
            if len(found) > most:
                text = f"{len(found)} {name} are more than media.max_{name} ({most})"
                raise _make_error(found[most], text)

    async def _read_image(self, ref: ImageRef, model: ModelInfo) -> tuple[bytes, ImageHeader | ChosenFrames]:
        if isinstance(ref, PageRef):
            return ref.document.data, ImageHeader(*ref.document.sizes[ref.page], False, PIXEL_BYTES)
        is_video = isinstance(ref, VideoRef)
        with _name_errors(ref):
            async with self._slots:
                data = await self._read(ref.url, _VIDEO if is_video else _IMAGE)
            if is_video and model.video_sampling is not None:
                return data, await VIDEOS.run(choose_frames, data, self._settings, model.video_sampling)
            return data, await asyncio.to_thread(read_header, data, self._settings.max_pixels)

    def _count_bytes(
        self, headers: Sequence[ImageHeader | ChosenFrames], factors: Sequence[int], refs: Sequence[ImageRef]
    ) -> int:
        """The bytes that the images of a request need at once: decoded one after the other, and kept. Raises
        MediaError if they never fit."""
        kept = decoding = 0
        for header, factor, ref in zip(headers, factors, refs, strict=True):
            kept += header.count_kept_bytes(factor)
            decoding = max(decoding, header.count_decoder_bytes(factor))
            if kept + decoding > self._memory_bytes:
                text = (
                    f"the images up to this one need {(kept + decoding) / 1e6:.0f} MB when they are decoded"
                )
                limit = f"media.memory_bytes ({self._memory_bytes / 1e6:.0f} MB)"
                raise _make_error(ref, f"{text}, more than {limit}")
        return kept + decoding

    async def _read(self, url: str, kind: str = _IMAGE) -> bytes:
        scheme = _SCHEME.match(url)
        if scheme is not None and scheme[1].lower() in ("http", "https") and self._settings.allow_urls:
            return await fetch_media(url, self._settings, self._get_most_bytes(kind), self._public)
        return await asyncio.to_thread(self.read_local, url, kind)

    def read_local(self, url: str, kind: str = _IMAGE) -> bytes:
        """The bytes of an image or PDF, of a data URL or path; it blocks. Raises MediaError, also for other
        URLs."""
        if not url:
            expected = f"the file is empty; expected data:{_PDF};base64,..."
            raise MediaError(expected if kind == _PDF else "the url is empty")
        if kind == _PDF and url.startswith(BASE64_PDF):
            url = f"data:{_PDF};base64,{url}"
        scheme = _SCHEME.match(url)
        most = self._get_most_bytes(kind)
        if scheme is None:
            return self._read_file(url, most)
        if scheme[1].lower() == "data":
            return self._read_data(url, kind, most)
        if scheme[1].lower() in ("http", "https"):
            raise MediaError("URLs are not fetched; send a data: URL, or set media.allow_urls: true")
        usable = ["a data: URL"]
        if self._base is not None:
            usable.append("a path")
        if self._settings.allow_urls:
            usable.append("an http(s) URL")
        raise MediaError(f"{scheme[1]}: URLs are not supported; use {' or '.join(usable)}")

    def _read_data(self, url: str, kind: str, most: SizeLimit) -> bytes:
        head = _DATA.match(url)
        wrong = MediaError(f"expected data:{kind};base64,...")
        if head is None:
            raise wrong
        is_untyped = kind == _PDF and head["type"].lower() in _ANY_TYPES
        if not is_untyped and not head["type"].lower().startswith(kind.removesuffix("...")):
            raise wrong
        if not head["options"].lower().endswith(";base64"):
            raise MediaError("data URLs must be base64")
        most.check((len(url) - head.end()) * 3 // 4 - 2)  # at most two bytes are padding
        try:
            data = base64.b64decode(url[head.end() :].encode("ascii"), validate=True)
        except (ValueError, binascii.Error) as exc:
            raise MediaError("not valid base64") from exc
        most.check(len(data))
        if is_untyped and not data.startswith(PDF_START):
            raise wrong
        return data

    def _read_file(self, name: str, most: SizeLimit) -> bytes:
        """Reads a file. Links are resolved before the check, so that none leads out of the roots."""
        name_shown = shorten(name)
        if self._base is None:
            raise MediaError("file paths are not supported on the server; send a data: URL")
        try:
            path = (self._base / name).resolve()
            if not any(path.is_relative_to(root) for root in self._roots):
                raise MediaError(f"{name_shown!r} is outside media.roots")
            info = path.stat()
            if not stat.S_ISREG(info.st_mode):
                raise MediaError(f"{name_shown!r} is not a file")
            most.check(info.st_size)
            with path.open("rb") as file:
                data = file.read(most.size + 1)
        except FileNotFoundError as exc:
            raise MediaError(f"{name_shown!r} does not exist (paths are relative to the job file)") from exc
        except (OSError, ValueError, RuntimeError) as exc:  # unreadable, a NUL in the name, a loop of links
            reason = exc.strerror if isinstance(exc, OSError) else str(exc)
            raise MediaError(f"{name_shown!r} cannot be read: {reason}") from exc
        most.check(len(data))
        return data

    def _get_most_bytes(self, kind: str) -> SizeLimit:
        if kind == _VIDEO:
            return SizeLimit("media.video_max_bytes", self._settings.video_max_bytes)
        return SizeLimit("media.max_bytes", self._settings.max_bytes)


async def _gather(tasks: Iterable[Awaitable[T]]) -> list[T]:
    """All results; of several errors the first in order, once all have ended."""
    found = []
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found


def _make_error(ref: ImageRef, text: str) -> MediaError:
    return MediaError(f"{ref.param}: {text}", param=ref.param, code=get_media_code(ref))


@contextmanager
def _name_errors(ref: ImageRef) -> Iterator[None]:
    """Errors about an image, a PDF or a video name the field that has it, and have its code."""
    try:
        yield
    except MediaError as exc:
        raise _make_error(ref, str(exc)) from exc
