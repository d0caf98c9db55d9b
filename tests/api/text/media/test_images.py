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

import numpy as np
import pytest
from PIL import Image

from mlxrun.api.text.media import media_sources
from mlxrun.api.text.media.images import (
    MAX_DOWNLOADS,
    MAX_OWN_DOWNLOADS,
    MediaLoader,
    get_image_memory,
)
from mlxrun.api.text.media.media_kinds import PDF, MediaRef
from mlxrun.config.settings import MediaSettings
from mlxrun.core.errors import MediaError, RequestError
from mlxrun.core.request import ProcessedPrompt
from tests.helpers.pdf_files import make_pdf, pdf_url
from tests.helpers.raw_clients import until
from tests.helpers.tokenizers import FakeModelInfo

VISION = FakeModelInfo(vision=True)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def plain(size: tuple[int, int] = (3, 2), colour: str = "red") -> Image.Image:
    return Image.new("RGB", size, colour)


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


async def load_one(loader: MediaLoader, url: str, param: str = "messages[0]") -> Image.Image:
    async with loader.load_images([MediaRef(url, param)], VISION) as images:
        return images[0]


def load(url: str, base: Path | None = None, **options: Any) -> Image.Image:
    return asyncio.run(load_one(MediaLoader(MediaSettings(**options), base), url))


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


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:text/plain;base64,aGk=", "expected data:image/"),
        ("data:image/png,abc", "must be base64"),
        ("data:image/png;base64,a b", "not valid base64"),
        ("data:image/png;base64,\u00e9", "not valid base64"),
        ("data:nonsense", "expected data:image/"),
        ("data:Video/mp4;base64,AAAA", "base64,...; the part video_url takes video/mp4"),
        ("data:application/pdf;base64,JVBERi0=", "base64,...; the part file takes application/pdf"),
        ("data:application/octet-stream;base64,JVBERi0=", "expected data:image/"),
        ("ftp://model_info/x.png", "ftp: URLs are not supported; use a data: URL"),
        ("file:///etc/passwd", "file: URLs are not supported"),
        ("https://example.com/x.png", "set media.allow_urls: true"),
        ("x.png", "not supported on the server"),
        ("", "the url is empty"),
        *(
            (data_url(encoded(plain(), kind)).partition(",")[2], "expected data:image/...;base64,...")
            for kind in ("PNG", "JPEG", "GIF", "WEBP")
        ),
    ],
)
def test_refused_urls(url: str, words: str) -> None:
    assert words in refused(url)


def test_an_untyped_image_is_read_by_its_content() -> None:
    for kind in ("", "application/octet-stream"):
        assert load(data_url(encoded(plain()), kind)).size == (3, 2)


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
        return await asyncio.gather(*(load_one(loader, "a.png", f"m[{i}]") for i in range(20)))

    assert len(asyncio.run(load_all())) == 20


