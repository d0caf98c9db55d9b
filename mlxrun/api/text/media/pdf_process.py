"""Draws the pages of a PDF in a process of its own (media_process.py), since PDFium is not thread-safe."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import IO, TYPE_CHECKING, Any

from mlxrun.api.text.media.media_process import (
    Size,
    read_exactly,
    read_size,
    run_child,
    start_reader,
    write_size,
)
from mlxrun.core.errors import MediaError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PAGE_PIXELS = 4_000_000
PIXEL_BYTES = 4  # of a page as PDFium draws it
SECONDS = 60  # of processor time
MEMORY = 2_000_000_000  # bytes of address space
_POINTS = 72  # to the inch
_PASSWORD = 4  # PDFium's error code


def measure_pages(data: bytes, max_pages: int, dpi: int) -> list[Size]:
    """Return the width and height in pixels of each page of a PDF. MediaError if the file is broken or
    encrypted, or has more than `max_pages`; Abandoned if nobody waits any more."""
    with _start(data, "measure", max_pages, dpi) as output:
        return list(iter(lambda: read_size(output), None))


def draw_pages(data: bytes, sizes: Sequence[Size], dpi: int) -> list[Image]:
    """Draw the pages in RGB, on white, with annotations and filled forms. `sizes`: as `measure_pages` returns
    them. Raises as it does."""
    from PIL import Image as images

    found = []
    with _start(data, "draw", len(sizes), dpi) as output:
        for size in sizes:
            if read_size(output) != size:
                raise EOFError
            pixels = read_exactly(output, size[0] * size[1] * PIXEL_BYTES)
            found.append(images.frombytes("RGB", size, pixels, "raw", "RGBX"))
    return found


def _start(data: bytes, task: str, max_pages: int, dpi: int) -> AbstractContextManager[IO[bytes]]:
    module = "mlxrun.api.text.media.pdf_process"
    return start_reader(module, (task, max_pages, dpi), data, seconds=SECONDS, memory=MEMORY, name="PDF")


# The child.


def read_file(data: bytes, target: IO[bytes], task: str, max_pages: str, dpi: str) -> None:
    """Write the size of each page of a PDF, and its pixels if the task is `draw`."""
    document = _open(data, int(max_pages))
    for number in range(len(document)):
        with _name_page(number):
            width, height = document.get_page_size(number)
            scale = min(int(dpi) / _POINTS, math.sqrt(MAX_PAGE_PIXELS / (width * height)))
            bitmap = _draw(document[number], scale) if task == "draw" else None
        if bitmap is None:
            write_size(target, (math.ceil(width * scale), math.ceil(height * scale)))
        else:
            write_size(target, (bitmap.width, bitmap.height))
            target.write(bitmap.buffer)
            bitmap.close()


def _open(data: bytes, max_pages: int) -> Any:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(data)
        document.init_forms()
    except pypdfium2.PdfiumError as error:
        if error.err_code == _PASSWORD:
            raise MediaError("the PDF is encrypted; send it without a password") from error
        raise MediaError("not a readable PDF, or a damaged one") from error
    count = len(document)
    if not 0 < count <= max_pages:
        raise MediaError(f"the PDF has {count} pages, and media.max_pages allows {max_pages}")
    return document


@contextlib.contextmanager
def _name_page(number: int) -> Iterator[None]:
    import pypdfium2

    try:
        yield
    except pypdfium2.PdfiumError as error:
        raise MediaError(f"page {number + 1} of the PDF is damaged") from error


def _draw(page: Any, scale: float) -> Any:
    bitmap = page.render(scale=scale, rev_byteorder=True, prefer_bgrx=True)
    page.close()
    return bitmap


if __name__ == "__main__":
    run_child(read_file)
