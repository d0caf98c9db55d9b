"""API keys: on every endpoint a request is compared with all keys, in a time that tells nothing about them.
Storms of wrong keys in odd headers are refused, and no key is ever in a log or in an answer.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxrun.cluster.servers.server_actor import make_worker_app
from mlxrun.cluster.servers.server_relay import SECRET_HEADER
from mlxrun.config.settings import Config
from mlxrun.server.batches.batch_queue import BatchQueue
from mlxrun.server.batches.storage import Storage
from mlxrun.server.http import access
from mlxrun.server.http.access import ApiKeys
from mlxrun.server.http.surface import ROUTES, Endpoint
from mlxrun.server.lifecycle import listen
from tests.helpers.server_fakes import Serving, run_server, server_config
from tests.helpers.storm_counts import count, make_rng
from tests.helpers.tokenizers import FakeModelInfo

KEYS = {"ann": "sesame-ann-0123456789", "ben": "sesame-ben-0123456789", "eve": "sesame-\u00e9ve-\u2713"}
WRONG = "poppy-wrong-0123456789"
MARKS = ("sesame", "poppy")  # which are in every key, right or wrong
WITHIN = 60  # seconds: a hang, on whatever machine


@pytest.fixture
async def s(tmp_path: Path) -> AsyncIterator[Serving]:
    """A server with every surface."""
    config = server_config(api_keys=KEYS, max_body_bytes=100_000)
    queue = BatchQueue(Storage(tmp_path, config.server.files_max_bytes))
    async with run_server(config, model_info=FakeModelInfo(), batches=queue) as serving:
        yield serving


class Spy:
    """Stands for `hmac` in access.py: what was compared."""

    def __init__(self) -> None:
        self.compared: list[tuple[bytes, bytes]] = []

    def compare_digest(self, one: bytes, other: bytes) -> bool:
        self.compared.append((one, other))
        return hmac.compare_digest(one, other)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    made = Spy()
    monkeypatch.setattr(access, "hmac", SimpleNamespace(compare_digest=made.compare_digest))
    return made


def list_endpoints(s: Serving) -> list[Endpoint]:
    surfaces = s.app[ROUTES].surfaces
    return [each for surface in surfaces for each in surface.endpoints if not each.public]


async def check_comparisons(s: Serving, spy: Spy) -> None:
    """On every endpoint, as many comparisons of digests as there are keys, whatever is wrong with the key."""
    own = KEYS["ann"]
    wrong = ("x", own[:-1], own + "0", f"X{own[1:]}", own[:-1] + "X", own.upper(), "k" * 4000, "\u00e9")
    for endpoint in list_endpoints(s):
        path = re.sub(r"\{[^}]*\}", "x", endpoint.path)
        assert (await s.request(endpoint.method, path)).status == 401, path
        for key in wrong:
            spy.compared.clear()
            reply = await s.request(endpoint.method, path, x_api_key=key)
            assert reply.status == 401 and len(spy.compared) == len(KEYS), (path, key)
            assert {len(digest) for pair in spy.compared for digest in pair} == {32}
            count("requests with wrong keys")


async def test_every_endpoint_compares_with_all_keys(s: Serving, spy: Spy) -> None:
    names = {endpoint.path for endpoint in list_endpoints(s)}
    assert {"/metrics", "/v1/status", "/v1/cache/clear", "/v1/embeddings", "/v1/batches"} <= names
    await check_comparisons(s, spy)
    for key in KEYS.values():  # a right one is compared with all as well
        spy.compared.clear()
        assert (await s.get("/v1/status", x_api_key=key)).status == 200 and len(spy.compared) == len(KEYS)
    keys = ApiKeys(KEYS)
    assert not any(mark in repr(vars(keys)) for mark in MARKS), "only digests are kept"


async def test_keys_that_are_compared_as_texts_would_be_seen(
    s: Serving, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutation: as a dictionary finds them."""
    names = {secret: name for name, secret in KEYS.items()}
    monkeypatch.setattr(ApiKeys, "find_name", lambda self, secret: names.get(secret))
    with pytest.raises(AssertionError):
        await check_comparisons(s, spy)


