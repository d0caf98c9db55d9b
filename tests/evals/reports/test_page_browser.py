"""The page in a browser: nothing of a run is executed, and keyboard, filters and search work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.browser import BrowserPage
from mlxrun.evals.reports.page import render_page
from mlxrun.evals.reports.report_runs import ReportRuns, read_runs
from tests.helpers.batch_fakes import chat, chats
from tests.helpers.browser_pages import BROWSER, open_page, wait_for
from tests.helpers.report_jobs import (
    HOSTILE,
    hostile_lines,
    mixed_lines,
    read_lines,
    run_lines,
    run_other_answers,
)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
IDS = "[...document.querySelectorAll('.row .id')].map(each => each.textContent)"


@asynccontextmanager
async def open_report(runs: ReportRuns, folder: Path, address: str = "") -> AsyncIterator[BrowserPage]:
    """The page of these runs in a browser; a browser that does not start here skips the test."""
    path = folder / "report.html"
    path.write_text(render_page(runs), encoding="utf-8")
    async with open_page() as page:
        await page.resize(1300, 900)
        await page.open(path.as_uri() + address)
        yield page


async def test_nothing_of_a_run_is_executed(tmp_path: Path) -> None:
    runs = await read_lines(tmp_path, hostile_lines())
    async with open_report(runs, tmp_path) as page:
        for at, text in enumerate(HOSTILE):
            await page.run(f"document.querySelectorAll('.row')[{at}].click()")
            shown = await page.run("document.querySelector('.prompt .text').textContent")
            marked = await page.run(
                "[...document.querySelectorAll('.prompt .unseen')].map(each => each.textContent)"
            )
            plain = "".join(f"U+{ord(char):04X}" if f"U+{ord(char):04X}" in marked else char for char in text)
            assert shown == plain
        assert await page.run("window.injected") is None
        assert await page.run("document.querySelectorAll('.detail-body :is(script, img, b)').length") == 0
        assert page.errors == []


async def test_keyboard(tmp_path: Path) -> None:
    async with open_report(await read_lines(tmp_path, mixed_lines()), tmp_path) as page:
        title = "document.querySelector('.detail-id')?.textContent ?? ''"
        is_open = "document.body.classList.contains('has-detail')"
        await page.run("document.getElementById('table').focus()")
        await page.press("j")
        await page.press("j")
        assert await page.run("document.querySelector('[aria-selected=true] .id').textContent") == "wrong"
        assert not await page.run(is_open)
        await page.press("Enter")
        assert await page.run(is_open) and await page.run(title) == "wrong"
        await page.press("k")
        assert await page.run(title) == "right", "the details follow"
        await page.press("Escape")
        assert not await page.run(is_open)
        await page.press("/")
        assert await page.run("document.activeElement.id") == "search"
        await page.press("j")
        assert await page.run("document.getElementById('search').value") == "j", "keys are typed there"
        await page.press("Escape")
        assert await page.run("document.getElementById('search').value") == ""
        assert await page.run("document.activeElement.id") == "table"
        assert page.errors == []


async def test_filters_search_and_sorting(tmp_path: Path) -> None:
    first = await run_lines(tmp_path / "a", [*chats(4), chat("other", "a needle", max_tokens=40)])
    second = await run_other_answers(
        tmp_path / "b", [*chats(4), chat("other", "a needle", max_tokens=40)], {"line-2"}
    )
    runs = read_runs([first.paths.out, second.paths.out])
    async with open_report(runs, tmp_path) as page:
        await wait_for(page, IDS, ["line-0", "line-1", "line-2", "line-3", "other"])
        await page.run("document.querySelector('#states input[value=flip]').click()")
        await wait_for(page, IDS, ["line-2"])
        await page.run("document.querySelector('#states input[value=all]').click()")
        await page.run("search.value = 'NEEDLE'; search.dispatchEvent(new Event('input'))")
        await wait_for(page, IDS, ["other"])
        assert await page.run("document.getElementById('count').textContent") == "1 of 5 lines"
        await page.run("search.value = ''; search.dispatchEvent(new Event('input'))")
        await page.run("document.querySelector('[data-sort=ids]').click()")
        await page.run("document.querySelector('[data-sort=ids]').click()")
        await wait_for(page, IDS, ["other", "line-3", "line-2", "line-1", "line-0"])
        await page.run("document.getElementById('filter-group').value = '1'")
        await page.run("document.getElementById('filter-group').dispatchEvent(new Event('change'))")
        await wait_for(page, IDS, ["line-3", "line-1"])
        assert page.errors == []


async def test_addresses_and_both_answers(tmp_path: Path) -> None:
    first = await run_lines(tmp_path / "a", chats(4))
    second = await run_other_answers(tmp_path / "b", chats(4), {"line-2"})
    runs = read_runs([first.paths.out, second.paths.out])
    async with open_report(runs, tmp_path, "#line/line-2") as page:
        heads = "[...document.querySelectorAll('.answer-of h3')].map(each => each.textContent)"
        await wait_for(page, heads, ["✓ a/job right, 1", "✗ b/job wrong, 0"])
        await page.run("document.getElementById('next').click()")
        assert await page.run("location.hash") == "#line/line-3"
        await page.run("document.querySelector('#states input[value=flip]').click()")
        await page.run("location.hash = '#line/line-0'")
        await wait_for(page, "document.querySelector('.detail-id').textContent", "line-0")
        assert await page.run("document.getElementById('count').textContent") == "4 lines", (
            "no filter hides it"
        )


async def test_only_rows_that_can_be_seen_are_in_the_page(tmp_path: Path) -> None:
    """Themes are switched and kept too."""
    async with open_report(await read_lines(tmp_path, chats(700)), tmp_path) as page:
        table = "document.getElementById('table')"
        assert await page.run("document.querySelectorAll('.row').length") < 60
        await page.run(f"{table}.scrollTop = {table}.scrollHeight")
        await wait_for(page, f"{IDS}.includes('line-699')", True)
        assert await page.run("document.querySelectorAll('.row').length") < 60
        paper = "getComputedStyle(document.body).backgroundColor"
        light = await page.run(paper)
        await page.resize(1300, 900, dark=True)
        dark = await page.run(paper)
        assert light != dark
        await page.run("theme.click()")
        assert await page.run(paper) == light, "light, whatever the system prefers"
        await page.run("theme.click()")
        assert await page.run(paper) == dark and "dark" in await page.run("theme.textContent")
