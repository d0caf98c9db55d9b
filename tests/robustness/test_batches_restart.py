"""Batches through stops, full disks, bugs and broken connections: nothing is lost, nothing is there twice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import EngineDead
from mlxrun.core.request import Request
from mlxrun.core.visible_text import TextFormatter
from mlxrun.jobs.records.output_records import BatchStamp
from mlxrun.jobs.records.run_paths import JobPaths
from tests.helpers.batch_fakes import Bench, FakeClient, chat, chats
from tests.helpers.batches_server import CHAT, RunningServer, ServerSetup
from tests.helpers.tokenizers import FakeModelInfo

SAVED = "batches/*/batch.json"


@pytest.fixture
def place(tmp_path: Path) -> ServerSetup:
    return ServerSetup(tmp_path / "data")


async def test_restart_in_the_middle(place: ServerSetup) -> None:
    """Half done, the server stops; the next one goes on where it was, and every line is there once."""
    lines, client = chats(200), FakeClient(FakeModelInfo())
    client.stop_after(200)
    async with place.run(client) as site:
        made = await site.create(await site.upload(lines), metadata={"keep": "me"})
        async with asyncio.timeout(60):
            while (await site.send("GET", f"/v1/batches/{made['id']}"))["request_counts"]["completed"] < 5:
                await asyncio.sleep(0.01)
        first = site.client
    async with place.run() as site:
        done = await site.wait_until_ended(made["id"])
        assert done["status"] == "completed"
        assert done["metadata"] == {"keep": "me"}
        assert done["created_at"] == made["created_at"]
        assert done["request_counts"] == {"total": 200, "completed": 200, "failed": 0}
        ids = [record["custom_id"] for record in await site.records(done["output_file_id"])]
        assert sorted(ids) == sorted(line["custom_id"] for line in lines)
        assert sum(site.client.tries.values()) <= 195
        assert sum(first.tries.values()) < 200


@pytest.mark.parametrize("status", ["validating", "in_progress", "finalizing", "cancelling"])
async def test_a_batch_continues_from_every_status(place: ServerSetup, status: str) -> None:
    """A kill may leave a batch in any state, its files in any state of that."""
    place.engine = False
    async with place.run() as site:
        made = await site.create(await site.upload(chats(4)))
    folder = place.root / "batches" / made["id"]
    (job,) = folder.glob("job/*.jsonl")
    if status in ("finalizing", "cancelling"):
        bench = Bench(job, stamp=BatchStamp(made["id"], made["created_at"]))
        await bench.run(limit=None if status == "finalizing" else 2)
        if status == "cancelling":
            with JobPaths(job).out.open("ab") as file:
                file.write(b'{"id": "batch_req_torn')
    found = json.loads((folder / "batch.json").read_bytes())
    if status == "finalizing":
        found["request_counts"] = {"total": 4, "completed": 4, "failed": 0}
    (folder / "batch.json").write_text(json.dumps({**found, "status": status}))
    place.engine = True
    async with place.run() as site:
        done = await site.wait_until_ended(made["id"])
        cancelled = status == "cancelling"
        assert done["status"] == ("cancelled" if cancelled else "completed")
        assert len(await site.records(done["output_file_id"])) == (2 if cancelled else 4)
        assert done["request_counts"]["completed"] == (2 if cancelled else 4)
        tries = sum(site.client.tries.values())
        assert tries == {"validating": 4, "in_progress": 4, "finalizing": 0, "cancelling": 0}[status]
        if status in ("finalizing", "cancelling"):
            assert not site.client.tries


async def test_the_input_may_be_deleted(place: ServerSetup) -> None:
    place.engine = False
    async with place.run() as site:
        file = await site.upload(chats(3))
        made = await site.create(file)
        assert (await site.send("DELETE", f"/v1/files/{file}"))["deleted"]
        await site.queue.start(site.jobs)
        assert (await site.wait_until_ended(made["id"]))["request_counts"]["completed"] == 3


async def test_a_dead_engine_loses_nothing(place: ServerSetup) -> None:
    """The batch stays as it is, and goes on with the next server."""
    async with place.run() as site:
        made = await site.create(await site.upload([*chats(3), chat("dead", "DEAD now")]))
        async with asyncio.timeout(60):
            while site.queue._tasks:
                await asyncio.sleep(0.01)
        assert (await site.send("GET", f"/v1/batches/{made['id']}"))["status"] == "in_progress"

    class Healed(FakeClient):
        async def generate(self, request: Request) -> Any:
            try:
                async for event in super().generate(request):
                    yield event
            except EngineDead as error:
                raise KeyError("healed enough to fail alone") from error

    async with place.run(Healed(FakeModelInfo())) as site:
        done = await site.wait_until_ended(made["id"])
        assert (done["status"], done["request_counts"]["completed"]) == ("completed", 3)


async def test_a_full_disk_is_waited_for(place: ServerSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be written is tried again: nothing is lost, and others get their turn."""
    from mlxrun.jobs.records import run_paths as files

    write, fails = files.os.write, [3]

    def full(handle: int, data: bytes) -> int:
        if bytes(data).startswith(b'{"id"') and fails[0]:
            fails[0] -= 1
            raise OSError(28, "No space left on device")
        return write(handle, data)

    monkeypatch.setattr(files.os, "write", full)
    async with place.run() as site:
        done = await site.wait_until_ended((await site.create(await site.upload(chats(6))))["id"])
        assert (done["status"], done["request_counts"]["completed"]) == ("completed", 6)
        assert len(await site.records(done["output_file_id"])) == 6
    assert fails == [0]


