"""What `mlxrun ps` says of a server's state."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlxrun.cli.main import main
from mlxrun.cli.server_client import read_modalities, read_state
from mlxrun.server.running_servers import ServerNote
from tests.helpers.command_processes import PATIENCE


@contextmanager
def answer_with(answer: bytes) -> Iterator[str]:
    """The URL of a server that sends this to its first client."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as client:
                client.settimeout(PATIENCE)
                client.recv(4096)
                client.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(PATIENCE)


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        (b'HTTP/1.1 503 no\r\n\r\n{"status": "loading"}', "loading"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"status": "ok"}', "ok"),
        (b"HTTP/1.1 200 OK\r\n\r\n[]", "unknown"),
        (b"HTTP/1.1 200 OK\r\n\r\nnot JSON", "no answer"),
        (b"SSH-2.0\r\n", "no answer"),
    ],
)
def test_states(answer: bytes, state: str) -> None:
    with answer_with(answer) as url:
        assert read_state(url) == state


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert read_state(f"http://127.0.0.1:{port}") == "no answer"


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        (b'{"data": [{"input_modalities": ["text", "image"]}, {"state": "failed"}]}', ["text", "image"]),
        (b'{"data": [{"input_modalities": ["text"]}, {"input_modalities": ["audio"]}]}', ["text", "audio"]),
        (b'{"error": {"code": "invalid_api_key"}}', []),
        (b"[]", []),
        (b"not JSON", []),
    ],
)
def test_what_models_take(answer: bytes, kinds: list[str]) -> None:
    with answer_with(b"HTTP/1.1 200 OK\r\n\r\n" + answer) as url:
        assert read_modalities(url) == kinds


def test_the_list_says_what_models_take(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    note = ServerNote(7, "http://127.0.0.1:9", "m", 0.0)
    monkeypatch.setattr("mlxrun.server.running_servers.list_servers", lambda folder: [note])
    monkeypatch.setattr("mlxrun.cli.commands.ps.read_state", lambda url, certificate: "ok")
    monkeypatch.setattr("mlxrun.cli.commands.ps.read_modalities", lambda url, certificate: ["text", "image"])
    assert main(["ps"]) == 0
    said = capsys.readouterr().out
    assert "takes" in said and "text, image" in said
    assert main(["ps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["servers"][0]["takes"] == ["text", "image"]


def test_a_server_is_one_line_on_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However narrow the terminal is, so that `mlxrun ps | grep 18731` finds it."""
    note = ServerNote(7, "http://127.0.0.1:18731", f"/models/{'a' * 200}", 0.0)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("mlxrun.server.running_servers.list_servers", lambda folder: [note])
    monkeypatch.setattr("mlxrun.cli.commands.ps.read_state", lambda url, certificate: "loading")
    assert main(["ps"]) == 0
    _, line = capsys.readouterr().out.splitlines()
    assert note.url in line and note.model in line
