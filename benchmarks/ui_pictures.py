"""Pictures of a server's page for the documentation: `python -m benchmarks.ui_pictures`, or `make pictures`.

It starts a server with the built-in model, asks it about an image in a headless Chromium, and photographs the
chat, and then the view of the server while requests run.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from pathlib import Path

import aiohttp

from benchmarks.browser import BrowserPage, open_browser
from benchmarks.report_pictures import IMAGES, ROOT, run_with_browser, save_picture
from benchmarks.server_process import start_server

WIDTH, CHAT_HEIGHT, SERVER_HEIGHT = 1000, 640, 720
QUESTIONS = ("What colour is it?", "What is 12 + 30?")
PICTURE = ROOT / "jobs" / "images" / "colour-000.png"
LOAD_SECONDS = 40.0  # of requests, so that plots have something to show
STREAMS = 3
# The prompt is long and each is another one, so that there are phases to see.
PROMPT = "Request {number}: count from one to a thousand, and write each number as a word. " * 8


def main() -> int:
    """Make all pictures; 1 if there is no browser."""
    return run_with_browser(_make_pictures)


async def _make_pictures(browser: str, folder: Path) -> None:
    config = folder / "mlxrun.yaml"
    config.write_text("")
    async with start_server(config, folder) as server, open_browser(browser) as page:
        await take_chat_picture(page, server.url, IMAGES)
        await take_server_picture(page, server.url, IMAGES)


async def take_chat_picture(page: BrowserPage, url: str, images: Path) -> None:
    """Ask the questions, the first one about an image, and photograph the chat."""
    await page.resize(WIDTH, CHAT_HEIGHT)
    await page.open(f"{url}/ui")
    data = base64.b64encode(PICTURE.read_bytes()).decode()
    drop = (
        "const given = new DataTransfer();"
        f"given.items.add(new File([Uint8Array.from(atob('{data}'), c => c.charCodeAt(0))], 'a.png',"
        " {type: 'image/png'}));"
        "document.getElementById('chat-view').dispatchEvent(new DragEvent('drop', {dataTransfer: given}));"
    )
    await page.run(f"(() => {{ {drop} }})()")
    await page.wait_for("!document.getElementById('files').hidden")
    for number, question in enumerate(QUESTIONS, 1):
        await page.wait_for("!document.getElementById('model').disabled")
        await page.run(f"document.getElementById('prompt').value = {json.dumps(question)}")
        await page.run("document.getElementById('send').click()")
        await page.wait_for(f"document.querySelectorAll('.answer[aria-busy=false]').length === {number}")
    await save_picture(page, images / "ui-chat.png")


async def take_server_picture(page: BrowserPage, url: str, images: Path) -> None:
    """Photograph the view of the server in dark colours after LOAD_SECONDS of requests."""
    await page.resize(WIDTH, SERVER_HEIGHT, dark=True)
    await page.run("location.hash = '#server'")
    end = asyncio.get_running_loop().time() + LOAD_SECONDS
    async with aiohttp.ClientSession(url) as http:
        tasks = [asyncio.create_task(_send_requests(http, each, end)) for each in range(STREAMS)]
        await asyncio.sleep(LOAD_SECONDS)
        await page.wait_for("document.querySelectorAll('#request-table tbody tr').length > 1")
        await save_picture(page, images / "ui-server.png")
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send_requests(http: aiohttp.ClientSession, stream: int, end: float) -> None:
    """Send one request after the other for some time longer than the pictures take."""
    number = 0
    while asyncio.get_running_loop().time() < end + LOAD_SECONDS:
        number += 1
        text = PROMPT.format(number=f"{stream}.{number}")
        body = {"prompt": text, "max_tokens": 400, "ignore_eos": True}
        async with http.post("/v1/completions", json=body) as response:
            await response.read()


if __name__ == "__main__":
    sys.exit(main())
