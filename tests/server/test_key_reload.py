"""API keys that change while the server runs."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from mlxrun.config.server_settings import ApiKeySettings
from mlxrun.config.settings import Config
from mlxrun.core.errors import ConfigError
from mlxrun.server.http.access import CONFIG
from mlxrun.server.key_reload import list_differences, reload_config
from tests.helpers.command_processes import RunningCommand, read_log, run_serve, wait_until
from tests.helpers.raw_clients import until
from tests.helpers.server_fakes import Serving, make_chat_body, make_script, run_server, server_config

Keys = Mapping[str, str | ApiKeySettings]
CHAT = "/v1/chat/completions"
ANN, BEN, EVE = ("sesame-ann-0123456789", "sesame-ben-0123456789", "sesame-eve-0123456789")


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxrun.server.key_reload")


def reload(s: Serving, keys: Keys, **others: object) -> None:
    config = s.app[CONFIG]
    server = replace(config.server, api_keys=dict(keys), **others)  # type: ignore[arg-type]
    reload_config(s.app, lambda: replace(config, server=server))


async def list_statuses(s: Serving) -> list[int]:
    """What each of the three keys gets for a model list."""
    return [(await s.get("/v1/models", x_api_key=key)).status for key in (ANN, BEN, EVE)]


async def test_keys_come_go_and_change(caplog: pytest.LogCaptureFixture) -> None:
    async with run_server(server_config(api_keys={"ann": ANN, "ben": BEN})) as s:
        assert await list_statuses(s) == [200, 200, 401]
        reload(s, {"ben": BEN, "eve": EVE})
        assert await list_statuses(s) == [401, 200, 200]
        reload(s, {"ben": ApiKeySettings(BEN, "metrics"), "eve": ANN})
        assert await list_statuses(s) == [200, 403, 401]
        reload(s, {"ben": ApiKeySettings(BEN, "metrics"), "eve": ANN})
    assert [record.getMessage() for record in caplog.records] == [
        "SIGHUP: 2 API keys (new: eve; gone: ann)",
        "SIGHUP: 2 API keys (changed: ben, eve)",
        "SIGHUP: 2 API keys, as before",
    ]
    assert "sesame" not in caplog.text


async def test_a_running_request_goes_on() -> None:
    gate = asyncio.Event()
    config = server_config(api_keys={"ann": ANN})
    async with run_server(config, script=make_script("a", gate.wait, "b")) as s:
        received = asyncio.create_task(s.post(CHAT, make_chat_body(), x_api_key=ANN))
        await until(lambda: len(s.live) == 1)
        reload(s, {"ben": BEN})
        gate.set()
        assert (await received).status == 200
        assert (await s.post(CHAT, make_chat_body(), x_api_key=ANN)).status == 401


async def test_a_wrong_config_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> Config:
        raise ConfigError.from_problems(["a.yaml:1:1: no", "a.yaml:2:1: nor this"])

    async with run_server(server_config(api_keys={"ann": ANN})) as s:
        reload_config(s.app, fail)
        assert await list_statuses(s) == [200, 401, 401]
        reload(s, {})
        assert await list_statuses(s) == [200, 401, 401], "it is not open to all"
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("ERROR", "SIGHUP: nothing is reloaded: a.yaml:1:1: no"),
        ("ERROR", "SIGHUP: nothing is reloaded: a.yaml:2:1: nor this"),
        (
            "ERROR",
            "SIGHUP: nothing is reloaded: server.api_keys is empty; restart the server to serve without keys",
        ),
    ]


async def test_other_settings_are_named(caplog: pytest.LogCaptureFixture) -> None:
    async with run_server(server_config()) as s:
        reload(s, {"ann": "short"}, max_messages=9, keepalive=3.0)
        assert (await s.get("/v1/models")).status == 401
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warnings[0].startswith("server.api_keys: the key of ann is weak")
    assert warnings[1] == (
        "SIGHUP: only server.api_keys is reloaded; a restart is needed for server.max_messages, "
        "server.keepalive"
    )
    assert list_differences(Config(), Config()) == []


def ask(server: RunningCommand, key: str) -> int:
    connection = http.client.HTTPConnection(*server.address, timeout=120)
    try:
        body = json.dumps(make_chat_body(max_tokens=1))
        headers = {"x-api-key": key, "Content-Type": "application/json"}
        connection.request("POST", CHAT, body, headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.slow
def test_a_signal_reloads_the_keys_of_a_command(tmp_path: Path) -> None:
    """The key is in a file, which a service manager has written anew."""
    (tmp_path / "key").write_text(ANN)
    with run_serve(tmp_path, f"server.api_keys.me=${{file:{tmp_path}/key}}") as server:
        assert (ask(server, ANN), ask(server, BEN)) == (200, 401)
        (tmp_path / "key").write_text(f"{BEN}\n")
        assert (ask(server, ANN), ask(server, BEN)) == (200, 401)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "(changed: me)" in read_log(tmp_path), lambda: read_log(tmp_path))
        assert (ask(server, ANN), ask(server, BEN)) == (401, 200)
        (tmp_path / "key").unlink()
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "nothing is reloaded" in read_log(tmp_path), lambda: read_log(tmp_path))
        assert ask(server, BEN) == 200
        assert ANN not in read_log(tmp_path) and BEN not in read_log(tmp_path)
