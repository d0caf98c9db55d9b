"""What API keys with roles may use."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from mlxrun.config.server_settings import ApiKeySettings
from mlxrun.server.app import list_surfaces
from mlxrun.server.endpoints import runs
from tests.api.test_prompt_prefix import BODIES
from tests.helpers.raw_clients import until
from tests.helpers.server_fakes import make_chat_body, make_script, run_server, server_config

CHAT = "/v1/chat/completions"
PLAIN = "plain-0123456789abcdef"
KEYS: dict[str, str | ApiKeySettings] = {
    "plain": PLAIN,
    "user": ApiKeySettings("user-0123456789abcdef", "inference"),
    "prometheus": ApiKeySettings("prometheus-0123456789", "metrics"),
}
ADMIN = ApiKeySettings("admin-0123456789abcdef", "admin")
MONITORING = (("GET", "/metrics"), ("GET", "/v1/status"), ("GET", "/v1/cache"))
CHAT_BODY = BODIES["/v1/chat/completions"]
WARM = "/v1/cache/warm"
CLEARING = (("DELETE", "/v1/cache"), ("POST", "/v1/cache/clear"), ("POST", WARM))
ANSWERING = (("POST", CHAT), ("GET", "/v1/models"))


async def list_allowed(keys: dict[str, str | ApiKeySettings], name: str) -> set[tuple[str, str]]:
    """The endpoints that the key of this name may use. All others answer 403."""
    value = keys[name]
    key = value if isinstance(value, str) else value.key
    found = set()
    async with run_server(server_config(api_keys=keys)) as s:
        for method, path in (*MONITORING, *CLEARING, *ANSWERING):
            body: Any = make_chat_body() if path == CHAT else {"body": CHAT_BODY} if path == WARM else None
            reply = await s.request(method, path, body, x_api_key=key)
            assert reply.status in (200, 403), (method, path)
            if reply.status == 200:
                found.add((method, path))
            else:
                text = reply.json["error"]["message"]
                assert f"the API key {name!r} has the role" in text and f"{method} {path} needs" in text
                assert key not in text
        assert (await s.get("/openapi.json", x_api_key=key)).status == 200
        assert (await s.get("/health", x_api_key=key)).status == 200
    return found


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("plain", ANSWERING),
        ("user", ANSWERING),
        ("prometheus", MONITORING),
        ("admin", (*MONITORING, *CLEARING, *ANSWERING)),
    ],
)
async def test_what_each_role_may_use(name: str, allowed: tuple[tuple[str, str], ...]) -> None:
    assert await list_allowed(KEYS | {"admin": ADMIN}, name) == set(allowed)


async def test_keys_without_a_role_may_use_everything_while_there_is_no_admin() -> None:
    """Otherwise nobody could clear the cache."""
    assert await list_allowed(KEYS, "plain") == {*MONITORING, *CLEARING, *ANSWERING}
    assert await list_allowed(KEYS, "prometheus") == set(MONITORING)


def test_endpoints_of_other_surfaces_need_the_role_inference() -> None:
    """A new endpoint is none of the monitoring by accident."""
    for surface in list_surfaces():
        roles = {endpoint.role for endpoint in surface.endpoints}
        if surface is runs.SURFACE:
            assert roles == {"admin"}, "it shows the runs of all keys"
            continue
        others = {"metrics", "admin", None} if surface.name == "admin" else set()
        assert roles == {"inference", *others}


@pytest.mark.parametrize(
    ("name", "status"), [("plain", 404), ("user", 404), ("prometheus", 403), ("admin", 200)]
)
async def test_only_an_admin_ends_requests_of_others(name: str, status: int) -> None:
    keys: dict[str, str | ApiKeySettings] = KEYS | {"admin": ADMIN, "owner": "owner-0123456789abcdef"}
    value = keys[name]
    gate = asyncio.Event()
    async with run_server(server_config(api_keys=keys), script=make_script("a", gate.wait)) as s:
        body, owner = make_chat_body(), {"x_api_key": "owner-0123456789abcdef"}
        received = asyncio.create_task(s.post(CHAT, body, x_request_id="it", **owner))
        await until(lambda: len(s.live) == 1)
        key = value if isinstance(value, str) else value.key
        assert (await s.post("/v1/requests/it/cancel", b"", x_api_key=key)).status == status
        gate.set()
        assert (await received).status == (499 if status == 200 else 200)


async def test_the_log_names_a_key_and_never_shows_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with run_server(server_config(api_keys=KEYS)) as s:
        await s.get("/v1/models", x_api_key="prometheus-0123456789")
    assert "GET /v1/models 403 prometheus " in caplog.text
    assert "prometheus-0123456789" not in caplog.text
