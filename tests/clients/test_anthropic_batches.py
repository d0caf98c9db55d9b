"""Message batches and files by Anthropic's own package; file ids in messages; and servers that are killed."""

from __future__ import annotations

import asyncio
import base64
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types.messages.batch_create_params import Request as BatchRequest

from mlxrun.api.parsers.registry import choose_formats
from mlxrun.config.setting_fields import hash_config
from mlxrun.jobs.run.job_service import JobService
from mlxrun.server.batches.batch_queue import BatchQueue
from mlxrun.server.batches.storage import Storage
from tests.helpers.anthropic_api import ADD, RED
from tests.helpers.batch_fakes import FakeClient
from tests.helpers.batches_server import ServerSetup, count_answered, make_processes, serve, with_keys
from tests.helpers.pdf_files import RGB, make_pdf
from tests.helpers.server_fakes import Act, FakeEngine, make_script, run_server, server_config
from tests.helpers.tokenizers import TOOLS, FakeModelInfo, byte_tokenizer

FORMATS = choose_formats(None, [], "hermes", "think")


@pytest.fixture
def place(tmp_path: Path) -> ServerSetup:
    return ServerSetup(tmp_path / "data")


def make_request(custom_id: str, text: str, **params: Any) -> BatchRequest:
    message = {"role": "user", "content": text}
    return {
        "custom_id": custom_id,
        "params": {"model": "m", "max_tokens": 99, "messages": [message], **params},
    }


def make_requests(count: int) -> list[BatchRequest]:
    return [make_request(f"line-{i}", f"say {i}") for i in range(count)]


def open_client(site: Any, **more: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=site.url, api_key=more.pop("api_key", "none"), **more)


async def wait_until_ended(client: anthropic.AsyncAnthropic, batch_id: str) -> Any:
    async with asyncio.timeout(60):
        while (batch := await client.messages.batches.retrieve(batch_id)).processing_status != "ended":
            await asyncio.sleep(0.01)
    return batch


async def read_results(client: anthropic.AsyncAnthropic, batch_id: str) -> dict[str, Any]:
    """The results by custom_id, each of which is there once."""
    results = [each async for each in await client.messages.batches.results(batch_id)]
    found = {each.custom_id: each.result for each in results}
    assert len(found) == len(results)
    return found


async def test_the_async_client(place: ServerSetup) -> None:
    """Every endpoint of message batches: what the client parses, it parses without a complaint."""
    async with place.run() as site, open_client(site) as client:
        requests = [
            *make_requests(8),
            make_request("long", "LONG 1"),
            make_request("field", "hello", temprature=1),
            make_request("stream", "hello", stream=True),
        ]
        batch = await client.messages.batches.create(requests=requests)
        assert (batch.type, batch.processing_status, batch.results_url) == (
            "message_batch",
            "in_progress",
            None,
        )
        assert batch.request_counts.processing == 11 and batch.request_counts.succeeded == 0
        assert (batch.expires_at - batch.created_at).total_seconds() == 24 * 3600
        done = await wait_until_ended(client, batch.id)
        assert done.created_at == batch.created_at <= done.ended_at
        assert done.request_counts.to_dict() == {
            "processing": 0,
            "succeeded": 8,
            "errored": 3,
            "canceled": 0,
            "expired": 0,
        }
        assert done.results_url == f"{site.url}v1/messages/batches/{batch.id}/results"
        found = await read_results(client, batch.id)
        assert found.keys() == {request["custom_id"] for request in requests}
        for i in range(8):
            message = found[f"line-{i}"].message
            assert (message.type, message.role, message.stop_reason) == ("message", "assistant", "end_turn")
            assert message.content[0].text.startswith(f"say {i}")
            assert message.usage.input_tokens > 0 and message.usage.output_tokens > 0
        errors = {name: found[name].error.error for name in ("long", "field", "stream")}
        assert {error.type for error in errors.values()} == {"invalid_request_error"}
        assert errors["long"].message.startswith("prompt is too long")
        assert errors["field"].message.startswith("temprature: Extra inputs are not permitted")
        assert "stream" in errors["stream"].message


