"""/v1/batches from upload to download, on an engine that echoes: states, refusals, cancelling, restarts."""

from __future__ import annotations

import asyncio
import logging
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.scheduler.request import Request
from tests.helpers.batch_fakes import Bench, FakeClient, chat, chats, make_config, read, write_job
from tests.helpers.batches_server import CHAT, RunningServer, ServerSetup, with_keys
from tests.helpers.tokenizers import FakeModelInfo

MIXED = [*chats(5), chat("param", "hello", temprature=1), chat("long", "LONG 1")]


@pytest.fixture
def place(tmp_path: Path) -> ServerSetup:
    return ServerSetup(tmp_path / "data")


async def test_from_upload_to_download(place: ServerSetup) -> None:
    """Every state's time is there, answers and errors can be downloaded, nothing else is left."""
    async with place.run() as site:
        made = await site.create(await site.upload(MIXED), metadata={"of": "night"})
        assert made["status"] == "validating"
        assert made["expires_at"] - made["created_at"] == 24 * 3600
        done = await site.wait_until_ended(made["id"])
        assert (done["status"], done["errors"], done["metadata"]) == ("completed", None, {"of": "night"})
        assert done["request_counts"] == {"total": 7, "completed": 5, "failed": 2}
        for name in ("in_progress_at", "finalizing_at", "completed_at"):
            assert done[name] >= done["created_at"]
        assert done["failed_at"] is done["cancelled_at"] is done["expired_at"] is None
        answers = await site.records(done["output_file_id"])
        assert sorted(record["custom_id"] for record in answers) == [f"line-{i}" for i in range(5)]
        assert {record["response"]["status_code"] for record in answers} == {200}
        errors = {record["custom_id"]: record for record in await site.records(done["error_file_id"])}
        assert errors["param"]["error"]["param"] == "temprature"
        assert errors["long"]["response"]["body"]["error"]["code"] == "context_length_exceeded"
        files = (await site.send("GET", "/v1/files"))["data"]
        assert {file["purpose"] for file in files} == {"batch", "batch_output"}
        async with asyncio.timeout(10):
            while site.queue._tasks:  # it tidies up after it was told
                await asyncio.sleep(0.01)
    left = {path.name for path in (place.root / "batches" / made["id"]).iterdir()}
    assert left == {"batch.json", "manifest.json"}


async def test_the_same_records_as_the_command(place: ServerSetup, tmp_path: Path) -> None:
    """The same lines by `mlxrun batch` and by the server: the same bodies."""
    lines = [chat(f"l{i}", f"say {i}", temperature=i % 2, max_tokens=30, n=1 + i % 2) for i in range(8)]
    bench = Bench(write_job(tmp_path, lines))
    await bench.run()
    async with place.run() as site:
        done = await site.wait_until_ended((await site.create(await site.upload(lines)))["id"])
        found = await site.records(done["output_file_id"])

    def by_id(records: list[dict[str, Any]]) -> dict[str, Any]:
        return {record["custom_id"]: record for record in records}

    assert by_id(found) == by_id(read(bench.paths.out))
    assert len(found) == 8


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("this is not JSON", "invalid_line", "not JSON"),
        ({**chat("x", "hello"), "method": "GET"}, "invalid_line", "method must be POST"),
        ({**chat("x", "hello"), "url": "/v1/responses"}, "invalid_line", '"/v1/responses"'),
        ({**chat("x", "hello"), "url": "/v1/messages"}, "invalid_line", "/v1/messages"),
        ({"id": "x", "prompt": "hello"}, "invalid_line", "these lines are for /v1/chat/completions"),
        (chat("line-0", "again"), "invalid_line", "already used by line 1"),
        ({"body": {}}, "invalid_line", "custom_id is missing"),
    ],
)
async def test_refused_files(place: ServerSetup, line: Any, code: str, message: str) -> None:
    """A wrong line fails the batch before anything runs, with its number and reason."""
    async with place.run() as site:
        made = await site.create(await site.upload([*chats(2), line]))
        failed = await site.wait_until_ended(made["id"])
        assert failed["status"] == "failed"
        assert failed["failed_at"] and not failed["in_progress_at"]
        assert failed["errors"]["object"] == "list"
        (problem,) = failed["errors"]["data"]
        assert (problem["line"], problem["code"]) == (3, code)
        assert message in problem["message"]
        assert failed["output_file_id"] is failed["error_file_id"] is None
        assert failed["request_counts"] == {"total": 3, "completed": 0, "failed": 0}
        assert not site.client.tries


async def test_a_file_of_empty_lines(place: ServerSetup) -> None:
    async with place.run() as site:
        failed = await site.wait_until_ended((await site.create(await site.upload(["", " "])))["id"])
    assert (failed["status"], failed["errors"]["data"][0]["code"]) == ("failed", "empty_file")


