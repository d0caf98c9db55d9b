"""Pages in a headless Chromium, where there is one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.browser import BrowserPage, find_browser, open_browser

AXE = Path(__file__).parents[1] / "clients/node/node_modules/axe-core/axe.min.js"
BROWSER = find_browser()  # None: there is no Chromium here


@asynccontextmanager
async def open_page(*options: str) -> AsyncIterator[BrowserPage]:
    """A page of a new browser with these options of its command line. A browser that does not start here
    skips the test."""
    assert BROWSER is not None
    browser = open_browser(BROWSER, *options)
    try:
        page = await browser.__aenter__()
    except (TimeoutError, OSError) as error:
        pytest.skip(f"Chromium does not start here: {error!r}")
    try:
        yield page
    finally:
        await browser.__aexit__(None, None, None)


async def find_violations(page: BrowserPage) -> object:
    """What axe-core finds wrong with the page as it is."""
    await page.run(AXE.read_text(encoding="utf-8") + "; 0")
    return await page.run(
        "axe.run().then(({violations}) => violations.map(each =>"
        " [each.id, each.impact, each.nodes.map(node => node.html)]))"
    )