def make_headers(rng: random.Random) -> bytes:
    """Header lines with wrong keys, in an odd form, and perhaps several."""
    key = WRONG.encode()
    odd = (
        *(
            key,
            b"",
            b" ",
            b"\t" + key,
            key * 200,
            key + b"\xff\xfe",
            "poppy-\u2713".encode(),
            b"\xed\xa0\x80",
        ),
        *(
            KEYS["ann"].encode()[:-1],
            KEYS["ann"].encode() + b"\xc3\xa9",
            b'"' + key + b'"',
            key + b", " + key,
        ),
        *(
            b"%00" + key,
            b"poppy\x7f",
            b"poppy\x01",
            b"poppy\x00",
            b"=?utf-8?B?cG9wcHk=?=",
            b"poppy\r\n folded",
        ),
    )
    schemes = (
        b"Bearer ",
        b"bearer ",
        b"BEARER\t",
        b"Bearer",
        b"Bearer  ",
        b"Basic ",
        b"Token ",
        b"",
        b"\xff ",
    )
    schemes += (b"Bearer Bearer ", b"Digest username=", b"Bearer:")
    lines = []
    for _ in range(rng.choice((1, 1, 1, 2, 40))):
        name = rng.choice((b"Authorization", b"authorization", b"x-api-key", b"X-API-KEY", b"Authorization "))
        scheme = rng.choice(schemes) if name.lower().startswith(b"auth") else b""
        lines.append(name + b": " + scheme + rng.choice(odd) + b"\r\n")
    return b"".join(lines)


async def send(s: Serving, headers: bytes, path: str) -> tuple[int, bytes]:
    """The status, and the whole answer."""
    host, port = s.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(WITHIN):
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode())
            writer.write(headers + b"\r\n")
            raw = await reader.read()
        return int(raw.split(b" ", 2)[1]), raw
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("seed", "number"),
    [(0, 400), *(pytest.param(seed, 4000, marks=pytest.mark.sweep) for seed in range(1, 5))],
)
async def test_storms_of_wrong_keys(
    s: Serving, seed: int, number: int, night: int, caplog: pytest.LogCaptureFixture
) -> None:
    rng, statuses = make_rng(seed, night), set()
    caplog.set_level(logging.DEBUG)
    for _ in range(number):
        headers = make_headers(rng)
        status, raw = await send(
            s, headers, rng.choice(("/v1/models", "/metrics", "/v1/status", "/v1/files"))
        )
        assert status in (400, 401), (status, headers, raw)
        assert not any(mark.encode() in raw for mark in MARKS), (headers, raw)
        statuses.add(status)
        count("requests with wrong keys")
    assert statuses == {400, 401} and s.engine.requests == []
    said = [f"{record.getMessage()} {record.exc_text or record.exc_info or ''}" for record in caplog.records]
    assert not [text for text in said if any(mark in text for mark in MARKS)]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (await s.get("/v1/models", x_api_key=KEYS["ann"])).status == 200


@pytest.mark.parametrize("given", [b"", b"x", b"\xff\xfe", "\u2713".encode(), b"\xed\xa0\x80", b"s" * 8000])
async def test_odd_secrets_of_workers(given: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """A worker of several is asked by others than its front."""
    app = make_worker_app(Config(server=server_config().server), 0, "sesame")
    async with listen(app) as url:
        serving = SimpleNamespace(url=url)
        name = SECRET_HEADER.encode()
        status, _ = await send(serving, name + b": " + given + b"\r\n", "/health/live")  # type: ignore[arg-type]
        assert status == 403
        assert (await send(serving, name + b": sesame\r\n", "/v1/models"))[0] != 403  # type: ignore[arg-type]
    assert not [record for record in caplog.records if record.exc_info]
