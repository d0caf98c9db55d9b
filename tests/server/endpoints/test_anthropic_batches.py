"""/v1/messages/batches on an engine that echoes: refusals, switches, statuses, disconnects, the quota."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mlxrun.server.batches.durable_files import StorageError
from tests.helpers.batches_server import RunningServer, ServerSetup

PATH = "/v1/messages/batches"


@pytest.fixture
def place(tmp_path: Path) -> ServerSetup:
    return ServerSetup(tmp_path / "data")


def make_requests(count: int) -> list[dict[str, Any]]:
    return [
        {
            "custom_id": f"line-{i}",
            "params": {"model": "m", "max_tokens": 99, "messages": [{"role": "user", "content": f"say {i}"}]},
        }
        for i in range(count)
    ]


async def create(site: RunningServer, count: int) -> dict[str, Any]:
    return await site.send("POST", PATH, json={"requests": make_requests(count)})


async def wait_until_ended(site: RunningServer, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while (found := await site.send("GET", f"{PATH}/{batch_id}"))["processing_status"] != "ended":
            await asyncio.sleep(0.01)
    return found


async def read_results(site: RunningServer, batch_id: str) -> list[dict[str, Any]]:
    async with site.http.get(f"{PATH}/{batch_id}/results") as response:
        assert (response.status, response.content_type) == (200, "application/x-jsonl")
        return [json.loads(line) for line in (await response.read()).splitlines()]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "requests: Field required"),
        ({"requests": []}, "requests: "),
        ({"requests": {}}, "requests: expected array"),
        ({"requests": [3]}, "requests.0: expected object"),
        ({"requests": [{"params": {}}]}, "requests.0.custom_id: Field required"),
        ({"requests": [{"custom_id": "a"}]}, "requests.0.params: Field required"),
        ({"requests": [{"custom_id": "a b", "params": {}}]}, "requests.0.custom_id: "),
        ({"requests": [{"custom_id": "a" * 65, "params": {}}]}, "requests.0.custom_id: "),
        ({"requests": [{"custom_id": "a", "params": {}}] * 2}, "requests.1.custom_id: 'a' occurs twice"),
        ({"requests": [{"custom_id": "a", "params": {}, "url": "x"}]}, "requests.0.url: Extra inputs"),
        ({"input_file_id": "x"}, "input_file_id: "),
    ],
)
async def test_refused_batches(place: ServerSetup, body: Any, message: str) -> None:
    """Each in Anthropic's shape, with its field; no batch is made."""
    async with place.run() as site:
        found = await site.send("POST", "/v1/messages/batches", json=body)
        assert (found["status_code"], found["type"]) == (400, "error")
        assert found["error"]["type"] == "invalid_request_error"
        assert found["error"]["message"].startswith(message), found
        assert (await site.send("GET", "/v1/messages/batches"))["data"] == []
        assert not list((place.root / "files").iterdir())


async def test_the_apis_do_not_mix(place: ServerSetup) -> None:
    """One queue, but each API sees its own batches."""
    async with place.run() as site:
        batch = await create(site, 1)
        await wait_until_ended(site, batch["id"])
        other = await site.create(await site.upload(["{}"]))
        for path in (f"/v1/batches/{batch['id']}", f"{PATH}/{other['id']}"):
            assert (await site.send("GET", path))["status_code"] == 404
            assert (await site.send("DELETE", path))["status_code"] == 404
        for path, name in (("/v1/batches", other["id"]), (PATH, batch["id"])):
            assert [each["id"] for each in (await site.send("GET", path))["data"]] == [name]


async def test_switched_off(place: ServerSetup) -> None:
    """Either switch turns message batches off."""
    for name in ("batches", "anthropic"):
        setup = ServerSetup(
            place.root, replace(place.config, apis=replace(place.config.apis, **{name: False}))
        )
        async with setup.run() as site:
            found = await site.send("GET", "/v1/messages/batches")
            assert (found["status_code"], f"apis.{name}: false" in str(found)) == (404, True)


@pytest.mark.parametrize("status", ["in_progress", "finalizing", "cancelling"])
async def test_a_batch_continues_from_every_status(place: ServerSetup, status: str) -> None:
    """A kill may leave a batch in any status; with nothing run, what was left is answered or canceled."""
    place.engine = False
    async with place.run() as site:
        batch = await create(site, 4)
    path = place.root / "batches" / batch["id"] / "batch.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), "status": status}))
    place.engine = True
    async with place.run() as site:
        await wait_until_ended(site, batch["id"])
        kinds = [each["result"]["type"] for each in await read_results(site, batch["id"])]
    expected = {"in_progress": "succeeded", "cancelling": "canceled", "finalizing": "errored"}[status]
    assert kinds == [expected] * 4


async def test_results_before_the_end_and_after_a_deletion(place: ServerSetup) -> None:
    """A 400 until the batch has ended; a 404 once its file is deleted, which the batch then says too."""
    place.engine = False
    async with place.run() as site:
        made = await create(site, 2)
        found = await site.send("GET", f"{PATH}/{made['id']}/results")
        assert (found["status_code"], "has not ended" in found["error"]["message"]) == (400, True)
        await site.queue.start(site.jobs)
        await wait_until_ended(site, made["id"])
        (file,) = (await site.send("GET", "/v1/files"))["data"]
        assert (file["filename"], file["purpose"]) == (f"{made['id']}_results.jsonl", "batch_output")
        assert len(await read_results(site, made["id"])) == 2
        await site.send("DELETE", f"/v1/files/{file['id']}")
        found = await site.send("GET", f"{PATH}/{made['id']}/results")
        assert (found["status_code"], found["error"]["type"]) == (404, "not_found_error")


