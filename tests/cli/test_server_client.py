"""Commands that talk with a server over https: which certificate they accept, and the commands themselves."""

from __future__ import annotations

import asyncio
import io
import json
import shutil
import signal
from contextlib import closing
from pathlib import Path

import pytest

from mlxrun.cli.main import main
from mlxrun.cli.server_client import ClientError, ServerClient, connect, read_state
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