async def test_a_bug_fails_one_batch(
    place: ServerSetup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Others go on; the log says where it was, and nothing that people wrote."""
    async with place.run() as site:
        run, secret = site.jobs.run, "words of a user"

        async def broken(path: Path, *given: Any) -> Any:
            if path.stem == made["id"]:
                raise ZeroDivisionError(secret)
            return await run(path, *given)

        monkeypatch.setattr(site.jobs, "run", broken)
        made = await site.create(await site.upload(chats(2)))
        failed = await site.wait_until_ended(made["id"])
        assert failed["status"] == "failed"
        assert failed["errors"]["data"][0]["message"] == "internal error (ZeroDivisionError)"
        logged = "\n".join(map(TextFormatter().format, caplog.records))
        assert "in broken" in logged and secret not in logged
        assert (await site.wait_until_ended((await site.create(await site.upload(chats(2))))["id"]))[
            "status"
        ] == "completed"


async def test_a_client_may_disconnect_at_any_moment(place: ServerSetup) -> None:
    """A batch is made, or cancelled, as a whole or not at all, whenever the connection breaks."""
    client = FakeClient(FakeModelInfo())
    client.stop_after(100)
    async with place.run(client) as site:
        file = await site.upload(chats(300))
        path = f"{site.url}v1/batches"
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        for wait in (0.0, 0.001, 0.002, 0.004, 0.008):
            task = asyncio.create_task(site.send("POST", path, json=body))
            await asyncio.sleep(wait)
            task.cancel()
            await asyncio.wait((task,))
        made = (await site.create(file))["id"]
        await site.wait_for_status(made, "in_progress")
        task = asyncio.create_task(site.send("POST", f"{path}/{made}/cancel"))
        while (await site.send("GET", f"/v1/batches/{made}"))["status"] == "in_progress":
            await asyncio.sleep(0)
        task.cancel()
        assert (await site.wait_until_ended(made))["status"] == "cancelled"
        async with asyncio.timeout(60):  # a batch whose client has gone may still be being made
            while await list_batches(site) != {path.parent.name for path in place.root.glob(SAVED)}:
                await asyncio.sleep(0.01)
        assert made in await list_batches(site)


async def list_batches(site: RunningServer) -> set[str]:
    return {batch["id"] for batch in (await site.send("GET", "/v1/batches"))["data"]}
