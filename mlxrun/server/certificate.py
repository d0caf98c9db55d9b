"""The certificate of `server.tls`, which is checked when it is read, and what is read again at SIGHUP.

The server then takes over changed API keys and a new certificate while it runs.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from aiohttp import web

from mlxrun.config.server_settings import find_weak_keys
from mlxrun.config.setting_fields import list_values
from mlxrun.config.settings import Config, ServerSettings
from mlxrun.core.errors import ConfigError
from mlxrun.core.text_files import read_regular
from mlxrun.server.http.access import API_KEYS, CONFIG

log = logging.getLogger(__name__)
_PARTS = {"certificate": b"-----BEGIN CERTIFICATE-----", "key": b"PRIVATE KEY-----"}  # of the files, as PEM


class ServerCertificate:
    """The certificate of a server with its key, from the files of `server.tls`. ConfigError if they cannot be
    used. What clients would refuse, such as a certificate that has expired, is logged.

    `context`: for the listener. Each new connection gets the certificate that was read last.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files
        self._current = self.context = _read_context(files)
        # A context that has read two certificates may serve the old one, if their keys are of two kinds.
        self.context.sni_callback = self._choose_newest

    @property
    def path(self) -> str:
        """The absolute path of the certificate's file."""
        return self._files["certificate"]

    def reload(self) -> None:
        """Read the files again, for new connections. If they cannot be used, ConfigError; nothing changes."""
        self._current = _read_context(self._files)

    def _choose_newest(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Python calls this in every handshake, also if the client names no host."""
        connection.context = self._current


def read_certificate(settings: ServerSettings) -> ServerCertificate | None:
    """Read the certificate of `server.tls`; None if there is none."""
    return ServerCertificate(settings.tls) if settings.tls else None


def _read_context(files: Mapping[str, str]) -> ssl.SSLContext:
    for name, path in files.items():
        _check_file(name, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    certificate, key = files["certificate"], files["key"]
    try:
        context.load_cert_chain(certificate, key, password=lambda: _refuse_password(key))
    except ssl.SSLError as error:
        # The second one is what a key of another kind gives.
        if error.reason in ("KEY_VALUES_MISMATCH", "NO_CERTIFICATE_ASSIGNED"):
            text = f"server.tls: the key {key} is not that of the certificate {certificate}"
            raise ConfigError(text) from error
        reason = (error.reason or str(error)).replace("_", " ").lower()
        raise ConfigError(f"server.tls: {certificate} and {key} cannot be used: {reason}") from error
    refusal = _find_refusal(context, certificate)
    if refusal:
        log.warning("server.tls: clients refuse the certificate %s: %s", certificate, refusal)
    return context


def _check_file(name: str, path: str) -> None:
    try:
        content = read_regular(Path(path))
    except OSError as error:
        raise ConfigError(f"server.tls: {name}: {path}: {error.strerror}") from error
    if _PARTS[name] not in content:
        kind = "certificate" if name == "certificate" else "private key"
        raise ConfigError(f"server.tls: {name}: {path} has no {kind} in PEM form")


def _refuse_password(key: str) -> NoReturn:
    raise ConfigError(
        f"server.tls: the key {key} is encrypted; `openssl pkey -in {key} -out FILE` writes one that is not"
    )


def _find_refusal(context: ssl.SSLContext, certificate: str) -> str | None:
    """Return why a client that trusts the certificate would still refuse it: its dates, or its purpose. None
    if it would not."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    near = client.wrap_bio(to_client, to_server)
    far = context.wrap_bio(to_server, to_client, server_side=True)
    try:
        for end in (near, far, near):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    return None


KEYS = "server.api_keys"


def reload_config(
    app: web.Application, read_config: Callable[[], Config], certificate: ServerCertificate | None = None
) -> None:
    """Read the config and the files of the certificate again. Use its API keys, and the certificate for new
    connections, from now on. Requests that run go on.

    The log says what has changed. If the config or the certificate is wrong, or the config has no keys any
    more, all stays as it was.
    """
    try:
        config = read_config()
        if app[API_KEYS] and not config.server.api_keys:
            raise ConfigError(f"{KEYS} is empty; restart the server to serve without keys")
        if certificate is not None:
            certificate.reload()
    except ConfigError as error:
        for problem in error.problems or (str(error),):
            log.error("SIGHUP: nothing is reloaded: %s", problem)
        return
    keys, running = config.server.api_keys, app[CONFIG]
    for warning in find_weak_keys(config.server):
        log.warning("%s", warning)
    changes = app[API_KEYS].replace(keys)
    said = [f"{what}: {', '.join(names)}" for what, names in changes.items() if names]
    log.info("SIGHUP: %d API keys%s", len(keys), f" ({'; '.join(said)})" if said else ", as before")
    if certificate is not None:
        log.info("SIGHUP: new connections get the certificate of %s", certificate.path)
    others = list_differences(running, config)
    if others:
        log.warning("SIGHUP: only %s is reloaded; a restart is needed for %s", KEYS, ", ".join(others))


def list_differences(running: Config, config: Config) -> list[str]:
    """List the settings besides the API keys in which two configs differ."""
    pairs = zip(list_values(running), list_values(config), strict=True)
    return [info.path for (info, before), (_, after) in pairs if info.path != KEYS and before != after]
