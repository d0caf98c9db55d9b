"""The client of commands: what other programs may answer, which certificate it accepts, and the commands."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlxrun.cli.main import main
from mlxrun.cli.server_client import ClientError, ServerClient, connect, find_server, read_state
from mlxrun.server.certificate import ServerCertificate
from tests.helpers.certificates import write_certificate
from tests.helpers.command_processes import read_log, run_serve, start_command, wait_until
from tests.helpers.server_fakes import run_server


def ask(url: str, certificate: str | None) -> int:
    with closing(connect(url, 60, certificate)) as connection:
        connection.request("GET", "/health")
        return connection.getresponse().status


async def test_the_certificate_of_the_note_is_accepted_whatever_it_says(tmp_path: Path) -> None:
    """It names another host and has expired. It may be followed by others in its file."""
    files = write_certificate(tmp_path, host="ai.example.com", days=-1)
    other = Path(write_certificate(tmp_path, "b")["certificate"])
    own = Path(files["certificate"])
    async with run_server(certificate=ServerCertificate(files)) as s:
        own.write_text(own.read_text() + other.read_text())
        assert await asyncio.to_thread(ask, s.url, files["certificate"]) == 200
        assert await asyncio.to_thread(read_state, s.url, files["certificate"]) == "ok"


async def test_another_certificate_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    files, other = write_certificate(tmp_path), write_certificate(tmp_path, "b")["certificate"]
    async with run_server(certificate=ServerCertificate(files)) as s:
        with pytest.raises(OSError, match=f"its certificate is not that of {other}; SIGHUP has it read"):
            await asyncio.to_thread(ask, s.url, other)
        (tmp_path / "empty").write_text("")
        with pytest.raises(OSError, match="its certificate is not that of"):
            await asyncio.to_thread(ask, s.url, f"{tmp_path}/empty")
        assert await asyncio.to_thread(read_state, s.url, other) == "no answer"
        with pytest.raises(ClientError, match="does not answer: its certificate is not that of"):
            await asyncio.to_thread(ServerClient(s.url, None, other).list_models)
        assert "mlxrun_requests_total{" not in (await s.get("/metrics")).body.decode()


async def test_without_one_the_machine_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = write_certificate(tmp_path)
    async with run_server(certificate=ServerCertificate(files)) as s:
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            await asyncio.to_thread(ask, s.url, None)
        monkeypatch.setenv("SSL_CERT_FILE", files["certificate"])
        assert await asyncio.to_thread(ask, s.url, None) == 200


@contextmanager
def run_scripted(body: bytes, status: int = 200, missing: int = 0) -> Iterator[ServerClient]:
    """A client of a server that always answers the same, and ends the connection. `missing`: bytes that it
    has promised besides."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) + missing))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield ServerClient(f"http://127.0.0.1:{server.server_port}")
        finally:
            server.shutdown()


def read_answer(body: bytes) -> str:
    with run_scripted(body) as client:
        return "".join(part.text for part in client.stream([], {}))


@pytest.mark.parametrize(
    "end", ['{"choices": [{"delta": null, "finish_reason": "stop"}]}', '{"choices": null}\n\ndata: [DONE]']
)
def test_a_stream_of_another_program_is_read(end: str) -> None:
    """One that writes no space, null where there is nothing, and [DONE] or not."""
    text = 'data:{"choices": [{"delta": {"content": "five"}}], "error": null}'
    assert read_answer(f"{text}\n\ndata: {end}\n\n".encode()) == "five"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ('data: {"choices": [{"delta": {"content": "fi"}}]}\n\n', "broke off before the end of the answer"),
        ("", "broke off before the end of the answer"),
        ('data: {"error": "it crashed"}\n\n', "^it crashed$"),
        ('data: {"error": {"message": "it crashed"}}\n\n', "^it crashed$"),
    ],
)
def test_an_answer_that_breaks_off_is_an_error(body: str, reason: str) -> None:
    """As where the server is killed: the end of its connection is no end of the answer."""
    with pytest.raises(ClientError, match=reason):
        read_answer(body.encode())