async def test_pages_and_deletion(place: ServerSetup) -> None:
    async with place.run() as site, open_client(site) as client:
        made = []
        for _ in range(5):
            batch = await client.messages.batches.create(requests=make_requests(1))
            made.insert(0, batch.id)
        assert [each.id async for each in client.messages.batches.list(limit=2)] == made
        assert [each.id async for each in client.beta.messages.batches.list(limit=3)] == made
        page = await client.messages.batches.list(before_id=made[4], limit=2)
        assert [each.id for each in page.data] == made[2:4] and page.has_more
        page = await client.messages.batches.list(before_id=made[1], limit=2)
        assert [each.id for each in page.data] == made[:1] and not page.has_more
        assert [each.id for each in (await client.messages.batches.list(after_id=made[3])).data] == made[4:]
        await wait_until_ended(client, made[0])
        deleted = await client.messages.batches.delete(made[0])
        assert (deleted.id, deleted.type) == (made[0], "message_batch_deleted")
        for call in (client.messages.batches.retrieve, client.messages.batches.cancel):
            with pytest.raises(anthropic.NotFoundError) as caught:
                await call(made[0])
            assert caught.value.body["error"]["type"] == "not_found_error"
        assert [each.id async for each in client.messages.batches.list()] == made[1:]
        for name in made[1:]:
            await wait_until_ended(client, name)
        files = [each.filename async for each in client.beta.files.list()]
        assert files == [f"{name}_results.jsonl" for name in made[1:]]  # those of the deleted one are gone
    async with place.run() as site, open_client(site) as client:
        assert [each.id async for each in client.messages.batches.list()] == made[1:]
        assert (await read_results(client, made[1])).keys() == {"line-0"}


async def test_cancelling(place: ServerSetup) -> None:
    """What is finished is kept; every other request has a result that says so."""
    engine = FakeClient(FakeModelInfo())
    engine.stop_after(100)
    async with place.run(engine) as site, open_client(site) as client:
        batch = await client.messages.batches.create(requests=make_requests(200))
        waiting = await client.messages.batches.create(requests=make_requests(3))
        with pytest.raises(anthropic.BadRequestError, match="cancel it first"):
            await client.messages.batches.delete(batch.id)
        with pytest.raises(anthropic.AnthropicError, match="results"):
            await client.messages.batches.results(batch.id)
        found = site.queue.find(batch.id)
        async with asyncio.timeout(60):
            while found is None or found.request_counts["completed"] < 3:
                await asyncio.sleep(0.02)
        for each in (waiting, batch):
            cancelled = await client.messages.batches.cancel(each.id)
            assert cancelled.processing_status in ("canceling", "ended") and cancelled.cancel_initiated_at
        done = await wait_until_ended(client, batch.id)
        counts = done.request_counts
        assert counts.succeeded >= 3 and counts.succeeded + counts.canceled == 200
        results = await read_results(client, batch.id)
        kinds = [result.type for result in results.values()]
        assert (kinds.count("succeeded"), kinds.count("canceled")) == (counts.succeeded, counts.canceled)
        await wait_until_ended(client, waiting.id)
        assert {each.type for each in (await read_results(client, waiting.id)).values()} == {"canceled"}
        with pytest.raises(anthropic.BadRequestError, match="is ended and cannot be canceled"):
            await client.messages.batches.cancel(batch.id)


async def test_an_expired_batch(place: ServerSetup) -> None:
    place.engine = False
    async with place.run() as site, open_client(site) as client:
        batch = await client.messages.batches.create(requests=make_requests(2))
        place.clock.now += 24 * 3600
        await site.queue.start(site.jobs)
        done = await wait_until_ended(client, batch.id)
        assert done.request_counts.expired == 2
        assert {each.type for each in (await read_results(client, batch.id)).values()} == {"expired"}
        assert not site.client.tries


