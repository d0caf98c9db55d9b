"""The page for people in a real browser: chats, hostile answers, keys, batches, sizes, access."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from PIL import Image, ImageStat

from benchmarks.browser import BrowserPage
from mlxrun.api.parsers.registry import choose_formats
from mlxrun.config.settings import Config, ModelSettings
from mlxrun.core.errors import InternalError
from mlxrun.engine.client import EngineClient
from tests.helpers.batch_fakes import chats
from tests.helpers.batches_server import ServerSetup
from tests.helpers.browser_pages import AXE, BROWSER, find_violations, open_page
from tests.helpers.fake_models import FakeModels, run_models_front
from tests.helpers.raw_clients import until
from tests.helpers.server_fakes import Serving, make_script, run_server, server_config

pytestmark = [pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here"), pytest.mark.thorough]
KEY = "sesame-0123456789abc"
ANSWERS = "[...document.querySelectorAll('.answer > .markdown')].map(each => each.innerText.trim())"
IS_DONE = "document.querySelectorAll('.answer[aria-busy=false]').length"
HOSTILE = """<img src=x onerror="window.injected = 1"> <script>window.injected = 2</script>
[a](javascript:window.injected=3) [b](data:text/html,x) [c](//evil.example) [d](vbscript:x) <b>bold</b>
![e](http://evil.example/x.png) <javascript:window.injected=4> [`f`](JaVaScRiPt:x "y") &lt;i&gt;

# <iframe src=x>

| <svg onload=x> | b |
|---|---|
| <style>*{}</style> | [g](file:///etc/passwd) |

```<b>
<script>window.injected = 5</script>
```
"""


@asynccontextmanager
async def open_ui(
    url: str, width: int = 1440, height: int = 900, refused: Sequence[int] = ()
) -> AsyncIterator[BrowserPage]:
    """The page of a server. At the end it has loaded nothing from elsewhere, and reported no error but the
    statuses of `refused`, which it may get at any time, since it asks again."""
    async with open_page() as page:
        await page.resize(width, height)
        await page.open(f"{url}/ui")
        yield page
        await page.run("0")  # takes in what has happened since
        others = [each for each in page.loaded if not each.startswith((url, "data:", "blob:"))]
        errors = [each for each in page.errors if not any(f"status of {code}" in each for code in refused)]
        assert others == [] and errors == []


async def send(page: BrowserPage, text: str) -> None:
    """Type a question, and press Enter."""
    await page.wait_for("document.getElementById('model').disabled", False)
    await page.run(f"document.getElementById('prompt').value = {json.dumps(text)}")
    await page.run("document.getElementById('prompt').focus()")
    await page.press("Enter")


async def click(page: BrowserPage, label: str) -> None:
    """Click the first visible button with this text or label."""
    found = await page.run(
        f"""(() => {{
          const wanted = {json.dumps(label)};
          const isShown = each => each.checkVisibility() && !each.disabled;
          const isNamed = each => [each.textContent, each.ariaLabel].includes(wanted);
          const all = [...document.querySelectorAll("button")];
          const button = all.find(each => isShown(each) && isNamed(each));
          button?.click();
          return Boolean(button);
        }})()"""
    )
    assert found, f"there is no button {label}"


async def wait_until_loaded(page: BrowserPage) -> None:
    """The models are listed, and the page of the server is drawn if it is shown."""
    await page.wait_for("document.getElementById('model').disabled", False)


async def show(page: BrowserPage, view: str) -> None:
    await page.run(f"location.hash = '#{view}'")
    await page.wait_for(f"document.getElementById('{view}-view').checkVisibility()", True)


async def test_a_chat_with_the_built_in_model() -> None:
    from mlxrun.model.load.model_info import load_model_info

    host = load_model_info(ModelSettings(), weights=True)
    client = await EngineClient.start(Config(), host)
    try:
        async with run_server(engine=client, model_info=host) as s, open_ui(s.url) as page:
            await send(page, "What is 12 + 30?")
            await page.wait_for(IS_DONE, 1)
            assert await page.run(ANSWERS) == ["42"]
            assert await page.run("document.getElementById('spoken').textContent") == "42"
            await send(page, "What is 2 + 3?")
            await page.wait_for(IS_DONE, 2)
            assert (await page.run(ANSWERS))[1] != ""
            await show(page, "server")
            await page.wait_for("document.querySelector('#check-lead').textContent.includes('passed')", True)
            assert await page.run("document.querySelector('#model-facts dd').textContent") == "embedded"
            tokens = (await s.get("/v1/status")).json["tokens"]
            assert tokens["prefilled"] > 30 and tokens["generated"] >= 3
    finally:
        await client.close()


async def test_an_answer_grows_and_can_be_stopped_and_asked_for_again() -> None:
    forever = asyncio.Event()
    async with run_server(script=make_script("Hello", forever.wait)) as s, open_ui(s.url) as page:
        await send(page, "hi")
        await page.wait_for(ANSWERS, ["Hello"])
        assert await page.run("document.querySelector('.answer').ariaBusy") == "true"
        assert not await page.run("document.getElementById('send').checkVisibility()")
        await click(page, "Stop")
        await page.wait_for(IS_DONE, 1)
        await s.settle()
        assert len(s.engine.aborted) == 1 and "stopped" in await page.run(
            "document.querySelector('.foot').textContent"
        )
        await page.press("Escape")
        s.engine.script = make_script("Good ", "day")
        await click(page, "Regenerate")
        await page.wait_for(ANSWERS, ["Good day"])
        assert [len(each.prompt) for each in s.engine.requests] == [len(s.engine.requests[0].prompt)] * 2
        await click(page, "New chat")
        assert await page.run(ANSWERS) == []


async def test_what_the_model_gets() -> None:
    """Earlier turns with their answers but without those that failed; settings; and files."""
    async with run_server(script=make_script("one")) as s, open_ui(s.url) as page:
        await page.run(
            "window.bodies = []; const real = fetch;"
            "fetch = (path, options) => { if (options.body) bodies.push(options.body);"
            " return real(path, options); }; 0"
        )
        await page.run("document.getElementById('system').value = 'be brief'")
        await page.run("document.getElementById('temperature').value = '0.5'")
        await page.run("document.getElementById('max-tokens').value = '9'")
        await send(page, "first")
        await page.wait_for(IS_DONE, 1)
        s.engine.script = make_script(InternalError("it broke", ValueError("x")))
        await send(page, "second")
        await page.wait_for(IS_DONE, 2)
        await page.wait_for("document.querySelectorAll('.answer .notice').length", 1)
        drop = (
            "const given = new DataTransfer(); given.items.add(new File([new Uint8Array([1, 2])], 'a.png',"
            " {type: 'image/png'})); document.getElementById('chat-view').dispatchEvent(new DragEvent('drop',"
            " {dataTransfer: given, bubbles: true, cancelable: true}))"
        )
        await page.run(f"(() => {{ {drop} }})()")
        await page.wait_for("document.querySelectorAll('#files img').length", 1)
        await send(page, "third")
        await page.wait_for(IS_DONE, 3)
        bodies = [json.loads(each) for each in await page.run("bodies")]
        page.errors.clear()  # the server's two errors, and the image that is none
    assert {(each["temperature"], each["max_tokens"], each["stream"]) for each in bodies} == {(0.5, 9, True)}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AQI="}}
    assert bodies[2]["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": [image, {"type": "text", "text": "third"}]},
    ]


async def test_hostile_answers_make_no_element() -> None:
    async with run_server(script=make_script(HOSTILE)) as s, open_ui(s.url) as page:
        await send(page, HOSTILE)
        await page.wait_for(IS_DONE, 1)
        assert await page.run("window.injected") is None
        made = "[...document.querySelectorAll('#messages :is(script, img, iframe, svg, style, b, i)')].length"
        assert await page.run(made) == 0
        links = "[...document.querySelectorAll('#messages a')].map(each => each.href)"
        assert await page.run(links) == ["http://evil.example/x.png"], "named, and not loaded"
        shown = await page.run("document.querySelector('.answer').textContent")
        for text in ('<img src=x onerror="window.injected = 1">', "<script>window.injected = 5</script>"):
            assert text in shown
        assert await page.run("document.querySelector('.question p').textContent") == HOSTILE.strip()
        # The policy itself: an assignment of HTML fails, whoever makes it.
        refused = "(() => { try { document.body.innerHTML = '<b>'; } catch (e) { return e.name; } })()"
        assert await page.run(refused) == "TypeError"
        page.errors.clear()


MARKDOWN = [
    ("a **b** *c* ~~d~~ `e`", "<p>a <strong>b</strong> <em>c</em> <del>d</del> <code>e</code></p>"),
    ("*a **b** c* ***d***", "<p><em>a <strong>b</strong> c</em> <em><strong>d</strong></em></p>"),
    ("snake_case_name 2 * 3 * 4 \\*x\\*", "<p>snake_case_name 2 * 3 * 4 *x*</p>"),
    ("# A #\ntext\nmore", "<h2>A</h2><p>text<br>more</p>"),
    ("- a\n- b\n  - c\n\n  d\n", "<ul><li>a</li><li>b<ul><li>c</li></ul><p>d</p></li></ul>"),
    ("3. a\n4. b\n- c", '<ol start="3"><li>a</li><li>b</li></ol><ul><li>c</li></ul>'),
    ("> a\n> > b", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>"),
    ("``a ` b`` **open", "<p><code>a ` b</code> **open</p>"),
    ("---\na", "<hr><p>a</p>"),
]


async def test_markdown() -> None:
    async with run_server() as s, open_ui(s.url) as page:
        for source, expected in MARKDOWN:
            script = (
                "import('/ui/markdown.js').then(({renderMarkdown}) => { const box ="
                f" document.createElement('div'); renderMarkdown(box, {json.dumps(source)});"
                " return box.innerHTML; })"
            )
            assert await page.run(script) == expected
        grown = (
            "import('/ui/markdown.js').then(({renderMarkdown}) => { const box ="
            " document.createElement('div'); renderMarkdown(box, 'a\\n\\n```js\\nx'); const first ="
            " box.firstChild; renderMarkdown(box, 'a\\n\\n```js\\nxy\\n```\\n| a | b |\\n|--:|---|\\n| 1 |');"
            " return [first === box.firstChild, box.querySelector('pre').textContent,"
            " box.querySelector('td').className, box.querySelectorAll('td').length]; })"
        )
        assert await page.run(grown) == [True, "xy", "right", 2]


async def test_no_text_takes_long() -> None:
    """The minute is for what takes the square of 100,000 characters."""
    parts = ("[", "*a ", "`", "_a", "> ", "- ", "|-", "a\n- ", "~~x", "![](")
    async with run_server() as s, open_ui(s.url) as page:
        for part in parts:
            script = (
                "import('/ui/markdown.js').then(({renderMarkdown}) => renderMarkdown("
                f"document.createElement('div'), {json.dumps(part)}.repeat(20_000)))"
            )
            await asyncio.wait_for(page.run(script), 60)


async def test_reasoning_is_folded() -> None:
    script = make_script("<think>because</think>done")
    formats = choose_formats(None, [], reasoning="qwen3")
    async with run_server(script=script, formats=formats) as s, open_ui(s.url) as page:
        await send(page, "why")
        await page.wait_for(IS_DONE, 1)
        assert await page.run("document.querySelector('.reasoning .markdown').textContent") == "because"
        assert not await page.run("document.querySelector('.reasoning').open")
        assert await page.run(ANSWERS) == ["done"]


async def test_a_key_is_asked_for_and_kept_for_the_tab() -> None:
    config = server_config(api_keys={"alice": KEY})
    async with run_server(config) as s, open_ui(s.url, refused=(401,)) as page:
        is_open = "document.getElementById('key-dialog').open"
        await page.wait_for(is_open, True)
        reason = "document.getElementById('key-reason').textContent"
        assert await page.run(reason) == "This server needs a key."
        for key in ("wrong-key", KEY):
            await page.run(f"document.getElementById('key').value = {json.dumps(key)}")
            await click(page, "Use")
            if key != KEY:
                await page.wait_for(reason, "the API key is not valid")
                await page.wait_for(is_open, True)
        await send(page, "hi")
        await page.wait_for(ANSWERS, ["Hello world!"])
        assert await page.run("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]


async def test_live_requests_can_be_cancelled() -> None:
    forever = asyncio.Event()
    async with run_server(script=make_script("a", forever.wait)) as s, open_ui(s.url) as page:
        body = {"messages": [{"role": "user", "content": "x"}]}
        running = asyncio.create_task(s.post("/v1/chat/completions", body, x_request_id="victim"))
        await until(lambda: s.live.get("victim"))
        await show(page, "server")
        rows = "[...document.querySelectorAll('#request-table tbody th')].map(each => each.textContent)"
        await page.wait_for(rows, ["victim"])
        await click(page, "Cancel victim")
        assert (await running).status == 499
        await page.wait_for(rows, [])


async def test_models_are_loaded_and_unloaded() -> None:
    """With what a click cannot do said until the next one."""
    models = FakeModels(broken={"b"}, pinned=("c",), names=("a", "b", "c"))
    async with run_models_front(models, limit=3) as front, open_ui(front.url, refused=(503,)) as page:
        rows = (
            "[...document.querySelectorAll('#model-table tbody tr')].map(row => row.children[1].textContent)"
        )
        await show(page, "server")
        await page.wait_for(rows, ["unloaded", "unloaded", "ready"])
        heads = "[...document.querySelectorAll('#model-table thead th')].map(each => each.textContent)"
        assert "Limit" in await page.run(heads)
        await click(page, "Load a")
        await page.wait_for(rows, ["ready", "unloaded", "ready"])
        assert front.pool.slots[0].loads == 1
        labels = "[...document.querySelectorAll('#model-table button')].filter(each => !each.hidden)"
        assert await page.run(f"{labels}.map(each => each.ariaLabel)") == ["Unload a", "Load b"]
        await click(page, "Load b")
        notice = "document.getElementById('server-notice').textContent"
        await page.wait_for(f"{notice}.includes('its files are broken')", True)
        await page.wait_for(f"{rows}[1].includes('its files are broken')", True)
        assert "its files are broken" in await page.run(notice)
        if AXE.is_file():
            assert await find_violations(page) == []
        await click(page, "Unload a")
        await page.wait_for(f"{rows}[0]", "unloaded")
        assert await page.run(notice) == ""


async def test_batches_and_their_files(tmp_path: Path) -> None:
    setup = ServerSetup(tmp_path)  # its model is never attached: its list is a 404
    async with setup.run() as site, open_ui(site.url.rstrip("/"), refused=(404,)) as page:
        await show(page, "batches")
        await page.wait_for("document.getElementById('batches-content').hidden", False)
        lines = "\n".join(map(json.dumps, chats(3)))
        for text in ("no JSON", lines):
            give = (
                "(() => { const given = new DataTransfer(); given.items.add(new File("
                f"[{json.dumps(text)}], 'job.jsonl')); document.getElementById('batch-file').files ="
                " given.files; })()"
            )
            await page.run(give)
            await click(page, "Start")
            if text != lines:
                notice = "document.getElementById('batches-notice').textContent.includes('the first line')"
                await page.wait_for(notice, True)
        cells = "[...document.querySelectorAll('#batch-table tbody td')].map(each => each.textContent)"
        await page.wait_for(f"{cells}.slice(1, 3)", ["completed", "3 of 3"])
        files = "[...document.querySelectorAll('#file-table tbody tr')].length"
        await page.wait_for(files, 2)
        batch = (await site.send("GET", "/v1/batches"))["data"][0]["id"]
        await click(page, f"Output of {batch}")
        await click(page, f"Delete {batch}")
        await page.wait_for("document.querySelectorAll('#batch-table tbody tr').length", 0)
        assert (await site.send("GET", "/v1/batches"))["data"] == []


@asynccontextmanager
async def open_full_page() -> AsyncIterator[tuple[Serving, BrowserPage]]:
    """A page with an answer of many blocks, a request that runs, and everything unfolded."""
    text = "# Title\n\n" + "word " * 80 + "x" * 200 + "\n\n- a\n- b\n\n```py\n" + "y" * 300
    text += "\n```\n\n| a | b |\n|---|---|\n| " + "z" * 90 + " | 1 |\n\n> said [here](https://example.org)"
    forever = asyncio.Event()
    # There are no batches here.
    async with run_server(script=make_script(text)) as s, open_ui(s.url, refused=(404, 503)) as page:
        await send(page, "tell me " + "w" * 120)
        await page.wait_for(IS_DONE, 1)
        s.engine.script = make_script("a", forever.wait)
        body = {"messages": [{"role": "user", "content": "x"}]}
        running = asyncio.create_task(s.post("/v1/chat/completions", body))
        await until(lambda: len(s.live))
        await page.run("for (const each of document.querySelectorAll('details')) each.open = true")
        try:
            yield s, page
        finally:
            running.cancel()


async def test_narrow_and_wide_light_and_dark(tmp_path: Path) -> None:
    """Nothing is wider than the window but tables and code, which scroll by themselves. Pictures of all views
    are kept in the folder $PICTURES."""
    folder = Path(os.environ.get("PICTURES", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    async with open_full_page() as (_, page):
        for width in (390, 1440):
            for dark in (False, True):
                await page.resize(width, 844, dark=dark)
                for view in ("chat", "server", "batches"):
                    await show(page, view)
                    if view == "server":
                        await page.wait_for("document.querySelectorAll('#request-table tbody tr').length", 1)
                    wide = await page.run("document.documentElement.scrollWidth - innerWidth")
                    assert wide <= 0, (width, view)
                    log = "(log => log.scrollWidth - log.clientWidth)(document.getElementById('messages'))"
                    assert await page.run(log) <= 0
                    path = folder / f"ui-{view}-{width}-{'dark' if dark else 'light'}.png"
                    await page.take_picture(path)
                    assert measure_light(path, (width, 844)) == pytest.approx(0.1 if dark else 0.9, abs=0.1)


def measure_light(path: Path, size: tuple[int, int]) -> float:
    """How light a picture of this size is, on average: 0 is black, 1 white."""
    with Image.open(path) as image:
        assert image.size == size
        return ImageStat.Stat(image.convert("L")).mean[0] / 255


async def test_keyboard() -> None:
    """The skip link comes first; Shift+Enter begins a line; all controls can be reached."""
    async with run_server() as s, open_ui(s.url) as page:
        await wait_until_loaded(page)
        await page.press("Tab")
        assert await page.run("document.activeElement.id") == "skip"
        await page.press("Enter")
        assert await page.run("document.activeElement.id") == "main"
        reached = []
        for _ in range(8):
            await page.press("Tab")
            reached.append(await page.run("document.activeElement.id || document.activeElement.tagName"))
        assert reached == ["model", "SUMMARY", "new-chat", "messages", "prompt", "attach", "send", "BODY"]


UNNAMED = """[...document.querySelectorAll('button, input, select, textarea, a, summary, [tabindex]')]
  .filter(each => each.checkVisibility() && each.id !== 'main')
  .filter(each => !(each.textContent.trim() || each.ariaLabel || each.labels?.length
    || document.getElementById(each.getAttribute('aria-labelledby'))?.textContent))
  .map(each => each.outerHTML)"""


async def test_every_control_has_a_name() -> None:
    async with open_full_page() as (_, page):
        for view in ("chat", "server", "batches"):
            await show(page, view)
            assert await page.run(UNNAMED) == []
        assert await page.run("document.documentElement.lang") == "en"


@pytest.mark.skipif(not AXE.is_file(), reason="`make clients` installs axe-core")
@pytest.mark.parametrize("dark", [False, True])
async def test_axe_finds_nothing(dark: bool) -> None:
    async with open_full_page() as (_, page):
        for width in (390, 1440):
            await page.resize(width, 844, dark=dark)
            for view in ("chat", "server", "batches"):
                await show(page, view)
                if view == "server":
                    await page.wait_for("document.querySelectorAll('#request-table tbody tr').length", 1)
                assert await find_violations(page) == [], (width, view)
