"""The queue of batches: one at a time, oldest first, in the background; cancelled, expired, deleted."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from mlxrun.core.errors import Draining
from mlxrun.core.request import Request
from mlxrun.server.batches import batch_queue
from mlxrun.server.batches.batch_queue import BatchQueue
from mlxrun.server.batches.durable_files import StorageError
from mlxrun.server.batches.storage import Storage
from tests.helpers.batch_fakes import FakeClient, chat, chats, make_config
from tests.helpers.batches_server import RunningServer, ServerSetup
from tests.helpers.timers import fire_timers
from tests.helpers.tokenizers import FakeModelInfo


def make_client(stop_after: int) -> FakeClient:
    """An engine that waits after so many tokens, eight or so for each of `chats`, until it may `go_on`."""
    client = FakeClient(FakeModelInfo())
    client.stop_after(stop_after)
    return client


@pytest.fixture
def place(tmp_path: Path) -> ServerSetup:
    return ServerSetup(tmp_path / "data")


async def test_rows_are_in_the_background(place: ServerSetup) -> None:
    """Every request of a batch says so; the client itself is never closed, and signals are the server's."""
    seen: list[Request] = []
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    class Watched(FakeClient):
        def generate(self, request: Request) -> Any:
            seen.append(request)
            assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
            return super().generate(request)

    async with place.run(Watched(FakeModelInfo())) as site:
        await site.wait_until_ended((await site.create(await site.upload(chats(9))))["id"])
    assert len(seen) == 9
    assert all(request.background for request in seen)
    assert not site.client.closed


async def test_no_progress_is_printed(place: ServerSetup, capfd: pytest.CaptureFixture[str]) -> None:
    """No progress bar, no lines of progress: a server's standard error is its log."""
    async with place.run() as site:
        await site.wait_until_ended((await site.create(await site.upload(chats(3))))["id"])
    assert capfd.readouterr() == ("", "")


async def test_cancelling_keeps_finished_lines(place: ServerSetup) -> None:
    async with place.run(make_client(100)) as site:
        made = await site.create(await site.upload(chats(200)))
        async with asyncio.timeout(60):
            while (await site.send("GET", f"/v1/batches/{made['id']}"))["request_counts"]["completed"] < 3:
                await asyncio.sleep(0.02)
        found = await site.send("POST", f"/v1/batches/{made['id']}/cancel")
        assert found["status"] in ("cancelling", "cancelled") and found["cancelling_at"]
        done = await site.wait_until_ended(made["id"])
        assert (done["status"], site.client.busy) == ("cancelled", 0)
        answers = await site.records(done["output_file_id"])
        assert 3 <= len(answers) < 200
        assert done["request_counts"] == {"total": 200, "completed": len(answers), "failed": 0}
        again = await site.send("POST", f"/v1/batches/{made['id']}/cancel")
        assert (again["status_code"], again["error"]["code"]) == (409, "invalid_state")


async def test_cancelling_a_waiting_batch(place: ServerSetup) -> None:
    """A batch behind another ends at once; the one in front does not notice."""
    async with place.run(make_client(100)) as site:
        first = await site.create(await site.upload(chats(60)))
        second = await site.create(await site.upload(chats(5)))
        await site.wait_for_status(second["id"], "in_progress")
        await site.send("POST", f"/v1/batches/{second['id']}/cancel")
        done = await site.wait_until_ended(second["id"])
        assert (done["status"], done["output_file_id"]) == ("cancelled", None)
        assert (await site.send("GET", f"/v1/batches/{first['id']}"))["status"] == "in_progress"
        site.client.go_on()
        assert (await site.wait_until_ended(first["id"]))["request_counts"]["completed"] == 60


async def test_batches_run_one_after_the_other(place: ServerSetup) -> None:
    """The oldest first, never two at a time; a bad file is refused without waiting for its turn."""
    async with place.run(make_client(50)) as site:
        made = [await site.create(await site.upload([chat("a", f"batch {i}")] + chats(20))) for i in range(3)]
        bad = await site.wait_until_ended((await site.create(await site.upload(["bad"])))["id"])
        assert bad["status"] == "failed"
        states = [(await site.send("GET", f"/v1/batches/{m['id']}"))["status"] for m in made]
        assert "completed" not in states
        site.client.go_on()
        for batch in made:
            assert (await site.wait_until_ended(batch["id"]))["status"] == "completed"
        assert [text for text in site.client.tries if text.startswith("batch")] == [
            "batch 0",
            "batch 1",
            "batch 2",
        ]
        assert site.client.most <= place.config.scheduler.max_running


