"""A headless Chromium, driven over the DevTools protocol: for pictures of reports, and for tests."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import shutil
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_SECONDS = 60.0
ANSWER_SECONDS = 60.0  # that the browser may take to answer one call, or a page to become as it is waited for
END_SECONDS = 10.0  # that it may take to end
_KEYS: dict[str, dict[str, Any]] = {  # whose effect depends on more than their name
    "Enter": {"text": "\r", "windowsVirtualKeyCode": 13},
    "Tab": {"windowsVirtualKeyCode": 9},
}


def find_browser() -> str | None:
    """The path of a Chromium; None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserPage:
    """One page. What it wrote to its console as an error is in `errors`, and the URLs of what it has loaded
    are in `loaded`. RuntimeError if it crashes; TimeoutError if it takes longer than ANSWER_SECONDS."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.errors: list[str] = []
        self.loaded: list[str] = []
        self._documents: set[str] = set()  # that are loaded with all that they need, by the protocol's id
        self._socket = socket
        self._numbers = itertools.count(1)

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with _limit(f"{method} {params}"[:200]):
            while (message := await self._receive()).get("id") != number:
                pass
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        return dict(message["result"])

    async def _receive(self) -> dict[str, Any]:
        """The next message, which is noted. A page that has crashed answers no call any more."""
        message: dict[str, Any] = await self._socket.receive_json()
        if message.get("method") == "Inspector.targetCrashed":
            raise RuntimeError("the page has crashed")
        self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Log.entryAdded":
            self.errors.append(message["params"]["entry"]["text"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"]))
        elif message.get("method") == "Network.requestWillBeSent":
            self.loaded.append(message["params"]["request"]["url"])
        elif message.get("method") == "Page.lifecycleEvent" and message["params"]["name"] == "load":
            self._documents.add(message["params"]["loaderId"])

    async def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        for domain in ("Inspector", "Page", "Log", "Runtime", "Network"):
            await self.send(f"{domain}.enable")
        await self.send("Page.setLifecycleEventsEnabled", enabled=True)
        document = (await self.send("Page.navigate", url=url)).get("loaderId")
        async with _limit(f"the page {url} to be loaded"):
            while document is not None and document not in self._documents:  # None: another place on the page
                await self._receive()

    async def run(self, script: str) -> Any:
        """The value of an expression on the page; a promise is waited for."""
        result = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    async def wait_for(self, script: str, value: Any = True) -> None:
        """Wait until an expression on the page has this value."""
        found = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_SECONDS):
                while (found := await self.run(script)) != value:
                    await asyncio.sleep(0.1)
                return
        raise TimeoutError(f"{script} is {found!r}, and not {value!r}, after {ANSWER_SECONDS:g} s")

    async def press(self, key: str) -> None:
        """Press and release a key."""
        text: dict[str, Any] = {"text": key} if len(key) == 1 else _KEYS.get(key, {})
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def resize(self, width: int, height: int, *, dark: bool = False, scale: float = 1.0) -> None:
        """Set the size of the page and its colour scheme; `scale`: pixels of the device per pixel."""
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def take_picture(self, path: Path) -> None:
        """Save what can be seen as a PNG file."""
        result = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(result["data"]))


@asynccontextmanager
async def open_browser(browser: str, *options: str) -> AsyncIterator[BrowserPage]:
    """A page of a new browser, which is closed at the end of the block. `options`: for its command line."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
        process = await asyncio.create_subprocess_exec(
            browser,
            *flags,
            *options,
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await asyncio.wait_for(_read_port(Path(folder, "DevToolsActivePort")), START_SECONDS)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    pages = [each for each in await response.json() if each["type"] == "page"]
                url = pages[0]["webSocketDebuggerUrl"]
                async with session.ws_connect(url, max_msg_size=0) as socket:
                    yield BrowserPage(socket)
        finally:
            await _end(process)


@asynccontextmanager
async def _limit(what: str) -> AsyncIterator[None]:
    """TimeoutError, which names what is waited for, if the block takes longer than ANSWER_SECONDS."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            yield
    except TimeoutError as error:
        raise TimeoutError(f"the browser was waited for in vain for {ANSWER_SECONDS:g} s: {what}") from error


async def _end(process: Process) -> None:
    """End the browser in order; one that does not end soon is killed."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), END_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()


async def _read_port(path: Path) -> int:
    """The port that the browser has chosen, once it has written it."""
    while True:
        try:
            return int(path.read_text().splitlines()[0])
        except (OSError, ValueError, IndexError):
            await asyncio.sleep(0.05)
