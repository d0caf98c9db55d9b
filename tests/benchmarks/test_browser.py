"""Whoever drives a browser gets an error where there would be no answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import browser
from tests.helpers.browser_pages import BROWSER, open_page

pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")


async def test_a_page_that_crashes_is_an_error() -> None:
    async with open_page() as page:
        await page.open("about:blank")
        with pytest.raises(RuntimeError, match="the page has crashed"):
            await page.send("Page.crash")


async def test_what_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser, "ANSWER_SECONDS", 1.0)
    async with open_page() as page:
        with pytest.raises(TimeoutError, match="in vain for 1 s: Runtime.evaluate .*never"):
            await page.run("new Promise(never => 0)")
        with pytest.raises(TimeoutError, match="document.title is '', and not 'x', after 1 s"):
            await page.wait_for("document.title", "x")


async def test_a_page_is_open_when_all_of_it_is_loaded(tmp_path: Path) -> None:
    """The first time, and again at another place of the same page."""
    (tmp_path / "page.html").write_text("<script>onload = () => (document.title = 'loaded')</script>")
    url = (tmp_path / "page.html").as_uri()
    async with open_page() as page:
        for address in (url, url, f"{url}#there"):
            await page.open(address)
            assert await page.run("document.title") == "loaded"
            assert await page.run("location.href") == address
