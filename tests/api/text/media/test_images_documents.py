"""PDFs of requests: where they may come from, their limits, and the order of pages and images."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from mlxrun.api.text.media.images import MediaLoader, get_image_memory
from mlxrun.api.text.media.media_kinds import PDF, MediaRef
from mlxrun.config.settings import MediaSettings
from mlxrun.core.errors import MediaError, RequestError
from tests.helpers.anthropic_api import RED
from tests.helpers.pdf_files import RGB, make_pdf, pdf_url
from tests.helpers.tokenizers import FakeModelInfo

VISION = FakeModelInfo(vision=True)
PNG = MediaRef(f"data:image/png;base64,{RED}", "png")
NAMES = {rgb: name for name, rgb in RGB.items()}


def make_messages(count: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image"}] * count}]


async def load(
    *refs: MediaRef, base: Path | None = None, memory: int = 10**9, **options: Any
) -> tuple[list[str], list[tuple[int, int]]]:
    """The colour and the size of each image; as many parts as images."""
    loader = MediaLoader(MediaSettings(**options), base, memory_bytes=memory)
    messages, opened = await loader.open_documents(make_messages(len(refs)), refs, VISION)
    async with loader.load_images(opened, VISION) as images:
        assert [len(message["content"]) for message in messages] == [len(images)]
        colours = [NAMES[image.getpixel((0, 0))] for image in images]  # type: ignore[index]
        return colours, [image.size for image in images]


def document(*colours: str, param: str = "pdf") -> MediaRef:
    return MediaRef(pdf_url(make_pdf(*colours)), param, PDF)


async def test_pages_and_images_in_their_order() -> None:
    refs = [document("blue", "green"), PNG, document("green", "blue", "red", param="other")]
    colours, sizes = await load(*refs, pdf_dpi=72)
    assert colours == ["blue", "green", "red", "green", "blue", "red"]
    assert sizes[0] == (32, 48) and sizes[2] != (32, 48)
    assert (await load(*refs[::-1]))[0] == ["green", "blue", "red", "red", "blue", "green"]


async def test_the_same_document_twice() -> None:
    twice = [document("blue", "green"), document("blue", "green")]
    assert (await load(*twice))[0] == ["blue", "green"] * 2


async def test_pdfs_that_do_not_say_what_they_are() -> None:
    """Raw base64, and data of no type in particular: their first bytes say it."""
    data = make_pdf("blue")
    raw = base64.b64encode(data).decode()
    untyped = [pdf_url(data, kind) for kind in ("application/octet-stream", "Application/Octet-Stream", "")]
    refs = [MediaRef(url, "p", PDF) for url in (raw, *untyped)]
    assert (await load(*refs))[0] == ["blue"] * 4
    with pytest.raises(MediaError, match="^p: it has more than media.max_bytes"):
        await load(refs[0], max_bytes=len(data) - 1)
    with pytest.raises(MediaError, match="^p: "):
        await load(MediaRef(raw, "p"))


async def test_dots_per_inch() -> None:
    assert (await load(document("blue"), pdf_dpi=36))[1] == [(16, 24)]
    assert (await load(document("blue")))[1] == [(64, 96)]


async def test_pages_are_no_images_of_the_limit_of_images() -> None:
    assert len((await load(document(*["red"] * 5), PNG, max_images=1, max_pages=5))[0]) == 6
    with pytest.raises(MediaError, match="^pdf: the PDF has 5 pages, and media.max_pages allows 4") as caught:
        await load(document(*["red"] * 5), max_pages=4)
    assert caught.value.param == "pdf"
    with pytest.raises(MediaError, match="^b: the PDFs have 5 pages together, and media.max_pages allows 4"):
        await load(document("red", "red", param="a"), document(*["red"] * 3, param="b"), max_pages=4)


async def test_paths_in_jobs(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(make_pdf("green"))
    assert (await load(MediaRef("a.pdf", "p", PDF), base=tmp_path))[0] == ["green"]
    with pytest.raises(MediaError, match="^p: file paths are not supported on the server"):
        await load(MediaRef("a.pdf", "p", PDF))
    with pytest.raises(MediaError, match="^p: .* is outside media.roots"):
        await load(MediaRef("../a.pdf", "p", PDF), base=tmp_path)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "the file is empty; expected data:application/pdf;base64,"),
        ("https://x.org/a.pdf", "URLs are not fetched"),
        (f"data:image/png;base64,{RED}", "expected data:application/pdf;base64,"),
        ("data:text/plain;base64,AAAA", "expected data:application/pdf;base64,"),
        (pdf_url(b"junk"), "not a readable PDF"),
        (f"data:application/octet-stream;base64,{RED}", "expected data:application/pdf;base64,"),
        ("JVBERi0=?", "not valid base64"),
    ],
)
async def test_what_is_refused(url: str, message: str) -> None:
    with pytest.raises(MediaError, match=f"^p: {message}"):
        await load(MediaRef(url, "p", PDF))
    with pytest.raises(MediaError, match="^p: expected data:image/"):
        await load(MediaRef(pdf_url(make_pdf("red")), "p"))


async def test_a_pdf_that_is_too_large() -> None:
    data = make_pdf("red")
    with pytest.raises(MediaError, match="^pdf: it has more than media.max_bytes"):
        await load(document("red"), max_bytes=len(data) - 1)
    assert (await load(document("red"), max_bytes=len(data)))[0] == ["red"]


async def test_the_memory_of_pages_counts() -> None:
    """As that of images does, and it is free again."""
    page, most = 16 * 64 * 96, 2 * 16 * 64 * 96 + 8 * 64 * 96
    assert len((await load(document("red", "blue"), memory=most))[0]) == 2
    with pytest.raises(MediaError, match="^pdf: .* more than media.memory_bytes"):
        await load(document("red", "blue"), memory=most - page // 16)
    with pytest.raises(MediaError, match="^pdf: .* more than media.memory_bytes"):
        await load(document("red", "blue", "red"), memory=most)
    assert get_image_memory(most).used == 0


async def test_a_text_model_says_what_to_do() -> None:
    loader = MediaLoader(MediaSettings(), None)
    with pytest.raises(
        RequestError, match="pdf: the model 'fake' does not accept images, which the pages of"
    ):
        await loader.open_documents(make_messages(1), [MediaRef("junk", "pdf", PDF)], FakeModelInfo())
    model = FakeModelInfo(vision=True)
    assert await loader.open_documents(make_messages(1), [PNG], model) == (make_messages(1), (PNG,))


async def test_more_documents_than_pages_are_refused_unread() -> None:
    """No process is started for them."""
    junk = [MediaRef(pdf_url(b"junk"), f"p{at}", PDF) for at in range(4)]
    with pytest.raises(MediaError, match="^p3: 4 PDFs have more pages than media.max_pages") as caught:
        await load(*junk, max_pages=3)
    assert caught.value.param == "p3"
    with pytest.raises(MediaError, match="^p0: not a readable PDF"):
        await load(*junk, max_pages=4)
