"""Files and batches by OpenAI's own package, on the embedded model too; and servers that are killed."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import openai
import pytest

from mlxrun.api.parsers.registry import detect_formats
from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.cli.main import main
from mlxrun.config.setting_fields import hash_config
from mlxrun.config.settings import Config, EngineSettings, ServerSettings
from mlxrun.engine.client import EngineClient
from mlxrun.jobs.run.job_service import JobService
from mlxrun.server.app import make_app
from mlxrun.server.batches.batch_queue import BatchQueue
from mlxrun.server.batches.storage import Storage
from mlxrun.server.engine_state import ENGINE, LoadedEngine
from mlxrun.server.lifecycle import listen
from tests.helpers.batch_fakes import FakeClient, chat, chats, write_job
from tests.helpers.batches_server import CHAT, ServerSetup, count_answered, make_processes, serve
from tests.helpers.tokenizers import FakeModelInfo
from tests.jobs.run.test_line_bodies import normalize


@pytest.fixture
def place(tmp_path: Path) -> ServerSetup:
    return ServerSetup(tmp_path / "data")


def file_of(lines: list[Any]) -> tuple[str, bytes]:
    return "job.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode()


async def test_the_async_client(place: ServerSetup) -> None:
    """Every endpoint by the official client: what it parses, it parses without a complaint."""
    async with place.run() as site, openai.AsyncOpenAI(base_url=f"{site.url}v1", api_key="none") as client:
        file = await client.files.create(file=file_of(chats(12)), purpose="batch")
        assert (file.object, file.filename, file.status, file.purpose) == (
            *("file", "job.jsonl", "processed"),
            "batch",
        )
        assert (await client.files.retrieve(file.id)).bytes == file.bytes
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
        )
        assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"a": "b"})
        while batch.status != "completed":
            assert batch.status in ("validating", "in_progress", "finalizing")
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch.id)
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed) == (12, 12)
        assert batch.output_file_id is not None and batch.error_file_id is None
        text = (await client.files.content(batch.output_file_id)).text
        assert sorted(json.loads(line)["custom_id"] for line in text.splitlines()) == sorted(
            line["custom_id"] for line in chats(12)
        )
        made = [batch.id]
        for _ in range(3):
            more = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            made.insert(0, more.id)
        assert [each.id async for each in client.batches.list(limit=2)] == made  # page by page
        names = [each.id async for each in client.files.list(purpose="batch", limit=1)]
        assert names == [file.id]
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(batch.id)
        with pytest.raises(openai.BadRequestError, match="/v1/moderations"):
            await client.batches.create(
                input_file_id=file.id, endpoint="/v1/moderations", completion_window="24h"
            )
        assert (await client.files.delete(file.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)


async def test_the_sync_client(place: ServerSetup) -> None:
    """The same on a thread, with a batch that is cancelled and one that is refused."""
    engine = FakeClient(FakeModelInfo())
    engine.stop_after(100)

    def drive(url: str) -> None:
        with openai.OpenAI(base_url=f"{url}v1", api_key="none") as client:
            file = client.files.create(file=file_of(chats(300)), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            assert client.batches.cancel(batch.id).cancelling_at is not None
            while (batch := client.batches.retrieve(batch.id)).status != "cancelled":
                assert batch.status == "cancelling"
                time.sleep(0.01)
            file = client.files.create(file=file_of([{"custom_id": "a"}]), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
            while (batch := client.batches.retrieve(batch.id)).status != "failed":
                time.sleep(0.01)
            assert batch.errors is not None and batch.errors.data is not None
            assert (batch.errors.data[0].line, batch.errors.data[0].param) == (1, "url")
            assert batch.errors.data[0].message == "url is missing"

    async with place.run(engine) as site:
        await asyncio.to_thread(drive, site.url)


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SUM = "What is 12 + 30?"


def make_line(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
    given = {"model": "m", "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": given}


LINES = [
    chat("sum", "What is 12 + 30?", max_tokens=30),
    chat("drawn", "Tell me of a red circle.", max_tokens=20, temperature=1.0, seed=7, n=2),
    chat("logs", "What is 7 + 5?", max_tokens=12, logprobs=True, top_logprobs=2),
    chat("stop", "What is 40 + 2?", max_tokens=30, stop=["2"]),
    chat("tools", "What is the weather in Rome?", max_tokens=40, seed=3, tools=[TOOL]),
    make_line("response", "/v1/responses", input="What is 12 + 30?", max_output_tokens=30),
    make_line(
        "response of tools",
        "/v1/responses",
        input="What is the weather in Rome?",
        max_output_tokens=40,
        tools=[{"type": "function", **TOOL["function"]}],
    ),
    make_line("message", "/v1/messages", max_tokens=30, messages=[{"role": "user", "content": SUM}]),
    make_line("completion", "/v1/completions", prompt=SUM, max_tokens=8),
]


@pytest.mark.slow
def test_the_embedded_model(tmp_path: Path) -> None:
    """The same lines by their endpoints, by /v1/batches and by `mlxrun batch`: the same answers."""
    job = write_job(tmp_path, LINES)
    assert main(["batch", str(job), "--set", "engine.reproducible=true"]) == 0
    command = records(job.with_name("job.out.jsonl").read_bytes())
    live, found = asyncio.run(live_and_batch(tmp_path))
    assert found.keys() == {line["custom_id"] for line in LINES}
    assert drop_batch_fields(found) == drop_batch_fields(command)
    ids = {record["id"] for record in (*found.values(), *command.values())}
    assert len(ids) == 2 * len(LINES), "those of a batch are its own"
    for name, body in live.items():
        assert normalize(found[name]["response"]["body"]) == normalize(body), name
    call = found["tools"]["response"]["body"]["choices"][0]["message"].get("tool_calls")
    assert call and call[0]["function"]["name"] == "get_weather", found["tools"]
    text = found["sum"]["response"]["body"]["choices"][0]["message"]["content"]
    assert "42" in text, text
    (answer,) = found["response"]["response"]["body"]["output"]
    assert answer["content"] == [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    assert found["message"]["response"]["body"]["content"] == [{"type": "text", "text": text}]
    assert found["response of tools"]["response"]["body"]["output"][0]["name"] == "get_weather"


def drop_batch_fields(found: dict[str, Any]) -> dict[str, Any]:
    """Records without what differs between a command and a server's batch: ids, times, cached tokens."""
    return {
        name: {
            "error": record["error"],
            "status": record["response"]["status_code"],
            "body": normalize(record["response"]["body"]),
        }
        for name, record in found.items()
    }


