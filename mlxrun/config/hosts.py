"""Host names and addresses of the server's settings."""

from __future__ import annotations

import ipaddress
import re

_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")  # in lower case


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_address(name: str) -> bool:
    """Whether this is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def normalize_host(host: str) -> str | None:
    """Return an item of server.allowed_hosts as Host headers are compared with it; None if it is invalid."""
    name = host.strip("[]").lower().removesuffix(".")
    return name if name == "*" or _HOST.fullmatch(name) or is_address(name) else None
