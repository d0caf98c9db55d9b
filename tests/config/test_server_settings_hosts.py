"""Host names and addresses of the server's settings."""

from __future__ import annotations

import pytest

from mlxrun.config.server_settings import is_address, is_loopback, normalize_host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"])
def test_addresses_of_this_machine(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.com", "localhost.example.com", ""])
def test_addresses_that_others_can_reach(host: str) -> None:
    assert not is_loopback(host)


def test_what_an_address_is() -> None:
    assert is_address("10.0.0.1") and is_address("fe80::1")
    assert not is_address("10.0.0") and not is_address("example.com")


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ("Example.COM.", "example.com"),
        ("*", "*"),
        ("[::1]", "::1"),
        ("my_host", "my_host"),
        ("a..b/c", None),
        ("http://a", None),
        ("", None),
    ],
)
def test_names_are_normalised_as_host_headers_are(item: str, name: str | None) -> None:
    assert normalize_host(item) == name
