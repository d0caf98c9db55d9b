"""Connections of commands to a server. One with `server.tls` on this machine is known by its certificate."""

from __future__ import annotations

import http.client
import re
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from mlxrun.core.text_files import read_regular

_CERTIFICATE = re.compile(rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def connect(url: str, timeout: float, certificate: str | None = None) -> http.client.HTTPConnection:
    """Make a connection to the server at `url`, which opens with the first request. `timeout`: seconds.

    `certificate`: the file of the only certificate that is accepted, whatever its names and dates are. None:
    those that this machine trusts. ValueError if `url` is not one.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme != "https":
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)
    if certificate is None:
        return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=timeout)
    return _PinnedConnection(parts.hostname or "", parts.port, timeout, Path(certificate))


class _PinnedConnection(http.client.HTTPSConnection):
    """A connection to the server that has the first certificate of a file. OSError if it has another one."""

    def __init__(self, host: str, port: int | None, timeout: float, certificate: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # most certificates name the public host, and not this address
        context.verify_mode = ssl.CERT_NONE  # compared below instead
        super().__init__(host, port, timeout=timeout, context=context)
        self._certificate = certificate

    def connect(self) -> None:
        """Open the connection, before anything is sent."""
        super().connect()
        found = _CERTIFICATE.search(read_regular(self._certificate))
        if found is None or self.sock.getpeercert(True) != ssl.PEM_cert_to_DER_cert(found[0].decode()):
            self.close()
            text = f"its certificate is not that of {self._certificate}; SIGHUP has it read the file again"
            raise OSError(text)