async def test_an_expired_window(place: ServerSetup) -> None:
    """What is done when the time is up can be downloaded; a batch that waits until then never runs."""
    place.engine = False
    async with place.run() as site:
        made = await site.create(await site.upload(chats(3)), completion_window="2h")
        place.clock.now += 2 * 3600
        await site.queue.start(site.jobs)
        done = await site.wait_until_ended(made["id"])
        assert (done["status"], done["expired_at"]) == ("expired", int(place.clock.now))
        assert not site.client.tries


async def test_a_window_that_expires_while_the_batch_runs(place: ServerSetup) -> None:
    """What runs is cut short; what is finished can be downloaded."""
    place.engine = False
    async with place.run(make_client(100)) as site:
        made = await site.create(await site.upload(chats(400)), completion_window="1h")
        await site.queue.start(site.jobs)
        async with asyncio.timeout(60):
            while site.client.output < 100:
                await asyncio.sleep(0.001)
        fire_timers("_release_waiter")
        done = await site.wait_until_ended(made["id"])
        answers = await site.records(done["output_file_id"])
        assert (done["status"], 0 < len(answers) < 400) == ("expired", True)
        assert done["request_counts"] == {"total": 400, "completed": len(answers), "failed": 0}
        assert site.client.busy == 0


async def test_the_status_shows_running_and_waiting_batches(
    place: ServerSetup, caplog: pytest.LogCaptureFixture
) -> None:
    """How far the batch is that runs, how many wait; a line in the log for each turn of its life."""
    caplog.set_level(logging.INFO, "mlxrun")
    place.config = make_config(rows=1)
    async with place.run(make_client(100)) as site:
        assert (await site.send("GET", "/v1/status"))["batches"] == {"running": None, "waiting": 0}
        first = await site.create(await site.upload(chats(30)))
        second = await site.create(await site.upload(chats(2)))
        bad = await site.create(await site.upload(["nonsense of a client"]))
        await site.wait_until_ended(bad["id"])
        await site.wait_for_status(first["id"], "in_progress")
        async with asyncio.timeout(60):
            while not ((running := (found := await _batches(site))["running"]) and running["done"]):
                await asyncio.sleep(0.01)
        assert (running["id"], running["failed"], running["total"]) == (first["id"], 0, 30)
        assert 0 < running["done"] < 30 and found["waiting"] == 1
        await site.send("POST", f"/v1/batches/{first['id']}/cancel")
        assert (await site.wait_until_ended(first["id"]))["status"] == "cancelled"
        site.client.go_on()
        assert (await site.wait_until_ended(second["id"]))["status"] == "completed"
        assert await _batches(site) == {"running": None, "waiting": 0}
    said = [
        record.getMessage() for record in caplog.records if record.name == "mlxrun.server.batches.batch_queue"
    ]
    assert {record.levelname for record in caplog.records if record.name.startswith("mlxrun.")} == {"INFO"}
    begun = f"{first['id']}: started; lines: 30"
    refused = (
        f"{bad['id']}: failed validation: line 1 is not a valid request"
        f" (GET /v1/batches/{bad['id']} says why)"
    )
    assert said.count(begun) == said.count(refused) == 1
    cancelled = [text for text in said if text.startswith(f"{first['id']}: cancelled: ")]
    assert len(cancelled) == 1 and cancelled[0].endswith(" of 30 lines done, 0 failed")
    ours = [text for text in said if text.startswith(second["id"])]
    assert ours == [
        f"{second['id']}: started; lines: 2",
        f"{second['id']}: completed: 2 of 2 lines done, 0 failed",
    ]
    assert len(said) == 5
    assert not any(word in caplog.text for word in ("command", "retry-failed", "nonsense"))


async def test_a_batch_that_goes_on_after_a_restart_is_not_said_to_begin(
    place: ServerSetup, caplog: pytest.LogCaptureFixture
) -> None:
    """Its counts are those of its validation until its files are read."""
    async with place.run(make_client(100)) as site:
        made = await site.create(await site.upload(chats(30)))
        async with asyncio.timeout(60):
            while not ((running := (await _batches(site))["running"]) and running["done"]):
                await asyncio.sleep(0.01)
    caplog.set_level("INFO", "mlxrun")
    async with place.run() as site:
        await site.wait_until_ended(made["id"])
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert f"{made['id']}: started; lines: 30\n" in said
    assert re.search(r"continuing: \d+ of 30 lines done", said) and not re.search(r"\b0 of 30", said)


async def _batches(site: RunningServer) -> Any:
    return (await site.send("GET", "/v1/status"))["batches"]


