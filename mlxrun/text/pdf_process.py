"""Draws the pages of a PDF, in a process of its own.

PDFium is not thread-safe, a broken file may crash it, and no call of it can be interrupted. The child has
limits of processor time and, on Linux, of memory, and ends as soon as nobody waits for it.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from mlxrun.errors import MediaError
from mlxrun.text.workers import end_by

if TYPE_CHECKING:
    from PIL.Image import Image

NICENESS = 5
MAX_PAGE_PIXELS = 4_000_000
PIXEL_BYTES = 4  # of a page as PDFium draws it
SECONDS = 60  # of processor time
MEMORY = 2_000_000_000  # bytes of address space
_POINTS = 72  # to the inch
_HEAD = struct.Struct("<II")  # width and height of a page; 0 and the length of an error message
_PASSWORD = 4  # PDFium's error code

Size = tuple[int, int]


def measure_pages(data: bytes, max_pages: int, dpi: int) -> list[Size]:
    """Width and height in pixels of each page of a PDF. Raises MediaError if the file is broken or encrypted,
    or has more than `max_pages`; Abandoned if nobody waits any more."""
    with _start(data, "measure", max_pages, dpi) as output:
        return list(iter(lambda: _read_size(output), None))


def draw_pages(data: bytes, sizes: Sequence[Size], dpi: int) -> list[Image]:
    """The pages in RGB, on white, with annotations and filled forms. `sizes`: what `measure_pages` found.
    Raises as it does."""
    from PIL import Image as images

    found = []
    with _start(data, "draw", len(sizes), dpi) as output:
        for size in sizes:
            if _read_size(output) != size:
                raise EOFError
            pixels = _read_exactly(output, size[0] * size[1] * PIXEL_BYTES)
            found.append(images.frombytes("RGB", size, pixels, "raw", "RGBX"))
    return found


@contextlib.contextmanager
def _start(data: bytes, task: str, max_pages: int, dpi: int) -> Iterator[IO[bytes]]:
    """The output of a child that has read the PDF; at the end, the child has succeeded."""
    numbers = map(str, (max_pages, dpi, SECONDS, MEMORY))
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # -P: files of the folder that the server was started in are no modules of the child.
    with (
        subprocess.Popen(
            [sys.executable, "-P", "-m", "mlxrun.text.pdf_process", task, *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        ) as process,
        end_by(process.kill),
    ):
        assert process.stdin is not None and process.stdout is not None
        is_complete = False
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin as source:
                source.write(data)
            yield process.stdout
            is_complete = True
        except EOFError:
            process.kill()
        if process.wait() != 0 or not is_complete:
            raise MediaError(
                f"the PDF cannot be read: its process was ended (it is broken, takes more than {SECONDS} "
                f"seconds of processor time, or more than {MEMORY / 1e9:g} GB of memory)"
            )


def _read_size(output: IO[bytes]) -> Size | None:
    """The size of the next page; None at the end."""
    head = output.read(_HEAD.size)
    if not head:
        return None
    if len(head) < _HEAD.size:
        raise EOFError
    width, height = _HEAD.unpack(head)
    if not width:
        raise MediaError(_read_exactly(output, height).decode())
    return width, height


def _read_exactly(output: IO[bytes], size: int) -> bytes:
    data = output.read(size)
    if len(data) < size:
        raise EOFError
    return data


# The child.


def main(source: IO[bytes], target: IO[bytes], task: str, max_pages: int, dpi: int) -> None:
    """Reads a PDF, and writes the size of each page, and its pixels if the task is `draw`."""
    data = source.read()
    try:
        document = _open(data, max_pages)
        for number in range(len(document)):
            with _name_page(number):
                width, height = document.get_page_size(number)
                scale, size = _scale_page(width, height, dpi)
                bitmap = _draw(document[number], scale) if task == "draw" else None
            if bitmap is None:
                target.write(_HEAD.pack(*size))
            else:
                target.write(_HEAD.pack(bitmap.width, bitmap.height))
                target.write(bitmap.buffer)
                bitmap.close()
    except MediaError as error:
        message = str(error).encode()
        target.write(_HEAD.pack(0, len(message)) + message)
    target.flush()


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


def _scale_page(width: float, height: float, dpi: int) -> tuple[float, Size]:
    """The factor from points to pixels, and the size in pixels."""
    scale = min(dpi / _POINTS, math.sqrt(MAX_PAGE_PIXELS / (width * height)))
    return scale, (math.ceil(width * scale), math.ceil(height * scale))


def _draw(page: Any, scale: float) -> Any:
    bitmap = page.render(scale=scale, rev_byteorder=True, prefer_bgrx=True)
    page.close()
    return bitmap


def _limit_resources(seconds: int, memory: int) -> None:
    import resource

    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


if __name__ == "__main__":
    pages, resolution, *limits = map(int, sys.argv[2:])
    _limit_resources(*limits)
    main(sys.stdin.buffer, sys.stdout.buffer, sys.argv[1], pages, resolution)
