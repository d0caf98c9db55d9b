"""The page for people: its files, its headers, who gets it, and what `/` answers."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest

from mlxrun.config.settings import ApiSettings
from mlxrun.server.endpoints import admin, ui
from tests.helpers.server_fakes import MINI, Serving, make_chat_body, run_server, server_config

HTML = "text/html,application/xhtml+xml,*/*;q=0.8"  # what browsers accept
ONLY = [MINI, admin.SURFACE, ui.SURFACE]
KEYS = {"alice": "sesame-0123456789abc"}
MOST_BYTES = 60_000  # of the whole page


def test_all_files_together_are_small_and_load_nothing_from_elsewhere() -> None:
    assets = ui.read_assets()
    assert sum(map(len, assets.values())) < MOST_BYTES
    text = b"\n".join(assets.values()).decode().replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"https?://\w", text) == []
    page = assets["index.html"].decode()
    assert re.findall(r"<script(?! type=\"module\" src=\"ui/)|<style| style=| on\w+=", page) == []
    named = set(re.findall(r"(?:src|href)=\"ui/([^\"]+)", page))
    named |= set(re.findall(r"from \"\./([^\"]+)", text))
    assert named - {"runs"} | {"index.html"} == set(assets), "files that nobody loads, or that are missing"


async def test_every_file_has_its_type_and_a_strict_policy() -> None:
    async with run_server(surfaces=ONLY) as s:
        for endpoint in ui.SURFACE.endpoints:
            reply = await s.get(endpoint.path)
            assert reply.status == 200
            assert reply.headers["X-Content-Type-Options"] == "nosniff"
            policy = dict(part.split(" ", 1) for part in reply.headers["Content-Security-Policy"].split("; "))
            assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
            for kind in ("script-src", "style-src", "connect-src"):
                assert policy[kind] == "'self'"
            assert "unsafe" not in reply.headers["Content-Security-Policy"]
        types = {path: (await s.get(path)).headers["Content-Type"] for path in ("/ui", "/ui/main.js")}
        assert types == {"/ui": "text/html; charset=utf-8", "/ui/main.js": "text/javascript; charset=utf-8"}
        for path in ("/ui/nothing.js", "/ui/../app.py", "/ui/index.html"):
            assert (await s.get(path)).status == 404
        assert (await s.get("/v1/status")).headers["X-Content-Type-Options"] == "nosniff"


async def test_a_browser_that_has_a_file_does_not_get_it_again() -> None:
    async with run_server(surfaces=ONLY) as s:
        first = await s.get("/ui/main.js")
        again = await s.get("/ui/main.js", if_none_match=first.headers["ETag"])
        assert (again.status, again.body) == (304, b"")
        assert (await s.get("/ui/style.css", if_none_match=first.headers["ETag"])).status == 200
        assert (await s.request("HEAD", "/ui")).status == 200


async def find_target(s: Serving, path: str, accept: str, method: str = "GET") -> str | int:
    """Where a path leads, or the status without a redirect."""
    request = s.http.request(method, s.url + path, headers={"Accept": accept}, allow_redirects=False)
    async with request as response:
        return response.headers["Location"] if response.status == 302 else response.status


async def test_browsers_are_led_to_the_page() -> None:
    async with run_server(surfaces=ONLY) as s:
        assert await find_target(s, "/", HTML) == "ui"
        assert await find_target(s, "/", HTML, "HEAD") == "ui"
        assert await find_target(s, "/ui/", HTML) == "../ui"
        assert (await s.get("/", accept=HTML)).body == ui.read_assets()["index.html"]
        for path, accept, method in (("/", "*/*", "GET"), ("/", HTML, "POST"), ("/nothing", HTML, "GET")):
            assert await find_target(s, path, accept, method) == 404
        text = (await s.get("/")).json["error"]["message"]
        assert "'/'" not in text and "/ui" not in text and "/v1/status" in text
        assert not any("/ui" in path for path in (await s.get("/openapi.json")).json["paths"])


async def test_other_clients_find_what_ollama_has_there() -> None:
    async with run_server() as s:
        assert await find_target(s, "/", HTML) == "ui"
        assert await find_target(s, "/", "*/*") == 200
        assert (await s.get("/")).body == b"Ollama is running"


async def test_the_page_can_be_switched_off() -> None:
    config = replace(server_config(), apis=ApiSettings(ui=False, ollama=False))
    async with run_server(config) as s:
        assert await find_target(s, "/", HTML) == 404
        reply = await s.get("/ui")
        assert reply.json["error"]["message"] == "/ui is switched off (apis.ui: false)"


async def test_the_page_needs_no_key_and_comes_before_the_model() -> None:
    async with run_server(server_config(api_keys=KEYS), surfaces=ONLY, loaded=False) as s:
        assert (await s.get("/ui")).status == 200
        assert await find_target(s, "/", HTML) == "ui"
        assert (await s.get("/v1/status")).status == 401


@pytest.mark.parametrize(("keys", "status"), [(KEYS, 200), ({}, 403)])
async def test_with_keys_the_page_works_under_any_name(keys: dict[str, str], status: int) -> None:
    """Browsers send an Origin with the page's own requests too. Without keys the name could be rebound."""
    config = server_config(api_keys=keys)
    own = {"host": "chat.example:8000", "origin": "https://chat.example:8000", "x_api_key": KEYS["alice"]}
    async with run_server(config, surfaces=ONLY) as s:
        assert (await s.get("/ui", host=own["host"])).status == 200
        assert (await s.post("/mini", make_chat_body(), **own)).status == status
        own["origin"] = "https://evil.example"
        assert (await s.post("/mini", make_chat_body(), **own)).status == 403


async def test_what_the_page_asks_for_again_and_again_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "mlxrun.server.http.request_log")
    async with run_server(server_config(api_keys=KEYS), surfaces=ONLY) as s:
        for path in ("/ui", "/v1/status", "/metrics"):
            assert (await s.get(path, x_api_key=KEYS["alice"])).status == 200
        assert caplog.messages == []
        assert (await s.get("/v1/status", x_api_key="wrong")).status == 401
        assert "GET /v1/status 401" in caplog.text
