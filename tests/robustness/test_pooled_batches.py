"""A batch of embeddings in the background of chats and embeddings, with little memory, and clients that
vanish: it is completed, its vectors are those of its texts alone, and nothing is left.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mlxrun.config.setting_fields import hash_config
from mlxrun.config.settings import Config
from mlxrun.engine.client import EngineClient
from mlxrun.jobs.run.job_service import JobService
from mlxrun.model.load.model_info import load_model_info
from mlxrun.server.batches.batch_queue import BatchQueue
from mlxrun.server.batches.storage import Storage
from tests.helpers.server_fakes import Serving, run_server
from tests.helpers.storm_counts import count, make_rng
from tests.robustness.test_pooled_storm import (
    EMBED,
    WITHIN,
    Callers,
    check_nothing_left,
    is_same,
    make_config,
    read_vector,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("probed_once")]
LINES = 12


@asynccontextmanager
async def serve(config: Config, folder: Path) -> AsyncIterator[Serving]:
    """A server that runs batches."""
    client = await EngineClient.start(config, load_model_info(config.model, weights=True))
    queue = BatchQueue(Storage(folder, config.server.files_max_bytes))
    try:
        await queue.start(JobService.for_engine(client, config, hash_config(config), lambda: {"name": "cpu"}))
        timeout = aiohttp.ClientTimeout(total=WITHIN)
        async with (
            run_server(config, engine=client, batches=queue) as s,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http,
        ):
            yield replace(s, http=http)
    finally:
        await queue.close()
        await client.close()


async def create_batch(s: Serving, bodies: list[dict[str, Any]]) -> str:
    lines = [
        {"custom_id": str(at), "method": "POST", "url": EMBED, "body": body} for at, body in enumerate(bodies)
    ]
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "".join(json.dumps(line) + "\n" for line in lines).encode(), filename="a.jsonl")
    async with s.http.post(f"{s.url}/v1/files", data=form) as response:
        file = (await response.json())["id"]
    body = {"input_file_id": file, "endpoint": EMBED, "completion_window": "24h"}
    reply = await s.post("/v1/batches", body)
    assert reply.status == 200, reply.body
    return str(reply.json["id"])


async def read_vectors(s: Serving, batch: str) -> list[Any]:
    """By line, once the batch has ended."""
    async with asyncio.timeout(WITHIN):
        while (found := (await s.get(f"/v1/batches/{batch}")).json)["status"] not in ("completed", "failed"):
            await asyncio.sleep(0.02)
    assert found["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    raw = (await s.get(f"/v1/files/{found['output_file_id']}/content")).body
    records = sorted(map(json.loads, raw.splitlines()), key=lambda record: int(record["custom_id"]))
    return [[read_vector(each["embedding"]) for each in r["response"]["body"]["data"]] for r in records]


async def test_a_batch_of_embeddings_under_load(tmp_path: Path, night: int) -> None:
    config = make_config("chat:qwen3", tmp_path / "model")
    scheduler = replace(config.scheduler, memory_limit=3_400_000, memory_headroom=0.0)
    async with serve(replace(config, scheduler=scheduler), tmp_path / "data") as s:
        callers = Callers(s, make_rng(1, night), EMBED)
        await callers.prepare(12, 8)
        bodies = [{"input": [callers.make_text(200), "x" * 900]} for _ in range(LINES)]
        batch = await create_batch(s, bodies)
        await callers.storm(callers.ask, callers.vanish, callers.cancel)
        for body, found in zip(bodies, await read_vectors(s, batch), strict=True):
            alone = (await s.post(EMBED, body)).json["data"]
            assert is_same(found, [read_vector(each["embedding"]) for each in alone], exact=False)
        await check_nothing_left(s)
        count("lines of batches beside storms", LINES)
