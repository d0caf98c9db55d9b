"""A server with nothing but files and batches, on an engine that echoes (batch_fakes.py)."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from mlxrun.config.setting_fields import hash_config
from mlxrun.config.settings import Config, ServerSettings
from mlxrun.jobs.run.job_service import JobService
from mlxrun.server.app import make_app
from mlxrun.server.batches.batch_queue import BatchQueue
from mlxrun.server.batches.storage import Storage
from mlxrun.server.endpoints import admin, anthropic_batches, batches, ui
from tests.helpers.batch_fakes import FakeClient, make_config
from tests.helpers.tokenizers import FakeModelInfo

CHAT = "/v1/chat/completions"


class Clock:
    """Seconds since 1970, as the test wants them."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class RunningServer:
    """One server that runs; `http` knows its address."""

    url: str
    http: aiohttp.ClientSession
    queue: BatchQueue
    client: FakeClient
    jobs: JobService

    async def upload(
        self, lines: Iterable[Any], name: str = "job.jsonl", *, expires_after: int | None = None
    ) -> str:
        """The id of a file of these lines; `expires_after`: seconds."""
        texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
        form = aiohttp.FormData({"purpose": "batch"})
        if expires_after is not None:
            form.add_field("expires_after[anchor]", "created_at")
            form.add_field("expires_after[seconds]", str(expires_after))
        form.add_field("file", "".join(text + "\n" for text in texts).encode(), filename=name)
        async with self.http.post("/v1/files", data=form) as response:
            assert response.status == 200, await response.text()
            return str((await response.json())["id"])

    async def create(self, file: str, **more: Any) -> dict[str, Any]:
        """The answer to a new batch; `status_code` among it if it is refused."""
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h", **more}
        return await self.send("POST", "/v1/batches", json=body)

    async def send(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        async with self.http.request(method, path, **more) as response:
            found: dict[str, Any] = await response.json()
            return found if response.status == 200 else {"status_code": response.status, **found}

    async def wait_for_status(self, batch: str, *states: str) -> dict[str, Any]:
        """The batch, once it is in one of these states."""
        async with asyncio.timeout(60):
            while (found := await self.send("GET", f"/v1/batches/{batch}"))["status"] not in states:
                await asyncio.sleep(0.01)
        return found

    async def wait_until_ended(self, batch: str) -> dict[str, Any]:
        return await self.wait_for_status(batch, "completed", "failed", "cancelled", "expired")

    async def records(self, file: str | None) -> list[dict[str, Any]]:
        """The lines of a file of answers."""
        if file is None:
            return []
        async with self.http.get(f"/v1/files/{file}/content") as response:
            assert response.status == 200
            return [json.loads(line) for line in (await response.read()).splitlines()]


@dataclass
class ServerSetup:
    """Where servers run, one after the other: their folder, config and clock."""

    root: Path
    config: Config = field(default_factory=make_config)
    clock: Clock = field(default_factory=Clock)
    pause: float = 0.0  # between two tokens
    headers: dict[str, str] = field(default_factory=dict)
    engine: bool = True

    @asynccontextmanager
    async def run(self, client: FakeClient | None = None) -> AsyncIterator[RunningServer]:
        """One server from start to end."""
        client = client or FakeClient(FakeModelInfo(), self.pause)
        config = replace(self.config, server=replace(self.config.server, data_path=str(self.root)))
        jobs = JobService.for_engine(client, config, hash_config(config), lambda: {"name": "fake"})
        queue = BatchQueue(Storage(self.root, config.server.files_max_bytes, self.clock), retry_seconds=0.01)
        if self.engine:
            await queue.start(jobs)
        surfaces = [batches.SURFACE, anthropic_batches.SURFACE, admin.SURFACE, ui.SURFACE]
        app: web.Application = make_app(config, queue, surfaces=surfaces)
        async with TestServer(app, handler_cancellation=True) as http_server:
            url = str(http_server.make_url("/"))
            async with aiohttp.ClientSession(url, headers=self.headers) as http:
                try:
                    yield RunningServer(url, http, queue, client, jobs)
                finally:
                    await queue.close()


def with_keys(**keys: str) -> Config:
    """A config with named API keys."""
    return replace(make_config(), server=ServerSettings(api_keys=keys))


def serve(root: Path, stop_after: int) -> None:
    """A server in a process of its own, which computes so many tokens, and then waits to be killed."""

    async def run() -> None:
        client = FakeClient(FakeModelInfo(), 0.01)
        client.stop_after(stop_after)
        async with ServerSetup(root, make_config(rows=4)).run(client):
            await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def make_processes() -> Iterator[ForkServerContext]:
    """Starts processes for `serve` quickly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["mlxrun.api.openai.request", "mlxrun.api.text.media.images"])
        yield context


@contextmanager
def start_processes(context: ForkServerContext) -> Iterator[Callable[..., ForkServerProcess]]:
    """A function that starts a process of a target and its arguments; all are killed at the end."""
    processes: list[ForkServerProcess] = []

    def start(target: Callable[..., Any], *args: Any) -> ForkServerProcess:
        process = context.Process(target=target, args=args)
        process.start()
        processes.append(process)
        return process

    try:
        yield start
    finally:
        for process in processes:
            process.kill()
            process.join()


def count_answered(root: Path) -> int:
    """Records of batches under way."""
    return sum(path.read_bytes().count(b"\n") for path in root.glob("batches/*/job/*.out.jsonl"))