async def test_only_ended_batches_can_be_deleted(place: ServerSetup) -> None:
    """Its folder goes; its files stay, under their own ids; the others are not touched."""
    async with place.run(make_client(0)) as site:
        made = await site.create(await site.upload(chats(40)))
        await site.wait_for_status(made["id"], "in_progress")
        path = f"/v1/batches/{made['id']}"
        refused = await site.send("DELETE", path)
        assert (refused["status_code"], refused["error"]["code"]) == (409, "invalid_state")
        assert "cancel it first" in refused["error"]["message"]
        site.client.go_on()
        done = await site.wait_until_ended(made["id"])
        assert (done["status"], done["request_counts"]["completed"]) == ("completed", 40)
        other = await site.wait_until_ended((await site.create(await site.upload(chats(1))))["id"])
        assert await site.send("DELETE", path) == {"id": made["id"], "object": "batch", "deleted": True}
        for method, gone in (("GET", path), ("DELETE", path), ("POST", f"{path}/cancel")):
            assert (await site.send(method, gone))["status_code"] == 404
        assert len(await site.records(done["output_file_id"])) == 40
    assert [path.name for path in (place.root / "batches").iterdir()] == [other["id"]]
    async with place.run() as site:
        assert [each["id"] for each in (await site.send("GET", "/v1/batches"))["data"]] == [other["id"]]


async def test_a_deletion_that_a_kill_interrupts(place: ServerSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The description goes first: what is left of the folder is removed at the next start."""
    async with place.run() as site:
        made = await site.wait_until_ended((await site.create(await site.upload(chats(1))))["id"])
        with monkeypatch.context() as patch:
            patch.setattr("shutil.rmtree", lambda *given, **more: None)
            assert (await site.send("DELETE", f"/v1/batches/{made['id']}"))["deleted"]
    folder = place.root / "batches" / made["id"]
    assert folder.exists() and not (folder / "batch.json").exists()
    async with place.run() as site:
        assert (await site.send("GET", "/v1/batches"))["data"] == []
    assert not folder.exists()


async def test_expired_files_are_removed_while_the_server_runs(
    place: ServerSetup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also after a removal that failed, of which the log has a line."""
    monkeypatch.setattr(batch_queue, "EXPIRY_SECONDS", 0.01)
    async with place.run() as site:
        remove, calls = site.queue.storage.remove_expired, [0]

        def fail_once() -> None:
            calls[0] += 1
            if calls[0] == 1:
                raise StorageError("the disk is away")
            remove()

        monkeypatch.setattr(site.queue.storage, "remove_expired", fail_once)
        await site.upload(chats(1), expires_after=3600)
        place.clock.now += 3600
        async with asyncio.timeout(60):
            while list((place.root / "files").iterdir()):
                await asyncio.sleep(0.01)
    assert "the disk is away" in caplog.text


@pytest.mark.parametrize("what", ["open", "load"])
async def test_a_client_that_vanishes_while_the_storage_is_opened(
    place: ServerSetup, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Nobody opens it beside the thread that still does, and a server that stops leaves it unlocked."""
    storage = Storage(place.root, 1 << 20)
    queue, begun, free, calls = BatchQueue(storage), threading.Event(), threading.Event(), list[int]()
    owner, name = (storage, "open") if what == "open" else (storage.batches, "load")
    real = getattr(owner, name)

    def wait() -> Any:
        calls.append(len(calls))
        begun.set()
        assert free.wait(60)
        return real()

    monkeypatch.setattr(owner, name, wait)
    first = asyncio.create_task(queue.open())
    await asyncio.to_thread(begun.wait, 60)
    first.cancel()
    second, closing = asyncio.create_task(queue.open()), asyncio.create_task(queue.close())
    for _ in range(10):
        await asyncio.sleep(0)
    assert calls == [0] and not any(task.done() for task in (first, second, closing))
    free.set()
    await asyncio.wait((first, second, closing))
    assert first.cancelled() and closing.exception() is None
    assert isinstance(second.exception(), Draining)
    other = Storage(place.root, 1 << 20)
    other.open()
    other.close()


async def test_a_batch_that_stops_leaves_its_files_alone_first(
    place: ServerSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is unlocked for another server when no thread writes in it any more."""
    begun, free, locked = threading.Event(), threading.Event(), list[bool]()
    real = batch_queue.publish_files

    def publish(storage: Storage, *more: Any) -> None:
        begun.set()
        assert free.wait(60)
        locked.append(storage._lock is not None)
        real(storage, *more)

    monkeypatch.setattr(batch_queue, "publish_files", publish)
    async with place.run() as site:
        made = await site.create(await site.upload(chats(2)))
        await asyncio.to_thread(begun.wait, 60)
        closing = asyncio.create_task(site.queue.close())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not closing.done()
        free.set()
        await closing
    assert locked == [True]
    async with place.run() as site:
        assert (await site.wait_until_ended(made["id"]))["request_counts"]["completed"] == 2
