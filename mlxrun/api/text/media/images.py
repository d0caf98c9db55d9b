"""Loads the images, videos and audio of requests. The pages of PDFs are images too.

The pixels of a file are limited before it is decoded. The memory of all decoded images and frames in use is
limited too. A file that cannot be used is a MediaError. Reading and decoding run on worker threads, for PDFs,
videos and audio in processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from mlxrun.api.text.media.audio_process import DecodedAudio, load_audio
from mlxrun.api.text.media.image_decoding import LARGE_IMAGE, ImageHeader, decode_image, read_header
from mlxrun.api.text.media.image_side import find_image_side
from mlxrun.api.text.media.media_kinds import (
    AUDIO,
    IMAGE,
    PDF,
    VIDEO,
    MediaRef,
    Medium,
    check_model_takes,
)
from mlxrun.api.text.media.media_process import Size
from mlxrun.api.text.media.media_sources import MediaSources, is_public
from mlxrun.api.text.media.pdf_process import PIXEL_BYTES, draw_pages, measure_pages
from mlxrun.api.text.media.videos import ChosenFrames, choose_frames, read_video
from mlxrun.api.text.messages import Message
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.config.media_settings import DEFAULT_IMAGE_BYTES, Audio, AudioSampling, Video
from mlxrun.config.settings import MediaSettings
from mlxrun.core.errors import MediaError
from mlxrun.core.workers import AUDIO_FILES, IMAGES, PDFS, VIDEOS

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_DOWNLOADS, MAX_OWN_DOWNLOADS = 16, 4  # at once: of all requests, and of a request

T = TypeVar("T")
Header = ImageHeader | ChosenFrames | DecodedAudio


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A PDF that was read. `sizes`: the width and height of each page in pixels."""

    data: bytes
    sizes: Sequence[Size]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRef(MediaRef):
    """A page of a PDF; `url` is empty."""

    document: Document
    page: int