async def live_and_batch(tmp_path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answers of endpoints, and the records of batches, by custom_id, from one server."""
    config = Config(server=ServerSettings(port=0), engine=EngineSettings(reproducible=True))
    client = await EngineClient.start(config)
    formats = detect_formats(client.model_info.chat_template, client.model_info.tokenizer, config.parsers)
    context = ApiContext(client.model_info, config, MediaLoader(config.media, None), formats)
    queue = BatchQueue(Storage(tmp_path / "data", config.server.files_max_bytes))
    await queue.start(JobService.for_engine(client, config, hash_config(config), dict, formats))
    app = make_app(config, queue)
    app[ENGINE].attach(LoadedEngine(client, context, {}))
    try:
        async with (
            listen(app) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as sdk,
        ):
            live = {
                line["custom_id"]: await sdk.post(line["url"][3:], body=line["body"], cast_to=object)
                for line in LINES
            }
            found: dict[str, Any] = {}
            for endpoint in {line["url"] for line in LINES}:
                found |= await run_batch(sdk, endpoint)
    finally:
        await queue.close()
        await client.close()
    return live, found


async def run_batch(sdk: openai.AsyncOpenAI, endpoint: Any) -> dict[str, Any]:
    """The records of a batch of the lines for one endpoint."""
    lines = [line for line in LINES if line["url"] == endpoint]
    file = await sdk.files.create(file=file_of(lines), purpose="batch")
    batch = await sdk.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    while batch.status != "completed":
        await asyncio.sleep(0.02)
        batch = await sdk.batches.retrieve(batch.id)
    assert batch.error_file_id is None and batch.output_file_id is not None
    return records((await sdk.files.content(batch.output_file_id)).content)


def records(data: bytes) -> dict[str, Any]:
    return {json.loads(line)["custom_id"]: json.loads(line) for line in data.splitlines()}


@pytest.fixture(scope="module")
def processes() -> Iterator[ForkServerContext]:
    with make_processes() as context:
        yield context


@pytest.mark.slow
async def test_a_server_that_is_killed(tmp_path: Path, processes: ForkServerContext) -> None:
    """kill -9 at random moments of two batches: none of their lines is lost, none is there twice."""
    place = ServerSetup(tmp_path / "data", engine=False)
    async with place.run() as site:
        made = []
        for count in (60, 25):
            lines = [*chats(count), chat("wrong", "hello", temprature=1)]
            made.append((await site.create(await site.upload(lines)))["id"])
    rng = random.Random()
    for _ in range(4):
        wanted = count_answered(place.root) + rng.randrange(1, 4)
        process = processes.Process(
            target=serve, args=(place.root, 110)
        )  # in all, less than the first batch needs
        process.start()
        async with asyncio.timeout(60):
            while count_answered(place.root) < wanted:
                await asyncio.sleep(rng.random() * 0.01)
        process.kill()
        process.join()
        assert process.exitcode == -9
    assert 4 <= count_answered(place.root) < 85
    place = replace(place, engine=True)
    async with place.run() as site:
        for batch, count in zip(made, (60, 25), strict=True):
            done = await site.wait_until_ended(batch)
            assert done["status"] == "completed"
            assert done["request_counts"] == {"total": count + 1, "completed": count, "failed": 1}
            ids = [record["custom_id"] for record in await site.records(done["output_file_id"])]
            assert sorted(ids) == sorted(line["custom_id"] for line in chats(count))
            assert len(await site.records(done["error_file_id"])) == 1
        assert sum(site.client.tries.values()) <= 81  # what the others had done was not done again
        assert len((await site.send("GET", "/v1/files"))["data"]) == 6