@pytest.mark.parametrize("body", ["[]", '{"data": null}', '{"data": "text"}', '{"data": ["text"]}'])
def test_another_program_has_no_models(body: str) -> None:
    with run_scripted(body.encode()) as client:
        assert client.list_models() == []


def test_a_program_without_models_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """As any other on port 8000 that answers JSON."""
    monkeypatch.setattr("mlxrun.cli.server_client.list_certificates", dict)
    for body, found in ((b"{}", False), (b'{"data": [{"id": "m"}]}', True)):
        with run_scripted(body) as client:
            monkeypatch.setattr("mlxrun.cli.server_client.LOCAL", client.url)
            assert (find_server(None) == client.url) is found


def test_a_refusal_that_breaks_off_is_an_error_too() -> None:
    with (
        run_scripted(b"{", status=500, missing=9) as client,
        pytest.raises(ClientError, match="does not answer"),
    ):
        client.list_models()


@pytest.mark.parametrize("body", [b'{"error": {"message": "no API key was given"}}', b"who are you?"])
def test_a_server_that_wants_a_key_names_its_option(body: bytes) -> None:
    with (
        run_scripted(body, status=401) as client,
        pytest.raises(ClientError, match="; give --key, or set MLXRUN_API_KEY$"),
    ):
        client.list_models()


def test_a_url_needs_no_scheme() -> None:
    with run_scripted(b'{"data": []}') as client:
        assert ServerClient(client.url.removeprefix("http://") + "/v1").list_models() == []


@pytest.mark.parametrize(
    ("end", "key"), [("", "sesame\r"), ("", "sesame\u65e5"), ("/caf\u00e9", None), ("/a..b\u00e9.de", None)]
)
def test_what_http_does_not_allow_is_an_error_without_the_key(end: str, key: str | None) -> None:
    with run_scripted(b"{}") as client, pytest.raises(ClientError, match="HTTP does not allow") as found:
        ServerClient(client.url + end, key).list_models()
    assert "sesame" not in str(found.value)


@pytest.mark.slow
def test_a_server_with_https_is_listed_asked_and_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a certificate that no machine trusts. A new one is used after SIGHUP, by the commands too."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.setattr("mlxrun.cli.server_client.LOCAL", "http://127.0.0.1:9")
    files, new = write_certificate(tmp_path, host="ai.example.com"), write_certificate(tmp_path, "b")

    def list_states() -> list[tuple[str, str]]:
        assert main(["ps", "--json"]) == 0
        return [(each["url"], each["state"]) for each in json.loads(capsys.readouterr().out)["servers"]]

    def chat(*options: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        assert main(["chat", "-p", "What is 2 + 3?", *options]) == 0
        return capsys.readouterr().out

    # Paths in --set are relative to the working directory, as all paths there.
    with run_serve(tmp_path, "server.tls={certificate: a.pem, key: a.key}") as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert f"curl --insecure {server.url}/v1/chat/completions" in read_log(tmp_path)
        assert list_states() == [(server.url, "ok")]
        assert "5" in chat() and "5" in chat("--url", f"{server.url}/v1")
        for name in ("certificate", "key"):
            shutil.copy(new[name], files[name])
        assert list_states() == [(server.url, "no answer")]
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "new connections get the certificate of" in read_log(tmp_path))
        assert list_states() == [(server.url, "ok")]
        shutil.copy(files["certificate"], files["key"])
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "SIGHUP: nothing is reloaded: server.tls: key: " in read_log(tmp_path))
        assert list_states() == [(server.url, "ok")]
        assert main(["stop", server.url]) == 0
        assert server.process.wait(60) == 0


@pytest.mark.slow
def test_a_wrong_certificate_ends_the_command_at_its_start(tmp_path: Path) -> None:
    write_certificate(tmp_path)
    process = start_command(tmp_path, "serve", "--set", "server.tls={certificate: a.pem, key: b.key}")
    assert process.wait(120) == 2
    assert f"server.tls: key: {tmp_path}/b.key: No such file or directory" in read_log(tmp_path)