async def test_api_keys(place: ServerSetup) -> None:
    """A batch, its results and a file belong to the key that made them."""
    place.config = with_keys(ann="key of ann", bob="key of bob")
    async with place.run() as site, open_client(site, api_key="key of ann") as ann:
        batch = await ann.messages.batches.create(requests=make_requests(1))
        await wait_until_ended(ann, batch.id)
        file = await ann.beta.files.upload(file=("a.txt", b"abc", "text/plain"))
        async with open_client(site, api_key="key of bob") as bob:
            assert [each async for each in bob.messages.batches.list()] == []
            assert [each async for each in bob.beta.files.list()] == []
            with pytest.raises(anthropic.NotFoundError):
                await bob.messages.batches.retrieve(batch.id)
            with pytest.raises(anthropic.NotFoundError):
                await bob.beta.files.retrieve_metadata(file.id)
            content = {"type": "document", "source": {"type": "file", "file_id": file.id}}
            stolen = await bob.messages.batches.create(
                requests=[make_request("a", "", messages=[{"role": "user", "content": [content]}])]
            )
            await wait_until_ended(bob, stolen.id)
            (result,) = (await read_results(bob, stolen.id)).values()
            assert result.error.error.type == "not_found_error"
            assert "messages.0.content.0.source.file_id" in result.error.error.message
        async with open_client(site, api_key="no key", max_retries=0) as nobody:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await nobody.beta.files.list()
            assert caught.value.body["error"]["type"] == "authentication_error"


async def test_files(place: ServerSetup) -> None:
    """Files of any type, described in Anthropic's words; the same storage as OpenAI's."""
    async with place.run() as site, open_client(site) as client:
        text = await client.beta.files.upload(file=("notes.txt", b"some notes", "text/plain"))
        assert (text.type, text.filename, text.mime_type, text.size_bytes) == (
            *("file", "notes.txt", "text/plain"),
            10,
        )
        assert (text.downloadable, text.expires_at) == (True, None)
        image = await client.beta.files.upload(
            file=("red.png", base64.b64decode(RED)), expires_in_seconds=3600
        )
        assert image.mime_type == "image/png" and image.expires_at is not None
        assert (image.expires_at - image.created_at).total_seconds() == 3600
        job = await site.upload(["{}"])
        assert (await client.beta.files.retrieve_metadata(text.id)).to_dict() == text.to_dict()
        assert await (await client.beta.files.download(text.id)).read() == b"some notes"
        names = [job, image.id, text.id]
        assert [each.id async for each in client.beta.files.list(limit=1)] == names
        assert [each.id async for each in client.beta.files.list(ids=[text.id, job, "file_x"])] == [
            job,
            text.id,
        ]
        assert [each async for each in client.beta.files.list(scope_id="session")] == []
        listed = await site.send("GET", "/v1/files")
        assert [(each["id"], each["purpose"]) for each in listed["data"]] == list(
            zip(names, ("batch", "user_data", "user_data"), strict=True)
        )
        assert (await client.beta.files.delete(text.id)).type == "file_deleted"
        for call in (
            client.beta.files.retrieve_metadata,
            client.beta.files.delete,
            client.beta.files.download,
        ):
            with pytest.raises(anthropic.NotFoundError) as caught:
                await call(text.id)
            assert caught.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="expires_in_seconds"):
            await client.beta.files.upload(file=("a.txt", b"x"), expires_in_seconds=60)
        place.clock.now += 3600
        assert [each.id async for each in client.beta.files.list()] == [job]
        with pytest.raises(anthropic.NotFoundError):
            await client.beta.files.download(image.id)


