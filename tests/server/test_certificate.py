"""server.tls: what is refused at start, what is warned of, and which certificate a connection gets."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import signal
import ssl
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from mlxrun.config.server_settings import ApiKeySettings
from mlxrun.config.settings import Config, ServerSettings
from mlxrun.core.errors import ConfigError
from mlxrun.server.certificate import ServerCertificate, list_differences, read_certificate, reload_config
from mlxrun.server.http.access import CONFIG
from tests.helpers.certificates import make_trusting_context, write_certificate
from tests.helpers.command_processes import RunningCommand, read_log, run_serve, wait_until
from tests.helpers.raw_clients import ONLY, connect, cut, until
from tests.helpers.server_fakes import Serving, make_chat_body, make_script, run_server, server_config
from tests.helpers.timers import fire_timers


def refuse(files: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as refused:
        ServerCertificate(files)
    return str(refused.value)


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    first, second = write_certificate(tmp_path), write_certificate(tmp_path, "b")
    other = write_certificate(tmp_path, "rsa", kind="rsa")
    (tmp_path / "broken").write_text("-----BEGIN CERTIFICATE-----\nnonsense\n-----END CERTIFICATE-----\n")
    missing, broken = f"{tmp_path}/c.pem", f"{tmp_path}/broken"
    certificate, key = first["certificate"], first["key"]
    for changed, expected in (
        ({"certificate": missing}, f"certificate: {missing}: No such file or directory"),
        ({"key": str(tmp_path)}, f"key: {tmp_path}: Is a directory"),
        ({"key": second["key"]}, f"the key {second['key']} is not that of the certificate {certificate}"),
        ({"key": other["key"]}, f"the key {other['key']} is not that of the certificate {certificate}"),
        ({"key": certificate}, f"key: {certificate} has no private key in PEM form"),
        ({"certificate": key}, f"certificate: {key} has no certificate in PEM form"),
        ({"certificate": broken}, f"{broken} and {key} cannot be used: "),
    ):
        assert refuse(first | changed).startswith(f"server.tls: {expected}")
    locked = write_certificate(tmp_path, "locked", password=b"sesame")
    assert refuse(locked).startswith(f"server.tls: the key {locked['key']} is encrypted; `openssl pkey -in ")


def test_what_clients_refuse_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mlxrun.server.certificate")
    expired = write_certificate(tmp_path, "expired", days=-1)
    wrong = write_certificate(tmp_path, "clients", for_clients=True)
    for files in (write_certificate(tmp_path), expired, wrong):
        ServerCertificate(files)
    text = "server.tls: clients refuse the certificate"
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == f"{text} {expired['certificate']}: certificate has expired"
    assert said[1].startswith(f"{text} {wrong['certificate']}: uns") and said[1].endswith(
        "certificate purpose"
    )
    assert len(said) == 2


def test_without_files_there_is_none() -> None:
    assert read_certificate(ServerSettings()) is None


async def shake_hands(url: str, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> tuple[bytes, str | None]:
    """The certificate of the server, and the version of TLS, for a client without a host name."""
    context = make_trusting_context()
    context.minimum_version, context.maximum_version = ssl.TLSVersion.MINIMUM_SUPPORTED, newest
    context.set_ciphers("ALL:@SECLEVEL=0")
    host, _, port = url.removeprefix("https://").partition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    found = writer.get_extra_info("ssl_object")
    writer.close()
    return found.getpeercert(True), found.version()


def read_der(files: dict[str, str]) -> bytes:
    return ssl.PEM_cert_to_DER_cert(Path(files["certificate"]).read_text())


@pytest.mark.parametrize(("before", "after"), [("rsa", "ec"), ("ec", "rsa"), ("ec", "ec")])
async def test_new_connections_get_the_certificate_that_was_read_last(
    tmp_path: Path, before: str, after: str
) -> None:
    """Also where its key is of another kind, of which OpenSSL keeps both in one context."""
    old, new = write_certificate(tmp_path, kind=before), write_certificate(tmp_path, "b", kind=after)  # type: ignore[arg-type]
    certificate = ServerCertificate(old)
    async with run_server(certificate=certificate) as s:
        url = s.url
        assert url.startswith("https://127.0.0.1:")
        assert (await shake_hands(url))[0] == read_der(old)
        for name in ("certificate", "key"):
            Path(old[name]).write_bytes(Path(new[name]).read_bytes())
        assert (await shake_hands(url))[0] != read_der(new), "the files were not read yet"
        certificate.reload()
        assert (await shake_hands(url))[0] == read_der(new)
        Path(old["key"]).unlink()
        with pytest.raises(ConfigError, match="No such file"):
            certificate.reload()
        assert (await shake_hands(url))[0] == read_der(new), "what was read stays in use"


async def test_old_versions_of_tls_are_refused(tmp_path: Path) -> None:
    async with run_server(certificate=ServerCertificate(write_certificate(tmp_path))) as s:
        url = s.url
        assert (await shake_hands(url))[1] == "TLSv1.3"
        assert (await shake_hands(url, ssl.TLSVersion.TLSv1_2))[1] == "TLSv1.2"
        with pytest.warns(DeprecationWarning), pytest.raises(OSError):
            await shake_hands(url, ssl.TLSVersion.TLSv1_1)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("in_order", [False, True], ids=["cut", "closed"])
async def test_a_client_that_leaves_ends_its_request(tmp_path: Path, stream: bool, in_order: bool) -> None:
    forever, certificate = asyncio.Event(), ServerCertificate(write_certificate(tmp_path))
    script = make_script("some text", forever.wait)
    async with run_server(certificate=certificate, surfaces=ONLY, script=script) as s:
        _, writer = await connect(s, make_chat_body(stream=stream))
        await until(lambda: [live.phase for live in s.live] == ["decode"])
        writer.close() if in_order else cut(writer)
        await s.settle()
        assert len(s.engine.aborted) == 1


async def test_a_reader_that_never_reads_is_disconnected(tmp_path: Path) -> None:
    """Once its request has timed out, as with http."""
    config, certificate = server_config(keepalive=0.1), ServerCertificate(write_certificate(tmp_path))
    script = make_script("abcdefgh" * 400)
    async with run_server(config, certificate=certificate, surfaces=ONLY, script=script) as s:
        _, writer = await connect(s, make_chat_body(stream=True, max_tokens=3_200), small=True)
        await until(lambda: s.engine.scripts_done == 1)
        assert len(s.live) == 1, "the rest waits for the reader"
        fire_timers("LiveRequest.fail")
        await s.settle()
        cut(writer)


async def test_a_connection_above_the_limit_is_refused_in_http(tmp_path: Path) -> None:
    forever, certificate = asyncio.Event(), ServerCertificate(write_certificate(tmp_path))
    config, script = server_config(max_connections=1), make_script("a", forever.wait)
    async with run_server(config, certificate=certificate, surfaces=ONLY, script=script) as s:
        _, writer = await connect(s, make_chat_body())
        await until(lambda: len(s.live) == 1)
        assert (await s.get("/health")).status == 503
        cut(writer)
        await s.settle()


Keys = Mapping[str, str | ApiKeySettings]
CHAT = "/v1/chat/completions"
ANN, BEN, EVE = ("sesame-ann-0123456789", "sesame-ben-0123456789", "sesame-eve-0123456789")


@pytest.fixture(autouse=True)
def _log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxrun.server.certificate")


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
