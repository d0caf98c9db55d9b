"""The series of /metrics: thousands of names that clients make up (models, adapters, paths, methods, users,
keys, error texts) add none but those of a surface with a status, of which there is a bounded number.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from yarl import URL

from mlxrun.server.batches.batch_queue import BatchQueue
from mlxrun.server.batches.storage import Storage
from mlxrun.server.http.surface import ROUTES, UNKNOWN_SURFACE
from mlxrun.server.request_metrics import METRICS, RequestMetrics
from tests.helpers.server_fakes import Serving, make_chat_body, make_script, run_server, server_config
from tests.helpers.storm_counts import count, make_rng
from tests.helpers.tokenizers import FakeModelInfo
from tests.robustness.test_server_fuzz_bodies import CHAT, GOOD, MESSAGES, METHODS

STATUSES = {200, 204, 400, 401, 403, 404, 405, 409, 413, 415, 417, 422, 429, 499, 500, 501, 503, 504, 529}
REQUESTS = re.compile(r'(mlxrun_requests_(?:total|created))\{status="(\d+)",surface="(\w+)"\}')


@pytest.fixture
async def s(tmp_path: Path) -> AsyncIterator[Serving]:
    """A server with every surface."""
    config = server_config(max_body_bytes=100_000, store_responses=20)
    queue = BatchQueue(Storage(tmp_path, config.server.files_max_bytes))
    script = make_script("An answer.")
    async with run_server(config, model_info=FakeModelInfo(), script=script, batches=queue) as serving:
        yield serving


async def list_series(s: Serving) -> set[str]:
    """Names with their labels."""
    lines = (await s.get("/metrics")).body.decode().splitlines()
    return {line.rpartition(" ")[0] for line in lines if line and not line.startswith("#")}


async def warm_up(s: Serving) -> None:
    """What a normal day has: answers of each surface."""
    for path, bodies in GOOD.items():
        await s.post(path, bodies[0])
    for path in ("/v1/models", "/v1/files", "/v1/batches", "/health", "/v1/status"):
        await s.get(path)
    await s.settle()


async def make_up(s: Serving, rng: random.Random, at: int) -> None:
    """One request with a name that no other has."""
    name = f"{rng.choice(('x', 'org/x', 'embedded:x', 'x:y', 'é', 'claude'))}{at}"
    chat = make_chat_body(max_tokens=2)
    path, body = rng.choice(list(GOOD.items()))
    headers, method = {"Content-Type": "application/json"}, "POST"
    made: Any = {**body[0], "model": name}
    how = rng.randrange(9)
    if how == 0:
        path, made = CHAT, {**chat, "user": name, "safety_identifier": name, "metadata": {name: name}}
    elif how == 1:
        path = rng.choice((f"/{name}", f"/v1/{name}", f"/v1/responses/{name}", f"/v1/files/{name}/content"))
        method = rng.choice(METHODS)
    elif how == 2:
        method = f"M{at}"
    elif how == 3:
        path, made = CHAT, {**chat, name: 1, "response_format": {"type": name}}
    elif how == 4:
        path, made = MESSAGES, {"model": name, "max_tokens": 2, "messages": chat["messages"], "tools": [name]}
    elif how == 5:
        headers |= {"x-api-key": name, "x-request-id": f"id{at}", "User-Agent": name.encode().hex()}
    elif how == 6:
        headers |= {"Content-Type": f"text/x{at}", "Content-Encoding": f"x{at}"}
    elif how == 7:
        path += f"?{at}={at}"
    data = json.dumps(made).encode() if method not in ("GET", "HEAD") else None
    url = URL(s.url + path, encoded=False)
    async with s.http.request(method, url, data=data, headers=headers) as response:
        await response.read()
        assert response.status < 500, (method, path, made)
    count("requests with made-up names")


async def check_series(s: Serving, rng: random.Random, number: int) -> None:
    """Each new series is that of a surface with a status, and has nothing that a client made up."""
    await warm_up(s)
    before = await list_series(s)
    for at in range(number):
        await make_up(s, rng, at)
    await s.settle()
    new = await list_series(s) - before
    surfaces = {surface.name for surface in s.app[ROUTES].surfaces} | {UNKNOWN_SURFACE.name}
    for series in new:
        found = REQUESTS.fullmatch(series)
        assert found is not None, f"a new series: {series}"
        assert int(found[2]) in STATUSES and found[3] in surfaces, f"a new series: {series}"


@pytest.mark.parametrize(
    ("seed", "number"),
    [(0, 1000), *(pytest.param(seed, 5000, marks=pytest.mark.sweep) for seed in range(1, 4))],
)
async def test_made_up_names_make_no_series(s: Serving, seed: int, number: int, night: int) -> None:
    await check_series(s, make_rng(seed, night), number)


class ByPath:
    """Stands for the counter of requests: with a series for each path."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._counter = metrics.requests
        self._number = 0

    def labels(self, surface: str, status: str) -> Any:
        self._number += 1
        return self._counter.labels(f"{surface}{self._number}", status)


async def test_a_series_for_each_request_would_be_seen(s: Serving) -> None:
    """Mutation: a label that grows with what clients send."""
    s.app[METRICS].requests = ByPath(s.app[METRICS])  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="a new series"):
        await check_series(s, random.Random(0), 50)
