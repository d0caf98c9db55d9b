"""What `mlxrun ps` says of a server's state."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mlxrun.cli.commands.ps import read_state


@contextmanager
def answer_with(answer: bytes) -> Iterator[str]:
    """The URL of a server that sends this to its first client."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with listener.accept()[0] as client:
                client.recv(4096)
                client.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


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