class SoundTurns:
    """Decodes the sounds of one request, few at a time, so that those of other requests come in between. Once
    they need more than `most` bytes, no more is decoded."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = 0
        self._turns = asyncio.Semaphore(AUDIO_FILES.threads)

    async def decode(self, data: bytes, sampling: AudioSampling, settings: MediaSettings) -> DecodedAudio:
        """Decode a sound. MediaError as `load_audio`, or if those before it need all memory."""
        async with self._turns:
            if self._used > self._most:
                limit = f"media.memory_bytes ({self._most / 1e6:.0f} MB)"
                raise MediaError(f"the audio before it needs more than {limit}")
            made = await AUDIO_FILES.run(load_audio, data, sampling, settings)
            self._used += made.count_kept_bytes(1)
            return made


class MediaLoader:
    """Loads the images, videos and audio of many requests. `base`: the folder of paths; None refuses paths.
    `memory_bytes`: of all decoded images at a time. `parallel`: how many files are read at once, without
    downloads."""

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
        self.sources = MediaSources(settings, base, public)
        self.slots = asyncio.Semaphore(parallel)
        self._downloads = asyncio.Semaphore(MAX_DOWNLOADS)
        self._hearing = asyncio.Semaphore(parallel)  # requests with samples that do not count yet
        self._memory_bytes = memory_bytes

    async def read(
        self, url: str, medium: Medium, own_downloads: AbstractAsyncContextManager[None] | None = None
    ) -> bytes:
        """Return the bytes of a medium. What is here already does not wait for downloads, which may be slow.
        `own_downloads`: limits those of one request."""
        if not self.sources.is_remote(url):
            async with self.slots:
                return await self.sources.read(url, medium)
        async with own_downloads or nullcontext(), self._downloads:
            return await self.sources.read(url, medium)

    async def open_documents(
        self, messages: Sequence[Message], refs: Sequence[MediaRef], model: ModelInfo
    ) -> tuple[list[Message], tuple[MediaRef, ...]]:
        """Return messages and their images, with the pages of each PDF in its place. RequestError if the
        model takes no images; MediaError if a PDF cannot be read, or there are too many pages."""
        check_model_takes(refs, model)
        documents = [ref for ref in refs if ref.medium is PDF]
        if not documents:
            return list(messages), tuple(refs)
        most = self._settings.max_pages
        if len(documents) > most:  # each has a page at least, so none need be opened
            text = f"{len(documents)} PDFs have more pages than media.max_pages ({most})"
            raise _make_error(documents[most], text)
        own = asyncio.Semaphore(MAX_OWN_DOWNLOADS)
        read = await _gather(self._open_document(ref, own) for ref in documents)
        opened = dict(zip(documents, read, strict=True))
        pages = sum(len(document.sizes) for document in opened.values())
        if pages > most:
            text = f"the PDFs have {pages} pages together, and media.max_pages allows {most}"
            raise _make_error(documents[-1], text)
        found = [
            [
                PageRef("", ref.param, PDF, document=opened[ref], page=page)
                for page in range(len(opened[ref].sizes))
            ]
            if ref.medium is PDF
            else [ref]
            for ref in refs
        ]
        return repeat_images(messages, [len(each) for each in found]), tuple(chain.from_iterable(found))

    async def _open_document(self, ref: MediaRef, own_downloads: asyncio.Semaphore) -> Document:
        with name_errors(ref):
            data = await self.read(ref.url, PDF, own_downloads)
            sizes = await PDFS.run(measure_pages, data, self._settings.max_pages, self._settings.pdf_dpi)
        return Document(data, sizes)

    @asynccontextmanager
    async def load_images(
        self, refs: Sequence[MediaRef], model: ModelInfo
    ) -> AsyncIterator[list[Image | Video | Audio]]:
        """Load the media of a request, for use within the block. Their memory counts until its
        end.

        Raises MediaError. Of several errors of downloads the first in the order of `refs` counts, then of
        others."""
        if not refs:
            yield []
            return
        check_model_takes(refs, model)
        self._check_count(refs)
        has_audio = any(ref.medium is AUDIO for ref in refs)
        own = asyncio.Semaphore(MAX_OWN_DOWNLOADS)
        ready = await _gather(self._download(ref, own) for ref in refs)  # before any sound takes its turn
        async with AsyncExitStack() as held:
            # Audio is decoded to know its length: few requests wait for memory with samples.
            async with self._hearing if has_audio else nullcontext():
                turns = SoundTurns(self._memory_bytes)
                read = await _gather(self._read_image(ref, model, turns, ready.pop(0)) for ref in refs)
                headers = [header for _, header in read]
                is_large = any(isinstance(h, ImageHeader) and h.pixels > LARGE_IMAGE for h in headers)
                side = await IMAGES.run(find_image_side, model) if is_large else None
                factors = [h.choose_factor(side) if isinstance(h, ImageHeader) else 1 for h in headers]
                needed = self._count_bytes(headers, factors, refs)
                await held.enter_async_context(get_image_memory(self._memory_bytes).hold(needed))
            images: list[Image | Video | Audio] = []
            for ref, factor in zip(refs, factors, strict=True):
                data, header = read.pop(0)
                with name_errors(ref):
                    if isinstance(header, DecodedAudio):
                        images.append(header.audio)
                    elif isinstance(header, ChosenFrames):
                        images.append(await VIDEOS.run(read_video, data, header, self._settings))
                    elif not isinstance(ref, PageRef):
                        images.append(await IMAGES.run(decode_image, data, factor))
                    elif ref.page == 0:  # all pages of a document are in the request, one after the other
                        images += await PDFS.run(draw_pages, data, ref.document.sizes, self._settings.pdf_dpi)
                del data
            yield images

    def _check_count(self, refs: Sequence[MediaRef]) -> None:
        for medium in (IMAGE, VIDEO, AUDIO):
            found = [ref for ref in refs if ref.medium is medium]
            most = medium.find_limit(self._settings, "max_count")
            if len(found) > most.size:
                name = f"{medium.plural} parts" if medium is AUDIO else medium.plural
                text = f"{len(found)} {name} are more than {most.name} ({most.size})"
                raise _make_error(found[most.size], text)

    async def _download(self, ref: MediaRef, own_downloads: asyncio.Semaphore) -> bytes | None:
        """Download a medium; None for one that is here already."""
        if isinstance(ref, PageRef) or not self.sources.is_remote(ref.url):
            return None
        with name_errors(ref):
            return await self.read(ref.url, ref.medium, own_downloads)

    async def _read_image(
        self, ref: MediaRef, model: ModelInfo, turns: SoundTurns, data: bytes | None
    ) -> tuple[bytes, Header]:
        """The bytes of a medium, and what they begin with. `data`: its bytes if they were downloaded."""
        if isinstance(ref, PageRef):
            return ref.document.data, ImageHeader(*ref.document.sizes[ref.page], False, PIXEL_BYTES)
        with name_errors(ref):
            if data is None:
                data = await self.read(ref.url, ref.medium)
            if ref.medium is VIDEO and model.video_sampling is not None:
                return data, await VIDEOS.run(choose_frames, data, self._settings, model.video_sampling)
            if ref.medium is AUDIO and model.audio_sampling is not None:
                return b"", await turns.decode(data, model.audio_sampling, self._settings)
            return data, await asyncio.to_thread(read_header, data, self._settings.max_pixels)

    def _count_bytes(
        self, headers: Sequence[Header], factors: Sequence[int], refs: Sequence[MediaRef]
    ) -> int:
        """The bytes that the images of a request need at once: decoded one after the other, and kept. Raises
        MediaError if they never fit."""
        kept = decoding = 0
        for header, factor, ref in zip(headers, factors, refs, strict=True):
            kept += header.count_kept_bytes(factor)
            decoding = max(decoding, header.count_decoder_bytes(factor))
            if kept + decoding > self._memory_bytes:
                needed = (kept + decoding) / 1e6
                text = f"the media up to this one need {needed:.0f} MB when they are decoded"
                limit = f"media.memory_bytes ({self._memory_bytes / 1e6:.0f} MB)"
                raise _make_error(ref, f"{text}, more than {limit}")
        return kept + decoding


def repeat_images(messages: Sequence[Message], counts: Sequence[int]) -> list[Message]:
    """Repeat each image, video or audio part of a chat's messages as often as `counts` says, in order."""
    take = iter(counts).__next__
    return [
        {**message, "content": list(_repeat(message["content"], take))}
        if isinstance(message["content"], list)
        else message
        for message in messages
    ]


