"""Files and batches before several models: each line is answered by the model that it names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp

from mlxrun.cluster.models.model_pool import ModelPool
from mlxrun.config.settings import BatchSettings
from mlxrun.server.batches.batch_queue import BATCH_QUEUE
from tests.helpers.batch_fakes import chat
from tests.helpers.batches_server import CHAT, RunningServer
from tests.helpers.fake_models import FakeModels, ModelsFront, run_models_front
from tests.helpers.raw_clients import until
from tests.helpers.server_fakes import Script, make_chat_body, make_script


def say_name(name: str) -> Script:
    return make_script(f"I am {name}")


def make_lines(names: Iterable[str | None]) -> list[dict[str, Any]]:
    """A chat line for each name of a model; None names none."""
    more = ({} if name is None else {"model": name} for name in names)
    return [chat(f"line-{at}", "hello", **each) for at, each in enumerate(more)]


class Site(RunningServer):
    """The front as a client of files and batches sees it."""

    front: ModelsFront


@asynccontextmanager
async def run_site(models: FakeModels, data: Path, limit: int = 1, **settings: Any) -> AsyncIterator[Site]:
    async with (
        run_models_front(models, limit, data, **settings) as front,
        aiohttp.ClientSession(front.url) as http,
    ):
        site = Site(front.url, http, front.app[BATCH_QUEUE], cast(Any, None), cast(Any, None))
        site.front = front
        yield site


async def run_lines(site: Site, lines: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The answers of a batch by custom_id, with its errors; texts where there are any."""
    made = await site.create(await site.upload(lines), **more)
    done = await site.wait_until_ended(made["id"])
    assert done["status"] == "completed", done
    records = [
        *await site.records(done["output_file_id"]),
        *await site.records(done["error_file_id"]),
    ]
    return {record["custom_id"]: record for record in records}


def read_text(record: dict[str, Any]) -> str:
    return str(record["response"]["body"]["choices"][0]["message"]["content"])


async def test_each_line_is_answered_by_its_model(tmp_path: Path) -> None:
    """Lines of one model run together, so two that do not fit beside each other are loaded once each."""
    models = FakeModels(script=say_name)
    async with run_site(models, tmp_path) as site:
        lines = make_lines([*["a", "b-alias"] * 100, None, "nobody"])
        found = await run_lines(site, lines)
        texts = [read_text(found[f"line-{at}"]) for at in range(201)]
        assert texts == [*["I am a", "I am b"] * 100, "I am a"]
        assert found["line-1"]["response"]["body"]["model"] == "b"
        wrong = found["line-201"]["response"]
        assert wrong["status_code"] == 404 and wrong["body"]["error"]["code"] == "model_not_found"
        assert [slot.loads for slot in site.front.pool.slots] == [1, 1]
        status = await site.send("GET", "/v1/status")
        assert status["batches"] == {"running": None, "waiting": 0} and status["files"]["count"] == 3
        async with site.http.get("/metrics") as reply:
            assert 'mlxrun_batches{model="front",state="running"} 0.0' in await reply.text()


async def test_an_answer_is_that_of_one_model_alone(tmp_path: Path) -> None:
    """But for the names and times of the two batches."""
    line = chat("one", "hello", model="b", temperature=0.7, logprobs=True)
    async with run_site(FakeModels(), tmp_path / "front") as site:
        (front,) = (await run_lines(site, [line])).values()
    found = []
    for _ in range(2):
        alone = FakeModels(names=("b",))
        async with run_site(alone, tmp_path / str(len(found))) as site:
            (record,) = (await run_lines(site, [line])).values()
            found.append(record)
            (request,) = alone.lives[0].engine.requests
            assert request.background and request.params.seed is not None
    for record in (front, *found):
        record["response"].pop("request_id"), record.pop("id")
        record["response"]["body"].pop("id"), record["response"]["body"].pop("created")
    assert front == found[0] == found[1]


async def test_a_model_that_cannot_be_loaded_fails_its_lines_alone(tmp_path: Path) -> None:
    models = FakeModels(script=say_name, broken={"b"})
    async with run_site(models, tmp_path, limit=2) as site:
        found = await run_lines(site, make_lines("abab"))
        codes = [found[f"line-{at}"]["response"]["status_code"] for at in range(4)]
        assert codes == [200, 503, 200, 503]


async def test_a_line_is_sent_again_if_its_process_dies(tmp_path: Path) -> None:
    gate = asyncio.Event()
    models = FakeModels(script=lambda name: make_script("begin", gate.wait, "end"))
    async with run_site(models, tmp_path) as site:
        made = await site.create(await site.upload(make_lines("a")))
        await until(lambda: models.lives and models.lives[0].engine.requests)
        gate.set()
        models.lives[0].engine.script = make_script(asyncio.Event().wait)
        await models.lives[0].close()
        models.lives[0].kill()
        done = await site.wait_until_ended(made["id"])
        (record,) = await site.records(done["output_file_id"])
        assert read_text(record) == "beginend"