class SlowDownloads:
    """URLs that answer only when `end` is set. `running`: those that are fetched now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.end = asyncio.Event()
        self.running: list[str] = []
        monkeypatch.setattr(media_sources, "fetch_media", self.fetch)

    async def fetch(self, url: str, *_: Any) -> bytes:
        self.running.append(url)
        await self.end.wait()
        self.running.remove(url)
        return encoded(plain())


async def load_urls(loader: MediaLoader, name: str, count: int) -> int:
    """Load the images of one request, whose URLs have its name."""
    refs = [MediaRef(f"https://example.com/{name}/{i}", "m") for i in range(count)]
    async with loader.load_images(refs, VISION) as images:
        return len(images)


async def test_data_urls_do_not_wait_for_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = SlowDownloads(monkeypatch)
    loader = MediaLoader(MediaSettings(allow_urls=True), None)
    tasks = [asyncio.create_task(load_urls(loader, f"{i}", 4)) for i in range(4)]
    await until(lambda: len(downloads.running) >= 4)
    async with asyncio.timeout(60):
        assert (await load_one(loader, data_url(encoded(plain())))).size == (3, 2)
        pages = [MediaRef(pdf_url(make_pdf("red")), "pdf", PDF)]
        _, opened = await loader.open_documents(
            [{"role": "user", "content": [{"type": "image"}]}], pages, VISION
        )
    assert len(opened) == 1 and not any(task.done() for task in tasks)
    downloads.end.set()
    assert await asyncio.gather(*tasks) == [4] * 4


async def test_a_request_has_a_share_of_the_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    downloads = SlowDownloads(monkeypatch)
    loader = MediaLoader(MediaSettings(allow_urls=True), None)
    tasks = [asyncio.create_task(load_urls(loader, "many", 16))]
    await until(lambda: len(downloads.running) >= MAX_OWN_DOWNLOADS)
    tasks.append(asyncio.create_task(load_urls(loader, "one", 1)))
    await until(lambda: "https://example.com/one/0" in downloads.running)
    assert len(downloads.running) == MAX_OWN_DOWNLOADS + 1
    tasks += [asyncio.create_task(load_urls(loader, f"{i}", 16)) for i in range(8)]
    await until(lambda: len(downloads.running) >= MAX_DOWNLOADS)
    await asyncio.sleep(0)
    assert len(downloads.running) == MAX_DOWNLOADS
    downloads.end.set()
    assert await asyncio.gather(*tasks) == [16, 1, *[16] * 8]


# -- memory -----------------------------------------------------------------------------------------------


class Keeping(FakeModelInfo):
    """Its processor keeps squares of 500 pixels."""

    def process(self, text: str, images: Any) -> Any:
        return ProcessedPrompt((), (), {"pixel_values": np.zeros((3, 500, 500))})


def large(side: int = 2100) -> str:
    return data_url(encoded(plain((side, side))))


async def test_large_images_are_reduced_always_alike() -> None:
    """Alone and among others; small ones, and those of unknown processors, are not."""
    refs = [MediaRef(large(), "a"), MediaRef(data_url(encoded(plain())), "b")]
    loader = MediaLoader(MediaSettings(), None)
    for some in (refs[:1], refs):
        async with loader.load_images(some, Keeping(vision=True)) as images:
            assert [image.size for image in images] == [(1050, 1050), (3, 2)][: len(some)]
        async with loader.load_images(some, VISION) as images:
            assert images[0].size == (2100, 2100)


async def test_images_of_many_requests_stay_within_the_budget() -> None:
    """They wait for each other; what is too much for the budget is refused, whatever else runs."""
    most = 16 * 2 * 300**2 + 4 * 300**2
    loader = MediaLoader(MediaSettings(), None, memory_bytes=most)
    memory, held = get_image_memory(most), 0
    refs = [MediaRef(large(300), f"m[{i}]") for i in range(3)]

    async def use() -> None:
        nonlocal held
        async with loader.load_images(refs[:2], VISION) as images:
            assert len(images) == 2 and memory.used == most
            held += 1
            await asyncio.sleep(0.001)

    await asyncio.gather(*(use() for _ in range(5)))
    assert held == 5 and memory.used == 0
    with pytest.raises(MediaError, match=r"m\[2\]: .* more than media.memory_bytes") as caught:
        async with loader.load_images(refs, VISION):
            pass
    assert caught.value.param == "m[2]" and memory.used == 0


async def test_a_damaged_image_returns_its_memory() -> None:
    loader = MediaLoader(MediaSettings(), None, memory_bytes=10**8)
    good = encoded(plain((64, 64)), "JPEG")
    refs = [MediaRef(data_url(good), "a"), MediaRef(data_url(good[: len(good) // 2]), "b")]
    with pytest.raises(MediaError, match="^b: not a readable image"):
        async with loader.load_images(refs, VISION):
            pass
    assert get_image_memory(10**8).used == 0


async def test_the_first_error_in_the_order_of_the_images() -> None:
    refs = [MediaRef(large(3), "a"), MediaRef("data:image/png;base64,AAAA", "b"), MediaRef("x.png", "c")]
    for _ in range(3):
        with pytest.raises(MediaError, match="^b: "):
            async with MediaLoader(MediaSettings(), None).load_images(refs, VISION):
                pass
    with pytest.raises(MediaError, match="c: 3 images are more than media.max_images"):
        async with MediaLoader(MediaSettings(max_images=2), None).load_images(refs, VISION):
            pass
    with pytest.raises(RequestError, match="a: the model 'fake' does not accept images"):
        async with MediaLoader(MediaSettings(), None).load_images(refs, FakeModelInfo()):
            pass
    async with MediaLoader(MediaSettings(), None).load_images([], FakeModelInfo()) as images:
        assert images == []