async def test_the_number_of_problems_is_limited(place: ServerSetup) -> None:
    async with place.run() as site:
        failed = await site.wait_until_ended((await site.create(await site.upload(["bad"] * 300)))["id"])
    assert [problem["line"] for problem in failed["errors"]["data"]] == list(range(1, 101))


async def test_on_invalid_fail_looks_at_bodies(place: ServerSetup) -> None:
    """What `batch.on_invalid: fail` means for a job it means here."""
    place.config = make_config(on_invalid="fail")
    async with place.run() as site:
        failed = await site.wait_until_ended((await site.create(await site.upload(MIXED)))["id"])
        assert failed["status"] == "failed"
        (problem,) = failed["errors"]["data"]
        assert (problem["line"], "temprature" in problem["message"]) == (6, True)
        assert not site.client.tries


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"input_file_id": 3}, "input_file_id"),
        ({"endpoint": "/v1/responses"}, "endpoint"),
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"endpoint": "/v1/chat"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": None}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
        ({"inputfile": "x"}, "inputfile"),
    ],
)
async def test_refused_batches(place: ServerSetup, change: dict[str, Any], param: str) -> None:
    """Each wrong field is a 400 that names it; no batch is made."""
    async with place.run() as site:
        found = await site.create(await site.upload(chats(1)), **change)
        assert (found["status_code"], found["error"]["param"]) == (400, param)
        assert (await site.send("GET", "/v1/batches"))["data"] == []


async def test_unknown_files_and_batches(place: ServerSetup) -> None:
    async with place.run() as site:
        for method, path in (("GET", "/v1/batches/x"), ("POST", "/v1/batches/x/cancel")):
            assert (await site.send(method, path))["status_code"] == 404
        output = await site.wait_until_ended((await site.create(await site.upload(chats(1))))["id"])
        found = await site.create(output["output_file_id"])
        assert "batch_output" in found["error"]["message"]


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
    place.pause = 0.02
    async with place.run() as site:
        made = await site.create(await site.upload(chats(200)))
        async with asyncio.timeout(20):
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
    place.pause = 0.01
    async with place.run() as site:
        first = await site.create(await site.upload(chats(60)))
        second = await site.create(await site.upload(chats(5)))
        await site.wait_for_status(second["id"], "in_progress")
        await site.send("POST", f"/v1/batches/{second['id']}/cancel")
        done = await site.wait_until_ended(second["id"])
        assert (done["status"], done["output_file_id"]) == ("cancelled", None)
        assert (await site.send("GET", f"/v1/batches/{first['id']}"))["status"] == "in_progress"
        assert (await site.wait_until_ended(first["id"]))["request_counts"]["completed"] == 60


async def test_batches_run_one_after_the_other(place: ServerSetup) -> None:
    """The oldest first, never two at a time; a bad file is refused without waiting for its turn."""
    place.pause = 0.005
    async with place.run() as site:
        made = [await site.create(await site.upload([chat("a", f"batch {i}")] + chats(20))) for i in range(3)]
        bad = await site.wait_until_ended((await site.create(await site.upload(["bad"])))["id"])
        assert bad["status"] == "failed"
        states = [(await site.send("GET", f"/v1/batches/{m['id']}"))["status"] for m in made]
        assert "completed" not in states[1:]
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
    place.engine, place.pause = False, 0.02
    async with place.run() as site:
        made = await site.create(await site.upload(chats(400)), completion_window="1h")
        place.clock.now += 3599.0  # the last second is a real one
        await site.queue.start(site.jobs)
        done = await site.wait_until_ended(made["id"])
        answers = await site.records(done["output_file_id"])
        assert (done["status"], 0 < len(answers) < 400) == ("expired", True)
        assert done["request_counts"] == {"total": 400, "completed": len(answers), "failed": 0}
        assert site.client.busy == 0


async def test_no_file_of_this_machine_is_read(place: ServerSetup, tmp_path: Path) -> None:
    """Image paths are refused, and the files not even opened for their digests; data URLs are fine."""
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"never read")
    secret.chmod(0)
    part = {"type": "image_url", "image_url": {"url": str(secret)}}
    line = chat("path", "hello")
    line["body"]["messages"][0]["content"] = [{"type": "text", "text": "what is it?"}, part]
    place.config = replace(place.config, media=replace(place.config.media, roots=(str(tmp_path), "/")))
    opened: list[str] = []

    def watch(path: Path, *args: Any, **more: Any) -> Any:
        opened.append(str(path))
        return stat(path, *args, **more)

    stat = Path.stat
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "stat", watch)
        async with place.run(FakeClient(replace(FakeModelInfo(), vision=True))) as site:
            done = await site.wait_until_ended((await site.create(await site.upload([line])))["id"])
            (record,) = await site.records(done["error_file_id"])
    assert "data: URL" in record["error"]["message"]
    assert opened and str(secret) not in opened


