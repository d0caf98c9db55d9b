"""`mlxrun stop`, and `mlxrun ps` beside it."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import pytest

from mlxrun.cli.commands.stop import choose_servers
from mlxrun.cli.main import main
from mlxrun.cli.server_client import ClientError, ServerClient
from mlxrun.core.errors import ConfigError
from mlxrun.server.running_servers import ServerNote
from tests.helpers.command_processes import run_serve

CHAT = ServerNote(11, "http://127.0.0.1:8000", "mlx-community/Qwen3-8B-4bit", 1.0)
OTHER = ServerNote(12, "http://[::1]:8001", "/models/qwen3-0.6b/", 2.0)


@pytest.mark.parametrize("name", ["11", "8000", "http://127.0.0.1:8000/", CHAT.model, "qwen3-8b-4bit"])
def test_a_server_has_several_names(name: str) -> None:
    assert choose_servers([CHAT, OTHER], name, False) == [CHAT]


def test_without_a_name_one_server_is_meant() -> None:
    assert choose_servers([OTHER], None, False) == [OTHER]
    with pytest.raises(ConfigError, match=r"^2 servers run; name one of them, or give --all: http.*, http"):
        choose_servers([CHAT, OTHER], None, False)
    assert choose_servers([CHAT, OTHER], None, True) == [CHAT, OTHER]


def test_a_name_of_no_server_says_which_run() -> None:
    shown = f"no server is 80; these run: {CHAT.url} (process 11, {CHAT.model})"
    with pytest.raises(ConfigError, match=rf"^{re.escape(shown)}$"):  # one line: others are escaped
        choose_servers([CHAT], "80", False)
    with pytest.raises(ConfigError, match="no server runs on this machine"):
        choose_servers([], None, True)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--now"]])
def test_a_server_is_listed_and_stopped(
    tmp_path: Path, options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    with run_serve(tmp_path) as server:
        assert main(["ps", "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["servers"]
        shown = (found["pid"], found["url"], found["model"], found["state"])
        assert shown == (server.process.pid, server.url, "embedded", "ok")
        assert main(["stop", str(server.address[1]), *options]) == 0
        assert server.process.wait(60) in (0, 143)
    assert main(["ps"]) == 0
    assert capsys.readouterr().out.startswith("no servers run")


@pytest.mark.slow
def test_now_waits_for_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server that would let its requests finish for an hour."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    messages, fields = (
        [{"role": "user", "content": "hello"}],
        {"max_tokens": 4000, "ignore_eos": True, "n": 8},
    )
    with run_serve(tmp_path, "server.drain_timeout=3600") as server:
        client = ServerClient(server.url)
        with closing(client.stream(messages, fields)) as parts:
            next(parts)
            assert main(["stop", "--now"]) == 0
            with pytest.raises(ClientError, match="broke off"):
                list(parts)
        assert server.process.wait(60) in (-15, 143)
