"""Certificates for servers on this machine, as files in PEM form."""

from __future__ import annotations

import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

ADDRESS = "127.0.0.1"


def write_certificate(
    folder: Path,
    name: str = "a",
    *,
    kind: Literal["ec", "rsa"] = "ec",
    days: int = 30,
    password: bytes | None = None,
    host: str | None = None,
    for_clients: bool = False,
) -> dict[str, str]:
    """Write a self-signed certificate and its key. Returns `server.tls` for them. `days`: until it expires;
    negative: since then. `host`: the name that it is for; None: this machine's address. `for_clients`: it may
    not be a server's."""
    key = ec.generate_private_key(ec.SECP256R1()) if kind == "ec" else rsa.generate_private_key(65537, 2048)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    known = x509.DNSName(host) if host else x509.IPAddress(ipaddress.ip_address(ADDRESS))
    now = datetime.now(UTC)
    purpose = ExtendedKeyUsageOID.CLIENT_AUTH if for_clients else ExtendedKeyUsageOID.SERVER_AUTH
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=60))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([known]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        .sign(key, hashes.SHA256())
    )
    paths = {"certificate": folder / f"{name}.pem", "key": folder / f"{name}.key"}
    paths["certificate"].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    cipher = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    kinds = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, cipher)
    paths["key"].write_bytes(key.private_bytes(*kinds))
    return {what: str(path) for what, path in paths.items()}


def make_trusting_context() -> ssl.SSLContext:
    """For a client that accepts every certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