async def test_pages(place: ServerSetup) -> None:
    """The newest first, `limit` at a time, from behind `after`."""
    place.engine = False
    async with place.run() as site:
        file = await site.upload(chats(1))
        made = []
        for _ in range(5):
            place.clock.now += 1
            made.insert(0, (await site.create(file))["id"])
        seen, query = [], {"limit": "2"}
        while True:
            found = await site.send("GET", "/v1/batches", params=query)
            seen += [batch["id"] for batch in found["data"]]
            assert (found["first_id"], found["last_id"]) == (found["data"][0]["id"], seen[-1])
            if not found["has_more"]:
                break
            query["after"] = found["last_id"]
        assert seen == made
        for wrong in ({"limit": "0"}, {"limit": "x"}, {"after": "none"}, {"befor": "x"}):
            refused = await site.send("GET", "/v1/batches", params=wrong)
            assert (refused["status_code"], refused["error"]["param"]) == (400, next(iter(wrong)))


async def test_keys_see_their_own_batches(tmp_path: Path) -> None:
    """Files and batches of another key are not found, not even as the input of a batch."""
    place = ServerSetup(tmp_path / "data", with_keys(alice="secret-a", bob="secret-b"), engine=False)
    place.headers = {"x-api-key": "secret-a"}
    async with place.run() as site:
        file = await site.upload(chats(1))
        batch = (await site.create(file))["id"]
    place.headers = {"x-api-key": "secret-b"}
    async with place.run() as site:
        for path in (f"/v1/files/{file}", f"/v1/files/{file}/content", f"/v1/batches/{batch}"):
            assert (await site.send("GET", path))["status_code"] == 404
        assert (await site.create(file))["error"]["param"] == "input_file_id"
        assert (await site.send("GET", "/v1/batches"))["data"] == []
        assert (await site.send("GET", "/v1/files"))["data"] == []
    place.headers = {"x-api-key": "secret-a"}
    async with place.run() as site:
        assert (await site.send("GET", f"/v1/batches/{batch}"))["endpoint"] == CHAT


async def test_metadata_of_any_text(place: ServerSetup) -> None:
    """What is no text at all is refused, or comes back as it was; never a 500."""
    place.engine = False
    async with place.run() as site:
        file = await site.upload(chats(1))
        for text in ("\u2028 \x00 \U0001f600", "\ud800"):
            found = await site.create(file, metadata={"a": text})
            assert found.get("status_code") == 400 or found["metadata"] == {"a": text}
            if "id" in found:
                assert (await site.send("GET", f"/v1/batches/{found['id']}"))["metadata"] == {"a": text}


async def test_the_status_shows_running_and_waiting_batches(
    place: ServerSetup, caplog: pytest.LogCaptureFixture
) -> None:
    """How far the batch is that runs, how many wait; a line in the log for each turn of its life."""
    caplog.set_level(logging.INFO, "mlxrun")
    place.pause, place.config = 0.01, make_config(rows=1)
    async with place.run() as site:
        assert (await site.send("GET", "/v1/status"))["batches"] == {"running": None, "waiting": 0}
        first = await site.create(await site.upload(chats(30)))
        second = await site.create(await site.upload(chats(2)))
        bad = await site.create(await site.upload(["nonsense of a client"]))
        await site.wait_until_ended(bad["id"])
        await site.wait_for_status(first["id"], "in_progress")
        async with asyncio.timeout(20):
            while not ((running := (found := await _batches(site))["running"]) and running["done"]):
                await asyncio.sleep(0.01)
        assert (running["id"], running["failed"], running["total"]) == (first["id"], 0, 30)
        assert 0 < running["done"] < 30 and found["waiting"] == 1
        await site.send("POST", f"/v1/batches/{first['id']}/cancel")
        assert (await site.wait_until_ended(first["id"]))["status"] == "cancelled"
        assert (await site.wait_until_ended(second["id"]))["status"] == "completed"
        assert await _batches(site) == {"running": None, "waiting": 0}
    said = [
        record.getMessage() for record in caplog.records if record.name == "mlxrun.server.batches.batch_queue"
    ]
    assert {record.levelname for record in caplog.records if record.name.startswith("mlxrun.")} == {"INFO"}
    begun = f"{first['id']}: started: 0 of 30 lines done, 0 failed"
    refused = (
        f"{bad['id']}: failed validation: line 1 is not a valid request"
        f" (GET /v1/batches/{bad['id']} says why)"
    )
    assert said.count(begun) == said.count(refused) == 1
    cancelled = [text for text in said if text.startswith(f"{first['id']}: cancelled: ")]
    assert len(cancelled) == 1 and cancelled[0].endswith(" of 30 lines done, 0 failed")
    ours = [text for text in said if text.startswith(second["id"])]
    assert ours == [
        f"{second['id']}: started: 0 of 2 lines done, 0 failed",
        f"{second['id']}: completed: 2 of 2 lines done, 0 failed",
    ]
    assert len(said) == 5
    assert not any(word in caplog.text for word in ("command", "retry-failed", "nonsense"))


async def _batches(site: RunningServer) -> Any:
    return (await site.send("GET", "/v1/status"))["batches"]