async def test_the_sync_client(place: ServerSetup) -> None:
    """The same on a thread, by the stable and by the beta part of the client."""

    def drive(url: str) -> None:
        with anthropic.Anthropic(base_url=url, api_key="none") as client:
            for batches in (client.messages.batches, client.beta.messages.batches):
                api: Any = batches
                batch = api.create(requests=make_requests(3))
                while api.retrieve(batch.id).processing_status != "ended":
                    time.sleep(0.01)
                results = list(api.results(batch.id))
                assert sorted(each.custom_id for each in results) == ["line-0", "line-1", "line-2"]
                assert {each.result.type for each in results} == {"succeeded"}
                assert api.delete(batch.id).type == "message_batch_deleted"
            file = client.beta.files.upload(file=("a.txt", b"abc"))
            assert file.mime_type == "text/plain"
            assert client.beta.files.download(file.id).read() == b"abc"

    async with place.run() as site:
        await asyncio.to_thread(drive, site.url)


@asynccontextmanager
async def run_with_engine(
    folder: Path, *script: Act, **model: Any
) -> AsyncIterator[tuple[Any, anthropic.AsyncAnthropic]]:
    """A server with every API, whose batches run on the engine of its messages."""
    config = server_config(data_path=str(folder))
    engine = FakeEngine(FakeModelInfo(**model), make_script(*script))
    queue = BatchQueue(Storage(folder, 10**9))
    await queue.start(JobService.for_engine(engine, config, hash_config(config), dict, FORMATS))  # type: ignore[arg-type]
    try:
        async with (
            run_server(config, engine=engine, formats=FORMATS, batches=queue) as server,
            anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as client,
        ):
            yield server, client
    finally:
        await queue.close()


PDF = make_pdf("blue", "green")
PDF_TYPE, PDF_DATA = "application/pdf", base64.b64encode(PDF).decode()


def decode_prompt(request: Any) -> str:
    return byte_tokenizer().decode(list(request.prompt), skip_special_tokens=False)


async def test_files_in_messages(tmp_path: Path) -> None:
    """A file by its id is the same as sent inline: in messages, in counts and in batches."""
    async with run_with_engine(tmp_path, "seen", vision=True) as (server, client):
        image = await client.beta.files.upload(file=("red.png", base64.b64decode(RED), "image/png"))
        text = await client.beta.files.upload(file=("n.txt", "naïve notes".encode(), "text/plain"))
        pdf = await client.beta.files.upload(file=("a.pdf", PDF, "application/pdf"))
        mp3 = await client.beta.files.upload(file=("a.mp3", b"ID3", "audio/mpeg"))
        by_id: Any = [
            {"type": "image", "source": {"type": "file", "file_id": image.id}},
            {"type": "document", "title": "N", "source": {"type": "file", "file_id": text.id}},
            {"type": "document", "source": {"type": "file", "file_id": pdf.id}},
        ]
        inline: Any = [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED}},
            {
                "type": "document",
                "title": "N",
                "source": {"type": "text", "media_type": "text/plain", "data": "naïve notes"},
            },
            {"type": "document", "source": {"type": "base64", "media_type": PDF_TYPE, "data": PDF_DATA}},
        ]

        async def send(content: Any) -> Any:
            return await client.beta.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": content}]
            )

        assert (await send(by_id)).content[0].text == "seen" == (await send(inline)).content[0].text
        first, second = server.engine.requests
        assert (first.prompt, first.media) == (second.prompt, second.media)
        assert "naïve notes" in decode_prompt(first)
        assert first.media == (RGB["red"], RGB["blue"], RGB["green"])
        counts = [
            (await client.beta.messages.count_tokens(model="m", messages=[{"role": "user", "content": each}]))
            for each in (by_id, inline)
        ]
        assert counts[0].input_tokens == counts[1].input_tokens
        for block, message in (
            ({"type": "image", "source": {"type": "file", "file_id": text.id}}, "'text/plain'"),
            ({"type": "document", "source": {"type": "file", "file_id": mp3.id}}, "neither a PDF nor a text"),
            ({"type": "document", "source": {"type": "file"}}, "file_id"),
        ):
            with pytest.raises(anthropic.BadRequestError, match=message) as caught:
                await send([block])
            assert "messages.0.content.0.source.file_id" in str(caught.value)
        with pytest.raises(anthropic.NotFoundError, match="source.file_id: there is no file 'file_x'"):
            await send([{"type": "image", "source": {"type": "file", "file_id": "file_x"}}])
        batch = await client.messages.batches.create(
            requests=[make_request("a", "", messages=[{"role": "user", "content": by_id}])]
        )
        await wait_until_ended(client, batch.id)
        (result,) = (await read_results(client, batch.id)).values()
        assert result.message.content[0].text == "seen"
        last = server.engine.requests[-1]
        assert (last.prompt, last.media) == (first.prompt, first.media)


