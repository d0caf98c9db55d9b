"""/v1/batches from upload to download, on an engine that echoes: states, refusals, cancelling, restarts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.jobs.run.job_service import URLS
from tests.helpers.batch_fakes import Bench, FakeClient, chat, chats, make_config, read, write_job
from tests.helpers.batches_server import CHAT, ServerSetup, with_keys
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
        async with asyncio.timeout(60):
            while site.queue._tasks:  # it tidies up after it was told
                await asyncio.sleep(0.01)
    left = {path.name for path in (place.root / "batches" / made["id"]).iterdir()}
    assert left == {"batch.json", "manifest.json"}


async def test_a_batch_of_each_endpoint_of_lines(place: ServerSetup) -> None:
    place.engine = False
    async with place.run() as site:
        file = await site.upload(chats(1))
        for url in URLS:
            assert (await site.create(file, endpoint=url)).get("status") == "validating", url


async def test_the_same_records_as_the_command(place: ServerSetup, tmp_path: Path) -> None:
    """The same lines by `mlxrun batch` and by the server: the same bodies, but for ids, times and the
    counts of cached tokens, which a command leaves out."""
    lines = [chat(f"l{i}", f"say {i}", temperature=i % 2, max_tokens=30, n=1 + i % 2) for i in range(8)]
    bench = Bench(write_job(tmp_path, lines))
    await bench.run()
    async with place.run() as site:
        done = await site.wait_until_ended((await site.create(await site.upload(lines)))["id"])
        found = await site.records(done["output_file_id"])

    ids = list[str]()

    def by_id(records: list[dict[str, Any]], created: int) -> dict[str, Any]:
        for record in records:
            response = record["response"]
            ids.extend((record.pop("id"), response.pop("request_id"), response["body"].pop("id")))
            assert response["body"].pop("created") == created
        return {record["custom_id"]: record for record in records}

    for record in found:
        assert record["response"]["body"]["usage"].pop("prompt_tokens_details") == {"cached_tokens": 0}
    assert by_id(found, done["created_at"]) == by_id(read(bench.paths.out), 0)
    assert len(found) == 8
    assert len(set(ids)) == len(ids) == 2 * 3 * 8


async def test_no_id_is_in_two_batches(place: ServerSetup) -> None:
    """The same file twice: ids of answers and of errors are those of one batch."""
    lines, seen = [*MIXED, {**chat("get", "hello"), "method": "GET"}], list[str]()
    async with place.run() as site:
        file = await site.upload(lines)
        for _ in range(2):
            done = await site.wait_until_ended((await site.create(file))["id"])
            for name in ("output_file_id", "error_file_id"):
                seen += [record["id"] for record in await site.records(done[name])]
            for record in await site.records(done["output_file_id"]):
                seen += [record["response"]["request_id"], record["response"]["body"]["id"]]
    assert len(set(seen)) == len(seen) == 2 * (len(lines) + 2 * 5)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"body": {**chat("x", "hello")["body"], "stream": True}}, "stream"),
        ({"body": ["hello"]}, "body"),
        ({"body": None}, "body"),
        ({"method": "GET"}, "method"),
        ({"priority": 1}, "priority"),
    ],
)
async def test_lines_that_contain_error(place: ServerSetup, change: dict[str, Any], param: str) -> None:
    """The error has their custom_id and number; all other lines are answered."""
    async with place.run() as site:
        lines = [*chats(2), {**chat("x", "hello"), **change}]
        done = await site.wait_until_ended((await site.create(await site.upload(lines)))["id"])
        assert (done["status"], done["errors"]) == ("completed", None)
        assert done["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        (record,) = await site.records(done["error_file_id"])
        answers = await site.records(done["output_file_id"])
    assert (record["custom_id"], record["response"]) == ("x", None)
    assert (record["error"]["code"], record["error"]["line"], record["error"]["param"]) == (
        "invalid_line",
        3,
        param,
    )
    assert sorted(answer["custom_id"] for answer in answers) == ["line-0", "line-1"]


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("this is not JSON", "invalid_line", "not JSON"),
        ({**chat("x", "hello"), "custom_id": 7}, "invalid_line", "custom_id must be a string"),
        ({**chat("line-0", "again"), "method": "GET"}, "invalid_line", "also used by line 1"),
        (
            {**chat("x", "hello"), "url": "/v1/responses"},
            "invalid_line",
            "url is /v1/responses, but these lines",
        ),
        (
            {**chat("x", "hello"), "url": "/v1/messages"},
            "invalid_line",
            "url is /v1/messages, but these lines",
        ),
        ({**chat("x", "hello"), "url": "/v1/moderations"}, "invalid_line", '"/v1/moderations"'),
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
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": "/v1/chat"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"completion_window": None}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at"}}, "output_expires_after"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 3599}},
            "output_expires_after.seconds",
        ),
        (
            {"output_expires_after": {"anchor": "last_active_at", "seconds": 3600}},
            "output_expires_after.anchor",
        ),
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
