"""The index of runs and served reports in a browser: live, by keyboard, narrow, dark, and with a key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.browser import BrowserPage
from mlxrun.evals.reports.run_pages import RunPages
from mlxrun.server.app import make_app
from mlxrun.server.endpoints import runs
from mlxrun.server.lifecycle import listen
from tests.helpers.batch_fakes import chats
from tests.helpers.browser_pages import AXE, BROWSER, find_violations, open_page
from tests.helpers.report_jobs import hostile_lines, run_lines, write_suite
from tests.helpers.server_fakes import server_config

pytestmark = [pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here"), pytest.mark.thorough]
NAMES = "[...document.querySelectorAll('.runs tr:not([hidden]) a')].map(each => each.textContent)"
IDS = "[...document.querySelectorAll('.row .id')].map(each => each.textContent)"
KEY = "sesame-0123456789abc"


@asynccontextmanager
async def open_runs(folder: Path, query: str = "", **settings: Any) -> AsyncIterator[BrowserPage]:
    """A page of the runs in a folder, which asks for newer versions of itself. At the end it has asked
    nobody else, and reported no error."""
    app = make_app(server_config(**settings), surfaces=[runs.SURFACE])
    app[runs.RUN_PAGES] = RunPages(folder)
    async with listen(app) as url, open_page() as page:
        await page.resize(1300, 900)
        if settings:
            url = url.replace("//", f"//any:{KEY}@")
        await page.open(f"{url}/ui/runs{query}")
        yield page
        await page.run("0")  # takes in what has happened since
        own = url.replace(f"any:{KEY}@", "")
        assert [
            each for each in page.loaded if not each.replace(f"any:{KEY}@", "").startswith((own, "data:"))
        ] == []
        assert page.errors == []


# As if the window was shown again: then the page asks at once.
AWAKE = "document.dispatchEvent(new Event('visibilitychange'))"


async def test_the_index_is_live_and_keeps_what_is_chosen(tmp_path: Path) -> None:
    await run_lines(tmp_path / "a", chats(2))
    async with open_runs(tmp_path) as page:
        await page.wait_for(NAMES, ["a/job.out.jsonl"])
        assert await page.run("document.getElementById('compare').disabled") is True
        await page.press("j")
        await page.press("x")
        assert await page.run("document.querySelector('.runs input').checked") is True
        await run_lines(tmp_path / "b", chats(2))
        await page.run(AWAKE)
        await page.wait_for(NAMES, ["b/job.out.jsonl", "a/job.out.jsonl"])
        chosen = "[...document.querySelectorAll('.runs :checked')].map(each => each.value)"
        assert await page.run(chosen) == ["a/job.out.jsonl"]
        assert await page.run("document.activeElement.textContent") == "a/job.out.jsonl"
        await page.press("/")
        await page.press("b")
        await page.wait_for(NAMES, ["b/job.out.jsonl", "a/job.out.jsonl"])  # "job" has a b
        await page.press("Escape")
        await page.press("x")
        await page.run("document.getElementById('compare').click()")
        await page.wait_for(IDS, ["line-0", "line-1"])
        assert await page.run("document.querySelectorAll('#difference').length") == 1
        assert "All runs" in await page.run("document.querySelector('.top').textContent")


async def test_a_report_goes_on_with_its_run(tmp_path: Path) -> None:
    """Filters, sorting and the open line stay."""
    bench = await run_lines(tmp_path, [*chats(3), *hostile_lines()])
    await bench.run(fresh=True, limit=2)
    async with open_runs(tmp_path, "?run=job.out.jsonl#line/line-1") as page:
        await page.wait_for(IDS, ["line-0", "line-1"])
        await page.run("document.querySelector('[data-sort=ids]').click()")
        await page.run("document.querySelector('[data-sort=ids]').click()")
        await page.run("search.value = 'say'; search.dispatchEvent(new Event('input'))")
        await page.wait_for(IDS, ["line-1", "line-0"])
        await bench.run()
        await page.run(AWAKE)
        await page.wait_for(IDS, ["line-2", "line-1", "line-0"])
        assert await page.run("document.querySelector('.detail-id').textContent") == "line-1"
        assert await page.run("document.querySelector('[aria-selected=true] .id').textContent") == "line-1"
        assert await page.run("document.querySelector('#states input').parentElement.textContent") == "all 11"
        assert "11 lines" in await page.run("document.querySelector('.lead').textContent")
        await page.run("document.querySelector('#close').click()")
        await page.run("search.value = ''; search.dispatchEvent(new Event('input'))")
        await page.wait_for("document.getElementById('count').textContent", "11 lines")
        assert await page.run("window.injected") is None


async def test_a_browser_sends_the_key_by_itself(tmp_path: Path) -> None:
    await run_lines(tmp_path / "a", chats(1))
    async with open_runs(tmp_path, api_keys={"alice": KEY}) as page:
        await page.wait_for(NAMES, ["a/job.out.jsonl"])
        await run_lines(tmp_path / "b", chats(1))
        await page.run(AWAKE)
        await page.wait_for(NAMES, ["b/job.out.jsonl", "a/job.out.jsonl"])


@pytest.mark.parametrize("dark", [False, True])
async def test_narrow_and_wide(tmp_path: Path, dark: bool) -> None:
    await run_lines(tmp_path / ("long" * 20) / "<b>", chats(2))
    await run_lines(tmp_path / "s.out" / "model" / "task" / "seed-1", chats(2))
    write_suite(tmp_path / "s.out")
    async with open_runs(tmp_path) as page:
        for width in (390, 1440):
            await page.resize(width, 844, dark=dark)
            assert await page.run("document.documentElement.scrollWidth - innerWidth") <= 0, width
            if AXE.is_file():
                assert await find_violations(page) == [], width