@pytest.mark.parametrize("proto", ["https", "HTTPS, http"])
async def test_the_address_of_the_results(place: ServerSetup, proto: str) -> None:
    """It is the one that the client has used, also behind a proxy or several."""
    async with place.run() as site:
        made = await create(site, 1)
        await wait_until_ended(site, made["id"])
        headers = {"Host": "models.test", "X-Forwarded-Proto": proto}
        found = await site.send("GET", f"{PATH}/{made['id']}", headers=headers)
        if "status_code" in found:  # the host is not allowed
            assert found["status_code"] == 403
            headers = {"Host": "localhost:1", "X-Forwarded-Proto": proto}
            found = await site.send("GET", f"{PATH}/{made['id']}", headers=headers)
        assert found["results_url"] == f"https://{headers['Host']}{PATH}/{made['id']}/results"


async def test_a_bug_is_a_result(place: ServerSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that fails has a result for every request all the same."""
    async with place.run() as site:

        async def broken(*given: Any) -> Any:
            raise ZeroDivisionError("words of a user")

        monkeypatch.setattr(site.jobs, "run", broken)
        made = await create(site, 2)
        done = await wait_until_ended(site, made["id"])
        assert done["request_counts"] == {
            "processing": 0,
            "succeeded": 0,
            "errored": 2,
            "canceled": 0,
            "expired": 0,
        }
        async with asyncio.timeout(60):
            while (await site.send("GET", f"{PATH}/{made['id']}"))["results_url"] is None:
                await asyncio.sleep(0.01)
        results = await read_results(site, made["id"])
        assert [each["custom_id"] for each in results] == ["line-0", "line-1"]
        assert {each["result"]["error"]["error"]["type"] for each in results} == {"api_error"}
        assert "words" not in str(results)


async def test_a_full_disk_is_waited_for(place: ServerSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that cannot be written are written later; nothing runs twice."""
    from mlxrun.server.batches import batch_queue

    publish, fails = batch_queue.publish_files, [2]

    def full(*given: Any) -> None:
        if fails[0]:
            fails[0] -= 1
            raise StorageError("No space left on device")
        publish(*given)

    monkeypatch.setattr(batch_queue, "publish_files", full)
    async with place.run() as site:
        made = await create(site, 3)
        await wait_until_ended(site, made["id"])
        assert len(await read_results(site, made["id"])) == 3
        assert fails == [0] and sum(site.client.tries.values()) == 3


async def test_a_client_may_disconnect_at_any_moment(place: ServerSetup) -> None:
    """A batch is made as a whole or not at all; no upload is left behind."""
    place.engine = False
    async with place.run() as site:
        await site.queue.open()  # which makes the folders
        others = asyncio.all_tasks()
        for wait in (0.0, 0.001, 0.002, 0.004, 0.008):
            async with aiohttp.ClientSession(site.url) as gone:
                task = asyncio.create_task(create(replace(site, http=gone), 300))
                await asyncio.sleep(wait)
                task.cancel()
                await asyncio.wait((task,))
        async with aiohttp.ClientSession(site.url) as last:  # connections are accepted in turn
            await list_ids(replace(site, http=last))
        async with asyncio.timeout(60):
            while asyncio.all_tasks() - others:  # handlers of clients that have gone
                await asyncio.sleep(0.01)
        assert not list((place.root / "files").iterdir())
        assert await list_ids(site) == set(in_batches(place))


async def list_ids(site: RunningServer) -> set[str]:
    return {batch["id"] for batch in (await site.send("GET", PATH))["data"]}


def in_batches(place: ServerSetup) -> list[str]:
    return [path.parent.name for path in place.root.glob("batches/*/batch.json")]


async def test_the_quota(place: ServerSetup) -> None:
    """Requests count as they arrive: a body beyond it is a 413 in Anthropic's shape and leaves nothing."""
    place.engine = False
    place.config = replace(place.config, server=replace(place.config.server, files_max_bytes=20_000))
    async with place.run() as site:
        found = await create(site, 1000)
        assert (found["status_code"], found["error"]["type"]) == (413, "request_too_large")
        assert "server.files_max_bytes" in found["error"]["message"]
        assert not list((place.root / "files").iterdir()) and not list((place.root / "batches").iterdir())
        assert (await create(site, 10))["request_counts"]["processing"] == 10


async def test_what_a_batch_cannot_do_is_said_in_the_words_of_its_api(place: ServerSetup) -> None:
    """Its status is `ended`, never OpenAI's `completed`; a running one is cancelled first."""
    place.engine = False
    async with place.run() as site:
        waiting = await create(site, 1)
        refused = await site.send("DELETE", f"{PATH}/{waiting['id']}")
        assert (
            refused["error"]["message"]
            == "the batch is in_progress and cannot be deleted yet: cancel it first"
        )
        await site.queue.start(site.jobs)
        await wait_until_ended(site, waiting["id"])
        refused = await site.send("POST", f"{PATH}/{waiting['id']}/cancel")
        assert refused["status_code"] == 400
        assert refused["error"]["message"] == "the batch is ended and cannot be canceled any more"
