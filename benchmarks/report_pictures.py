"""Pictures of reports for the documentation: `python -m benchmarks.report_pictures`, or `make pictures`.

It runs the suite and the vision job of `jobs/` on the built-in model in a folder of its own, makes their
reports, and photographs them and the index of `mlxrun view` in a headless Chromium.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.browser import BrowserPage, find_browser, open_browser
from mlxrun.evals.reports.run_pages import RunPages

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
WIDTH = 1200
COLOURS = 200  # of a picture, which makes its file a third as large
MODULE = (sys.executable, "-m", "mlxrun")


@dataclass(frozen=True, slots=True)
class ReportPicture:
    """A picture of the report in a folder. `address`: what of the page is opened; `script` is run before."""

    name: str
    report: str
    height: int
    dark: bool
    address: str = ""
    script: str = "0"


PICTURES = (
    ReportPicture("report-suite", "suite.out/report.html", 690, dark=False),
    ReportPicture("view-runs", "index.html", 560, dark=False),
    ReportPicture(
        "report-lines", "vision.out.jsonl.run/report.html", 760, dark=True, address="#line/shape-000"
    ),
)


def main() -> int:
    """Make all pictures; 1 if there is no browser."""
    return run_with_browser(_make_pictures)


def run_with_browser(make: Callable[[str, Path], Coroutine[Any, Any, None]]) -> int:
    """Make pictures with a browser in a folder that is deleted afterwards; 1 if there is no browser."""
    browser = find_browser()
    if browser is None:
        print("there is no Chromium here", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(make(browser, Path(name)))
    return 0


async def _make_pictures(browser: str, scratch: Path) -> None:
    folder = scratch / "jobs"
    ignored = shutil.ignore_patterns("*.out*", "*.errors.jsonl")
    shutil.copytree(ROOT / "jobs", folder, ignore=ignored)
    for command in (("eval", "suite.yaml"), ("batch", "vision.jsonl")):
        subprocess.run([*MODULE, *command], cwd=folder, check=True)
    for run in ("suite.yaml", "vision.jsonl"):
        subprocess.run([*MODULE, "report", run], cwd=folder, check=True)
    (folder / "index.html").write_text(RunPages(folder).render([])[1], encoding="utf-8")
    await take_pictures(browser, folder, IMAGES)


async def take_pictures(browser: str, folder: Path, images: Path) -> None:
    """Photograph the reports in `folder`."""
    async with open_browser(browser) as page:
        for picture in PICTURES:
            await page.resize(WIDTH, picture.height, dark=picture.dark)
            await page.open((folder / picture.report).as_uri() + picture.address)
            await page.run(picture.script)
            await save_picture(page, images / f"{picture.name}.png")


async def save_picture(page: BrowserPage, path: Path) -> None:
    """Photograph what can be seen, in few colours."""
    await page.take_picture(path)
    with Image.open(path) as image:
        small = image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(path)


if __name__ == "__main__":
    sys.exit(main())
