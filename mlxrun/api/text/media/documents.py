"""PDFs in the messages of a request: each page becomes an image, in the place of the file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrun.api.text.media.media_process import Size
from mlxrun.api.text.messages import ImageRef, Message

PDF_START = b"%PDF-"
BASE64_PDF = "JVBERi0"  # how a PDF in base64 begins, which `file_data` may be without "data:" before it


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A PDF that was read. `sizes`: width and height of its pages in pixels."""

    data: bytes
    sizes: Sequence[Size]


@dataclass(frozen=True, slots=True)
class PageRef(ImageRef):
    """A page of a PDF; `url` is empty."""

    document: Document
    page: int


def list_pages(document: Document, param: str) -> list[ImageRef]:
    """The pages of a PDF in order. `param`: the path of the field that holds it."""
    return [PageRef("", param, document, page) for page in range(len(document.sizes))]


def repeat_images(messages: Sequence[Message], counts: Sequence[int]) -> list[Message]:
    """The messages of a chat with each image or video part as many times as `counts` says, in order."""
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