async def test_a_batch_answers_as_messages_are_answered(tmp_path: Path) -> None:
    """Reasoning, text and a call, in the blocks of a live message."""
    script = (
        "<think>",
        "hm",
        "</think>",
        "So:\n",
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
    )
    async with run_with_engine(tmp_path, *script, chat_template=TOOLS) as (_, client):
        request = make_request("a", "add", tools=[ADD], max_tokens=200)
        live = await client.messages.create(**request["params"])
        batch = await client.messages.batches.create(requests=[request])
        await wait_until_ended(client, batch.id)
        (result,) = (await read_results(client, batch.id)).values()

    def normalize(message: Any) -> Any:
        found = message.to_dict()
        assert [block["type"] for block in found["content"]] == ["thinking", "text", "tool_use"]
        return {**found, "id": "", "content": [{**block, "id": ""} for block in found["content"]]}

    assert normalize(result.message) == normalize(live)


async def test_restart_in_the_middle(place: ServerSetup) -> None:
    """Half done, the server stops; the next one goes on, and every request has one result."""
    engine = FakeClient(FakeModelInfo())
    engine.stop_after(200)
    async with place.run(engine) as site, open_client(site) as client:
        batch = await client.messages.batches.create(requests=make_requests(150))
        found = site.queue.find(batch.id)
        async with asyncio.timeout(60):
            while found is None or found.request_counts["completed"] < 5:
                await asyncio.sleep(0.01)
    async with place.run() as site, open_client(site) as client:
        done = await wait_until_ended(client, batch.id)
        assert done.created_at == batch.created_at and done.request_counts.succeeded == 150
        assert sum(site.client.tries.values()) <= 145
        found_results = await read_results(client, batch.id)
        assert found_results.keys() == {f"line-{i}" for i in range(150)}


@pytest.fixture(scope="module")
def processes() -> Iterator[ForkServerContext]:
    with make_processes() as context:
        yield context


@pytest.mark.slow
async def test_a_server_that_is_killed(tmp_path: Path, processes: ForkServerContext) -> None:
    """kill -9 at random moments: no request is lost, none has two results."""
    place = ServerSetup(tmp_path / "data", engine=False)
    async with place.run() as site, open_client(site) as client:
        requests = [*make_requests(60), make_request("wrong", "hello", temprature=1)]
        batch = await client.messages.batches.create(requests=requests)
    rng = random.Random()
    for _ in range(3):
        wanted = count_answered(place.root) + rng.randrange(1, 6)
        process = processes.Process(target=serve, args=(place.root, 75))
        process.start()
        async with asyncio.timeout(60):
            while count_answered(place.root) < wanted:
                await asyncio.sleep(rng.random() * 0.01)
        process.kill()
        process.join()
        assert process.exitcode == -9
    place.engine = True
    async with place.run() as site, open_client(site) as client:
        done = await wait_until_ended(client, batch.id)
        assert (done.request_counts.succeeded, done.request_counts.errored) == (60, 1)
        results = await read_results(client, batch.id)
        assert results.keys() == {request["custom_id"] for request in requests}
        assert sum(site.client.tries.values()) <= 59
