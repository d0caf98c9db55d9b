"""Web pages of other sites and a server without keys, in a real browser."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.browser import BrowserPage
from tests.helpers.browser_pages import BROWSER, open_page
from tests.helpers.raw_clients import until
from tests.helpers.server_fakes import Serving, make_chat_body, make_script, run_server, server_config

pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
STRANGER = "evil.example"  # a name that leads to this machine, as its owner can arrange
BODY = json.dumps(make_chat_body())
CHAT, CANCEL = "/v1/chat/completions", "/v1/requests/victim/cancel"
JSON = {"Content-Type": "application/json"}
# What a page can do with fetch: a path and options.
FETCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "models": ("/v1/models", {}),
    "chat": (CHAT, {"method": "POST", "body": BODY, "headers": JSON}),
    "chat as text": (CHAT, {"method": "POST", "body": BODY}),
    "chat unread": (CHAT, {"method": "POST", "body": BODY, "mode": "no-cors"}),
    "chat without referrer": (
        CHAT,
        {"method": "POST", "body": BODY, "mode": "no-cors", "referrerPolicy": "no-referrer"},
    ),
    "cancel": (CANCEL, {"method": "POST"}),
    "cancel unread": (CANCEL, {"method": "POST", "mode": "no-cors"}),
    "clear": ("/v1/cache", {"method": "DELETE"}),
    "models unread": ("/v1/models", {"mode": "no-cors"}),
}
FETCH = """
(async () => {
  try {
    const reply = await fetch(%s, %s);
    return [reply.type, reply.status, await reply.text()];
  } catch (error) {
    return ["failed", 0, ""];
  }
})()
"""
# A form needs no permission, and can write JSON as text/plain: `{"messages": ..., "user": "=x"}`.
FORM = """
new Promise(done => {
  document.body.innerHTML = '<iframe name="answer"></iframe><form method="POST" target="answer"></form>';
  const form = document.querySelector("form"), field = document.createElement("input");
  form.action = %s;
  form.enctype = "text/plain";
  field.name = %s;
  field.value = 'x"}';
  form.append(field);
  document.querySelector("iframe").onload = () => done();
  form.submit();
})
"""


async def fetch(page: BrowserPage, url: str, options: dict[str, Any]) -> tuple[str, int, str]:
    """The kind of response that the page sees, its status and its text."""
    kind, status, text = await page.run(FETCH % (json.dumps(url), json.dumps(options)))
    return kind, status, text


async def send_form(page: BrowserPage, url: str) -> None:
    """Send a chat with a form, into a frame of the page."""
    name = BODY.removesuffix("}") + ', "user": "'
    await page.run(FORM % (json.dumps(url), json.dumps(name)))


@asynccontextmanager
async def open_foreign_page(host: str) -> AsyncIterator[BrowserPage]:
    """A page of another site, of a server on this machine."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="<!doctype html><title>Cats</title>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/", answer)
    async with TestServer(app) as site, open_page(f"--host-resolver-rules=MAP {STRANGER} 127.0.0.1") as page:
        await page.open(f"http://{host}:{site.port}/")
        assert await page.run("document.title") == "Cats"
        yield page


@asynccontextmanager
async def run_victim(**fields: Any) -> AsyncIterator[Serving]:
    """A server with a request that runs until the end of the block."""
    forever = asyncio.Event()
    script = make_script("a", forever.wait)
    async with run_server(server_config(**fields), script=script) as s:
        running = asyncio.create_task(s.post(CHAT, make_chat_body(), x_request_id="victim"))
        await until(lambda: (victim := s.live.get("victim")) and victim.output_tokens)
        s.engine.script = make_script("b")
        yield s
        running.cancel()
        forever.set()


@pytest.mark.parametrize("host", [STRANGER, "127.0.0.1"])
async def test_a_page_of_another_origin_can_do_nothing(host: str) -> None:
    """Another port is another origin too. The server has its default config."""
    async with run_victim() as s, open_foreign_page(host) as page:
        for name, (path, options) in FETCHES.items():
            kind, status, text = await fetch(page, s.url + path, options)
            assert (kind in ("failed", "opaque"), status, text) == (True, 0, ""), name
        await send_form(page, s.url + CHAT)
        assert (len(s.engine.requests), s.engine.aborted, s.engine.cleared) == (1, [], 0)
        assert s.live.get("victim") is not None


async def test_a_page_that_the_config_allows_can_do_all_that() -> None:
    """The twin: these requests do reach the server, but for text/plain bodies."""
    async with run_victim(cors_origins=("*",)) as s, open_foreign_page(STRANGER) as page:
        seen = {name: await fetch(page, s.url + path, options) for name, (path, options) in FETCHES.items()}
        assert json.loads(seen["models"][2])["data"]
        assert seen["chat"][:2] == ("cors", 200) and len(s.engine.requests) == 2
        assert seen["chat as text"][:2] == ("cors", 415)
        assert json.loads(seen["cancel"][2])["cancelled"] and s.live.get("victim") is None
        assert seen["clear"][1] == 200 and s.engine.cleared == 1
        await send_form(page, s.url + CHAT)
        assert len(s.engine.requests) == 2


async def test_a_rebound_name_is_refused_with_what_to_set() -> None:
    """The page's own site leads here now, so that its browser hides nothing from it."""
    for allowed in ((), (STRANGER,)):
        async with run_victim(allowed_hosts=allowed) as s, open_foreign_page(STRANGER) as page:
            own = s.url.replace("127.0.0.1", STRANGER)
            await page.open(own + "/v1/models")
            shown = json.loads(await page.run("document.body.innerText"))
            seen = {name: await fetch(page, path, options) for name, (path, options) in FETCHES.items()}
            if allowed:
                assert shown["data"] and seen["chat"][1] == 200
                continue
            assert shown["error"]["code"] == "forbidden"
            assert f"'{STRANGER}'" in shown["error"]["message"]
            assert "add it to server.allowed_hosts" in shown["error"]["message"]
            assert {status for _, status, _ in seen.values()} == {403}
            assert (len(s.engine.requests), s.engine.aborted, s.engine.cleared) == (1, [], 0)
