"""/ui/runs: who gets it, by which keys, and its headers."""

from __future__ import annotations

import base64
import logging
from collections.abc import AsyncIterator, Container, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from mlxrun.config.server_settings import ApiKeySettings
from mlxrun.core.errors import JobError, NotFound
from mlxrun.server.app import make_app
from mlxrun.server.endpoints import runs
from mlxrun.server.endpoints.runs import RUN_PAGES, PagesOfRuns
from mlxrun.server.lifecycle import listen
from tests.helpers.server_fakes import Serving, server_config

KEYS = {"alice": "sesame-0123456789abc"}


class FakePages:
    """Pages whose content is their keys."""

    policy = "default-src 'none'"

    def __init__(self) -> None:
        self.rendered = 0

    def render(self, keys: Sequence[str], known: Container[str] = ()) -> tuple[str, str]:
        if "none" in keys:
            raise NotFound("there is no run 'none' in this folder")
        if "broken" in keys:
            raise JobError("broken.jsonl: is damaged")
        digest = f"digest-{'-'.join(keys)}"
        self.rendered += digest not in known
        return digest, "" if digest in known else f"<p>{' '.join(keys) or 'index'}</p>"


@asynccontextmanager
async def serve_runs(pages: PagesOfRuns | None, **settings: Any) -> AsyncIterator[Serving]:
    """A server of these pages, before any model."""
    app = make_app(server_config(**settings), surfaces=[runs.SURFACE])
    if pages is not None:
        app[RUN_PAGES] = pages
    async with listen(app) as url, aiohttp.ClientSession() as http:
        yield Serving(url, app, None, http)


async def test_without_a_folder_the_config_key_is_named() -> None:
    async with serve_runs(None) as s:
        assert "server.runs_path" in (await s.get("/ui/runs")).json["error"]["message"]


async def test_pages_and_their_headers() -> None:
    pages = FakePages()
    async with serve_runs(pages) as s:
        index = await s.get("/ui/runs")
        assert index.body == b"<p>index</p>" and index.headers["Content-Type"] == "text/html; charset=utf-8"
        assert index.headers["Content-Security-Policy"] == "default-src 'none'"
        assert index.headers["X-Content-Type-Options"] == "nosniff"
        assert (await s.get("/ui/runs?run=a%2Fb&run=c")).body == b"<p>a/b c</p>"
        assert pages.rendered == 2
        again = await s.get("/ui/runs", if_none_match=index.headers["ETag"])
        assert (again.status, again.body, pages.rendered) == (304, b"", 2)
        assert (await s.get("/ui/runs?run=none")).status == 404
        broken = await s.get("/ui/runs?run=broken")
        assert broken.status == 400 and "is damaged" in broken.json["error"]["message"]
        for name, status in (("evil.example", 403), ("localhost", 200)):
            assert (await s.get("/ui/runs", host=name)).status == status
        assert (await s.request("POST", "/ui/runs")).status == 405


async def test_browsers_ask_for_the_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxrun.server.http.request_log")
    async with serve_runs(FakePages(), api_keys=KEYS) as s:
        refused = await s.get("/ui/runs")
        assert refused.status == 401 and refused.headers["WWW-Authenticate"].startswith('Basic realm="mlxrun')
        caplog.clear()
        for token, status in (
            (f"any:{KEYS['alice']}", 200),
            (f":{KEYS['alice']}", 200),
            ("any:wrong", 401),
            ("no colon", 401),
        ):
            given = "Basic " + base64.b64encode(token.encode()).decode()
            assert (await s.get("/ui/runs", authorization=given)).status == status, token
        assert (await s.get("/ui/runs", authorization="Basic %%%")).status == 401
        assert (await s.get("/ui/runs", x_api_key=KEYS["alice"])).status == 200
        assert " 200 " not in caplog.text, "what pages ask for again and again is not logged"


async def test_runs_are_for_the_role_admin() -> None:
    keys = {
        "boss": ApiKeySettings("boss-0123456789abcdef", "admin"),
        "user": ApiKeySettings("user-0123456789abcdef"),
    }
    async with serve_runs(FakePages(), api_keys=keys) as s:
        for name, status in (("boss", 200), ("user", 403)):
            assert (await s.get("/ui/runs", x_api_key=keys[name].key)).status == status
