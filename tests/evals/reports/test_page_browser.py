"""The page in a browser: nothing of a run is executed, and keyboard, filters and search work."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.browser import BrowserPage
from mlxrun.evals.reports.page import render_page
from mlxrun.evals.reports.report_runs import ReportRuns, read_runs
from tests.helpers.batch_fakes import chat, chats
from tests.helpers.browser_pages import AXE, BROWSER, find_violations, open_page
from tests.helpers.report_jobs import (
    HOSTILE,
    hostile_lines,
    make_many_rows,
    mixed_lines,
    read_lines,
    run_changed,
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
        await page.wait_for(IDS, ["line-0", "line-1", "line-2", "line-3", "other"])
        await page.run("document.querySelector('#states input[value=flip]').click()")
        await page.wait_for(IDS, ["line-2"])
        await page.run("document.querySelector('#states input[value=all]').click()")
        await page.run("search.value = 'NEEDLE'; search.dispatchEvent(new Event('input'))")
        await page.wait_for(IDS, ["other"])
        assert await page.run("document.getElementById('count').textContent") == "1 of 5 lines"
        await page.run("search.value = ''; search.dispatchEvent(new Event('input'))")
        await page.run("document.querySelector('[data-sort=ids]').click()")
        await page.run("document.querySelector('[data-sort=ids]').click()")
        await page.wait_for(IDS, ["other", "line-3", "line-2", "line-1", "line-0"])
        await page.run("document.getElementById('filter-group').value = '1'")
        await page.run(
            "document.getElementById('filter-group').dispatchEvent(new Event('change', {bubbles: true}))"
        )
        await page.wait_for(IDS, ["line-3", "line-1"])
        assert page.errors == []


async def test_addresses_and_both_answers(tmp_path: Path) -> None:
    first = await run_lines(tmp_path / "a", chats(4))
    second = await run_other_answers(tmp_path / "b", chats(4), {"line-2"})
    runs = read_runs([first.paths.out, second.paths.out])
    async with open_report(runs, tmp_path, "#line/line-2") as page:
        heads = "[...document.querySelectorAll('.answer-of h3')].map(each => each.textContent)"
        await page.wait_for(heads, ["✓ a/job right, 1", "✗ b/job wrong, 0"])
        await page.run("document.getElementById('next').click()")
        assert await page.run("location.hash") == "#line/line-3"
        await page.run("document.querySelector('#states input[value=flip]').click()")
        await page.run("location.hash = '#line/line-0'")
        await page.wait_for("document.querySelector('.detail-id').textContent", "line-0")
        assert await page.run("document.getElementById('count').textContent") == "4 lines", (
            "no filter hides it"
        )


async def test_only_rows_that_can_be_seen_are_in_the_page(tmp_path: Path) -> None:
    """Themes are switched and kept too."""
    async with open_report(await read_lines(tmp_path, chats(700)), tmp_path) as page:
        table = "document.getElementById('table')"
        assert await page.run("document.querySelectorAll('.row').length") < 60
        await page.run(f"{table}.scrollTop = {table}.scrollHeight")
        await page.wait_for(f"{IDS}.includes('line-699')", True)
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


def add_transcript(record: dict[str, Any]) -> None:
    """A conversation with a tool, whose texts are hostile."""
    sound = {"type": "input_audio", "input_audio": {"data": "UklGRgAAAABXQVZF", "format": "wav"}}
    call = {"id": "c1", "function": {"name": HOSTILE[1], "arguments": HOSTILE[0]}}
    record["agent"] = {"ended": "answer", "turns": 3, "state": {HOSTILE[0]: 1}}
    record["transcript"] = [
        {"role": "user", "content": "say 0"},
        {"role": "assistant", "content": None, "reasoning_content": HOSTILE[2], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": HOSTILE[0]},
        {"role": "user", "content": [sound, {"type": "text", "text": "and this?"}]},
        {"role": "assistant", "content": "done"},
    ]


async def test_a_transcript_with_its_tool_calls_folded(tmp_path: Path) -> None:
    bench = await run_changed(tmp_path, chats(1), add_transcript)
    async with open_report(read_runs([bench.job]), tmp_path, "#line/line-0") as page:
        roles = "[...document.querySelectorAll('.transcript .message > .role')].map(each => each.textContent)"
        await page.wait_for(roles, ["assistant", "tool", "user", "assistant"])  # the prompt is shown above
        folds = "[...document.querySelectorAll('.transcript details')]"
        titles = await page.run(f"{folds}.map(each => each.firstChild.firstChild.textContent)")
        assert titles == ["Reasoning ", f"Call {HOSTILE[1]} ", f"Result of {HOSTILE[1]} "]
        assert await page.run(f"{folds}.some(each => each.open)") is False
        await page.press("o")
        assert await page.run(f"{folds}.every(each => each.open)") is True
        texts = await page.run(f"{folds}.map(each => each.querySelector('pre').textContent)")
        assert texts == [HOSTILE[2], HOSTILE[0], HOSTILE[0]]
        facts = await page.run("document.querySelector('.facts').textContent")
        assert "endedanswer" in facts and "turns3" in facts and "</script>" in facts
        audio = "document.querySelector('.transcript audio').src"
        assert await page.run(audio) == "data:audio/wav;base64,UklGRgAAAABXQVZF"
        await page.run("search.value = 'onerror'; search.dispatchEvent(new Event('input'))")
        await page.wait_for(IDS, ["line-0"])
        assert await page.run("window.injected") is None
        assert not any("Content Security Policy" in each for each in page.errors)


async def test_differences_are_marked(tmp_path: Path) -> None:
    def change(record: dict[str, Any]) -> None:
        record["response"]["body"]["choices"][0]["message"]["content"] = "say it again, 0"

    first = await run_lines(tmp_path / "a", chats(1))
    second = await run_changed(tmp_path / "b", chats(1), change)
    runs = read_runs([first.paths.out, second.paths.out])
    async with open_report(runs, tmp_path, "#line/line-0") as page:
        marks = (
            "[...document.querySelectorAll('.answer-of')].map(each =>"
            " [...each.querySelectorAll('mark')].map(mark => mark.textContent).join('|'))"
        )
        await page.wait_for(f"{marks}.length", 2)
        left, right = await page.run(marks)
        assert left.startswith("0") and right == "it again, 0"
        await page.press("d")
        await page.wait_for(marks, ["", ""])
        assert await page.run("differences.ariaPressed") == "false"


async def test_every_column_sorts(tmp_path: Path) -> None:
    async with open_report(await read_lines(tmp_path, mixed_lines()), tmp_path) as page:
        found = {}
        for key in await page.run(
            "[...document.querySelectorAll('[data-sort]')].map(each => each.dataset.sort)"
        ):
            await page.run(f"document.querySelector('[data-sort={key}]').click()")
            heads = "[...document.querySelectorAll('[aria-sort=ascending]')].length"
            assert await page.run(heads) == 1
            found[key] = await page.run(IDS)
        assert found["scores"] == ["wrong", "failed", "right", "cut", "free", "line 6"]
        assert found["groups"][:2] == ["free", "line 6"] and found["ids"] == sorted(found["ids"])
        assert set(found) == {"scores", "ids", "groups", "answers", "expected", "output", "took"}


SEARCH = """new Promise(done => {
  const count = document.getElementById("count");
  const start = performance.now();
  const watch = () => { if (/^1 of/.test(count.textContent)) done(performance.now() - start); };
  new MutationObserver(watch).observe(count, {childList: true});
  document.querySelector("#states input[value=all]").click();
  search.value = "question 7777:";
  search.dispatchEvent(new Event("input"));
})"""


async def test_ten_thousand_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """How long the page takes is printed: opening it, a filter, and a search in all texts."""
    runs = await read_lines(tmp_path, chats(2))
    runs.rows, runs.runs = make_many_rows(10_000), runs.runs * 2
    async with open_report(runs, tmp_path) as page:
        opened = await page.run("performance.getEntriesByName('lines')[0].startTime")
        loaded = await page.run("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
        assert await page.run("document.getElementById('count').textContent") == "10,000 lines"
        click = "document.querySelector('#states input[value=wrong]').click(); table.offsetHeight;"
        timed = "(() => {{ const start = performance.now(); {} return performance.now() - start; }})()"
        filtered = await page.run(timed.format(click))
        some = await page.run("document.getElementById('count').textContent")
        assert some.endswith(" of 10,000 lines")
        sort = "document.querySelector('[data-sort=answers]').click(); table.offsetHeight;"
        was_sorted = await page.run(timed.format(sort))
        first = await page.run(SEARCH)
        await page.run("search.value = ''; search.dispatchEvent(new Event('input'))")
        again = await page.run(SEARCH)
        assert await page.run(IDS) == ["line-7777"]
        assert await page.run("document.querySelectorAll('.row').length") < 60
    size = (tmp_path / "report.html").stat().st_size / 1e6
    with capsys.disabled():
        print(
            f"\nreport of 10,000 lines, {size:.0f} MB: opened in {opened:.0f} ms, read in {loaded:.0f} ms,"
            f" filter {filtered:.0f} ms, sort {was_sorted:.0f} ms,"
            f" first search {first:.0f} ms, next {again:.0f} ms"
        )


@pytest.mark.parametrize("dark", [False, True])
async def test_narrow_and_wide(tmp_path: Path, dark: bool) -> None:
    """Nothing is wider than the window but what scrolls by itself, and axe-core finds nothing."""
    first = await run_changed(
        tmp_path / "a", [*chats(3), chat("long", "word " * 99 + "x" * 300)], add_transcript
    )
    second = await run_lines(tmp_path / "b", [*chats(3), chat("long", "word " * 99 + "y" * 300)])
    runs = read_runs([first.paths.out, second.paths.out])
    async with open_report(runs, tmp_path, "#line/long") as page:
        for width in (390, 1440):
            await page.resize(width, 844, dark=dark)
            assert await page.run("document.documentElement.scrollWidth - innerWidth") <= 0, width
            assert (
                await page.run("(e => e.scrollWidth - e.clientWidth)(document.querySelector('.detail-body'))")
                <= 0
            )
            if AXE.is_file():
                assert await find_violations(page) == [], width
