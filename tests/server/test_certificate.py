"""server.tls: what is refused at start, what is warned of, and which certificate a connection gets."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

import pytest

from mlxrun.config.settings import ServerSettings
from mlxrun.core.errors import ConfigError
from mlxrun.server.certificate import ServerCertificate, read_certificate
from tests.helpers.certificates import make_trusting_context, write_certificate
from tests.helpers.raw_clients import ONLY, connect, cut, until
from tests.helpers.server_fakes import make_chat_body, make_script, run_server, server_config
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
