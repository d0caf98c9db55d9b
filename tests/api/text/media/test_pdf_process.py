"""Pages of PDFs: their size, their order, what is refused, and processes that never outlive their limits."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import zlib
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mlxrun.api.text.media import media_process, pdf_process
from mlxrun.api.text.media.pdf_process import MAX_PAGE_PIXELS, draw_pages, measure_pages
from mlxrun.core import child_memory
from mlxrun.core.errors import MediaError
from mlxrun.core.workers import Lane
from tests.helpers.command_processes import start_program, suspend
from tests.helpers.pdf_files import (
    RGB,
    build_pdf,
    list_colours,
    make_nested_forms,
    make_pages,
    make_pdf,
    stream,
)

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]
PAGES = 20  # of a bomb, so that its child does not end before it is seen
CATALOG = b"<< /Type /Catalog /Pages 2 0 R >>"
# A standard security handler with a password that is not empty.
ENCRYPTED = b"/ID [<00> <00>] /Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <%b> /U <%b> >>" % (
    *(b"11" * 32,),
    b"22" * 32,
)


def test_pages_in_their_order() -> None:
    order = ["red", "blue", "green", "red"]
    assert list_colours(make_pdf(*order)) == order
    assert list_colours(make_pdf(*order[::-1])) == order[::-1]


@pytest.mark.parametrize(
    ("size", "dpi", "pixels"),
    [
        ((32, 48), 72, (32, 48)),
        ((32, 48), 144, (64, 96)),
        ((33.5, 48), 72, (34, 48)),
        ((14400, 14400), 144, (2000, 2000)),
        ((14400, 3600), 600, (4000, 1000)),
        ((100000, 1), 144, (200000, 2)),
    ],
)
def test_the_size_of_a_page(size: tuple[float, float], dpi: int, pixels: tuple[int, int]) -> None:
    """At most 4 megapixels, however large the page is."""
    data = make_pdf("blue", size=size)
    assert measure_pages(data, 1, dpi) == [pixels]
    assert pixels[0] * pixels[1] <= MAX_PAGE_PIXELS
    (page,) = draw_pages(data, [pixels], dpi)
    assert (page.size, page.mode) == (pixels, "RGB")
    assert page.getpixel((pixels[0] // 2, pixels[1] // 2)) == RGB["blue"]


def test_pages_are_drawn_always_alike_on_white() -> None:
    data = make_pdf("red", circles=True)
    first, second = (draw_pages(data, [(64, 96)], 144)[0] for _ in range(2))
    assert first.tobytes() == second.tobytes()
    assert (first.getpixel((0, 0)), first.getpixel((32, 48))) == (RGB["white"], RGB["red"])


def test_files_of_the_current_folder_are_no_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "resource.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    assert measure_pages(make_pdf("red"), 1, 72) == [(32, 48)]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a readable PDF"),
        (b"\x89PNG\r\n\x1a\n", "not a readable PDF"),
        (make_pdf("red")[:200], "not a readable PDF"),
        (b"%PDF-1.7 " + bytes(1000), "not a readable PDF"),
        (make_pdf("red", trailer=ENCRYPTED), "the PDF is encrypted; send it without a password"),
        (make_pdf(*["red"] * 4), "the PDF has 4 pages, and media.max_pages allows 3"),
        (make_pages([b""] * 10_000), "the PDF has 10000 pages"),
        (build_pdf([CATALOG, b"<< /Type /Pages /Kids [] /Count 2 >>"]), "page 1 of the PDF is damaged"),
    ],
)
def test_what_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(MediaError, match=message):
        measure_pages(data, 3, 72)


def test_other_sizes_than_those_measured_are_refused() -> None:
    with pytest.raises(MediaError, match="its process was ended"):
        draw_pages(make_pdf("red"), [(32, 49)], 72)


def test_a_page_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is processor time, so it ends on any machine."""
    data = make_nested_forms()
    sizes = measure_pages(data, 1, 72)
    monkeypatch.setattr(pdf_process, "SECONDS", 1)
    with pytest.raises(MediaError, match="more than 1 seconds of processor time"):
        draw_pages(data, sizes, 72)


def make_bomb(pages: int = 1) -> bytes:
    """A PDF with a small stream that unpacks to 600 MB, for each page again."""
    packer = zlib.compressobj(1)
    packed = b"".join([*(packer.compress(bytes(10**7)) for _ in range(60)), packer.flush()])
    data = make_pages([stream(packed, packed=True), *[b"[4 0 R]"] * (pages - 1)])
    assert len(data) < 4_000_000
    return data


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS limits no address space")
def test_a_page_that_takes_too_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_bomb()
    monkeypatch.setattr(pdf_process, "MEMORY", 500_000_000)
    with pytest.raises(MediaError, match=r"more than 0\.5 GB of memory"):
        draw_pages(data, measure_pages(data, 1, 72), 72)


@pytest.mark.skipif(not Path("/bin/ps").exists(), reason="there is no ps")
def test_a_page_that_takes_too_much_memory_where_the_kernel_has_no_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on macOS: the child is ended by its parent, and not by any other of its limits."""
    start, data = media_process.start_module, make_bomb(PAGES)
    ends: list[int] = []

    def start_without_limit(module: str, seconds: int, memory: int, *rest: Any, **options: Any) -> Any:
        process = start(module, seconds, 100 * memory, *rest, **options)
        kill = process.kill
        process.kill = lambda: (ends.append(process.pid), kill())  # type: ignore[func-returns-value]
        return process

    monkeypatch.setattr(child_memory, "has_kernel_limits", lambda: False)
    monkeypatch.setattr(child_memory, "INTERVAL", 0.02)
    monkeypatch.setattr(media_process, "start_module", start_without_limit)
    sizes = measure_pages(data, PAGES, 72)
    assert ends == []
    monkeypatch.setattr(pdf_process, "MEMORY", 200_000_000)
    with pytest.raises(MediaError, match=r"more than 0\.2 GB of memory"):
        draw_pages(data, sizes, 72)
    assert len(ends) >= 1


async def test_it_ends_with_its_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(command: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(SLEEPS, **options))
        return started[-1]

    monkeypatch.setattr(media_process.subprocess, "Popen", start)
    task = asyncio.create_task(Lane("test", 1).run(measure_pages, make_pdf("red"), 1, 72))
    async with asyncio.timeout(60):
        while not started:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert started[0].returncode not in (0, None)


WAITS = """
import sys
import time
from mlxrun.core import processes
from mlxrun.api.text.media.media_process import _end_after
{twin}
with _end_after(2.0, lambda: print("ended", flush=True)):
    print("waits", flush=True)
    sys.stdin.readline()
print("over")
"""
TWIN = "processes.GAP = float('inf')"


def test_a_child_has_its_time_after_a_suspension() -> None:
    """What waits for it was suspended for longer than it may take. The twin counts that time; both are
    suspended at once."""
    with ExitStack() as opened:
        commands = [[sys.executable, "-c", WAITS.format(twin=each)] for each in ("", TWIN)]
        started = [start_program(each, stdin=subprocess.PIPE) for each in commands]
        guard, twin = map(opened.enter_context, started)
        assert guard.stdout is not None and twin.stdout is not None
        assert guard.stdout.readline() == twin.stdout.readline() == "waits\n"
        suspend([guard.pid, twin.pid], 3.2)
        assert twin.stdout.readline() == "ended\n"  # without an input
        assert [each.communicate("\n", timeout=60)[0] for each in (guard, twin)] == ["over\n"] * 2