def _repeat(parts: Sequence[dict[str, Any]], take: Callable[[], int]) -> Iterator[dict[str, Any]]:
    for part in parts:
        yield from [part] * (take() if part["type"] != "text" else 1)


async def _gather(tasks: Iterable[Awaitable[T]]) -> list[T]:
    """All results; of several errors the first in order, once all have ended. Nothing keeps the results then:
    an error that its own frame refers to would, until Python collects garbage."""
    found: list[Any] = await asyncio.gather(*tasks, return_exceptions=True)
    error = next((each for each in found if isinstance(each, BaseException)), None)
    if error is None:
        return found
    del found
    try:
        raise error
    finally:
        del error


def _make_error(ref: MediaRef, text: str) -> MediaError:
    return MediaError(f"{ref.param}: {text}", param=ref.param, code=ref.medium.code)


@contextmanager
def name_errors(ref: MediaRef) -> Iterator[None]:
    """Errors about a medium name the field that has it, and have its code."""
    try:
        yield
    except MediaError as exc:
        raise _make_error(ref, str(exc)) from exc


class ImageMemory:
    """A budget of `most` bytes, for one event loop. Requests get their shares in the order of their arrival,
    so none waits forever."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.used = 0
        self._turn = asyncio.Lock()  # of the request that waits longest
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Wait until `size` bytes are free, and hold them within the block. `size` is at most `most`."""
        assert size <= self.most
        async with self._turn:
            while self.used + size > self.most:
                self._freed.clear()
                await self._freed.wait()
            self.used += size
        try:
            yield
        finally:
            self.used -= size
            self._freed.set()


_memories: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, ImageMemory]] = WeakKeyDictionary()


def get_image_memory(most: int) -> ImageMemory:
    """Return the budget of `most` bytes that all requests and jobs of the running event loop share."""
    memories = _memories.setdefault(asyncio.get_running_loop(), {})
    return memories.setdefault(most, ImageMemory(most))