async def test_a_restart_continues_and_another_model_begins_anew(tmp_path: Path) -> None:
    for digest, again in (("as ever", {"line-1"}), ("other files", {"line-0", "line-1"})):
        gate = asyncio.Event()
        models = FakeModels(script=lambda name, gate=gate: make_script(name, *([gate.wait] * (name == "b"))))
        folder = tmp_path / digest
        async with run_site(models, folder, limit=2) as site:
            made = await site.create(await site.upload(make_lines("ab")))
            await until(lambda site=site, made=made: site.queue.find(made["id"]).request_counts["completed"])
        models = FakeModels(script=say_name, digest=digest)
        async with run_site(models, folder, limit=2) as site:
            done = await site.wait_until_ended(made["id"])
            records = await site.records(done["output_file_id"])
            assert len(records) == 2
            anew = {each["custom_id"] for each in records if read_text(each).startswith("I am")}
            assert anew == again


async def test_files_are_read_by_the_front(tmp_path: Path) -> None:
    """For lines, and for requests: the processes of models have none."""
    models = FakeModels(script=say_name)
    async with run_site(models, tmp_path, limit=2) as site:
        form = aiohttp.FormData({"purpose": "user_data"})
        form.add_field("file", b"The colour is blue.", filename="a.txt", content_type="text/plain")
        async with site.http.post("/v1/files", data=form) as reply:
            file = (await reply.json())["id"]
        source = {"type": "document", "source": {"type": "file", "file_id": file}}
        body = {"model": "b", "max_tokens": 9, "messages": [{"role": "user", "content": [source]}]}
        message = await site.send("POST", "/v1/messages", json=body)
        assert message["content"][0]["text"] == "I am b"
        requests = {"requests": [{"custom_id": "one", "params": body}]}
        made = await site.send("POST", "/v1/messages/batches", json=requests)
        await until(lambda: site.queue.find(made["id"]).ended)
        async with site.http.get(f"/v1/messages/batches/{made['id']}/results") as reply:
            assert "I am b" in await reply.text()
        prompts = [request.prompt for request in models.lives[0].engine.requests]
        assert len(prompts) == 2 and prompts[0] == prompts[1] and len(prompts[0]) > 10


async def test_a_strict_batch_is_checked_without_a_model(tmp_path: Path) -> None:
    models, batch = FakeModels(), BatchSettings(on_invalid="fail")
    async with run_site(models, tmp_path, batch=batch) as site:
        lines = [*make_lines(["a", "nobody"]), chat("odd", "hello", model="b", temprature=1)]
        made = await site.create(await site.upload(lines))
        done = await site.wait_until_ended(made["id"])
        assert done["status"] == "failed" and not models.lives
        problems = [(each["line"], each["message"]) for each in done["errors"]["data"]]
        assert [line for line, _ in problems] == [2, 3]
        assert "'nobody' is not served here" in problems[0][1] and "temprature" in problems[1][1]


async def test_a_request_does_not_wait_for_the_lines_of_a_batch(tmp_path: Path) -> None:
    """Those that run are finished, and the others wait until its model has been idle for a while."""
    gate = asyncio.Event()
    models = FakeModels(script=lambda name: make_script(name, *([gate.wait] * (name == "a"))))
    async with run_site(models, tmp_path, batch=BatchSettings(concurrency=2)) as site:
        pool: ModelPool = site.front.pool
        pool.patience = 60.0
        made = await site.create(await site.upload(make_lines("a" * 30)))
        await until(lambda: pool.slots[0].lines.count)
        waiting = asyncio.create_task(site.front.post(CHAT, make_chat_body(model="b")))
        await until(lambda: pool.slots[0].state == "draining")
        gate.set()
        assert (await waiting).status == 200
        await until(lambda: pool.slots[0].waiting_lines)
        assert pool.slots[1].state == "ready" and (await site.front.get("/v1/models")).status == 200
        await asyncio.sleep(0.2)
        assert [slot.loads for slot in pool.slots] == [1, 1]
        pool.patience = 0.0
        pool._wake.set()
        assert (await site.wait_until_ended(made["id"]))["request_counts"]["completed"] == 30


async def test_a_line_waits_for_a_model_with_requests(tmp_path: Path) -> None:
    """However long: they come first."""
    gate = asyncio.Event()
    models = FakeModels(script=lambda name: make_script(name, *([gate.wait] * (name == "a"))))
    async with run_site(models, tmp_path) as site:
        pool = site.front.pool
        waiting = asyncio.create_task(site.front.post(CHAT, make_chat_body(model="a")))
        await until(lambda: pool.slots[0].running)
        made = await site.create(await site.upload(make_lines("b")))
        await until(lambda: pool.slots[1].waiting_lines)
        await asyncio.sleep(0.3)  # longer than the patience of a request
        assert [slot.state for slot in pool.slots] == ["ready", "unloaded"]
        gate.set()
        assert (await waiting).status == 200
        assert (await site.wait_until_ended(made["id"]))["status"] == "completed"
