"""Jobs beside live requests: the same run on a shared engine, interrupted by cancelling."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.batch.job_file import JobLine
from mlxrun.batch.job_service import PREPARED_AT_ONCE, JobCounts, JobService
from mlxrun.batch.line_answerer import DEFAULT_MAX_TOKENS, LinePreparer
from mlxrun.batch.line_keys import LineKeys
from mlxrun.batch.run_paths import JobPaths
from mlxrun.batch.stop_signals import StopSignals
from mlxrun.config.settings import Config, ServerSettings
from mlxrun.errors import JobError
from tests.helpers.batch_fakes import (
    Bench,
    FakeClient,
    by_id,
    chat,
    chats,
    make_config,
    read,
    write_job,
)
from tests.helpers.tokenizers import FakeModelInfo

CHAT = "/v1/chat/completions"


def service(client: FakeClient, config: Config | None = None) -> JobService:
    return JobService(client, config or make_config(), "0" * 64, lambda: {"name": "fake"})


async def test_run_tells_and_counts(tmp_path: Path) -> None:
    """Progress comes as counts; the end is what the files hold, and the engine runs on."""
    job = write_job(tmp_path, [*chats(5), "bad"])
    client, progress = FakeClient(FakeModelInfo()), list[JobCounts]()
    jobs = service(client)
    assert await jobs.run(job, progress.append) == JobCounts(6, 5, 1) == progress[-1]
    files = JobPaths(job)
    assert len(by_id(files.out)) == 5
    assert files.errors.exists() and files.manifest.exists()
    assert not client.closed
    assert await jobs.run(job, progress.append) == JobCounts(6, 5, 1)
    assert sum(client.tries.values()) == 5


async def test_cancelling_keeps_what_is_done(tmp_path: Path) -> None:
    """Without a signal: the next call goes on, in the middle of answers too, to the same bytes."""
    lines = chats(200)
    job = write_job(tmp_path, lines)
    client = FakeClient(FakeModelInfo(), 0.01)
    jobs, enough = service(client), asyncio.Event()

    def progress(counts: JobCounts) -> None:
        if counts.done >= 3:
            enough.set()

    task = asyncio.create_task(jobs.run(job, progress))
    await asyncio.wait_for(enough.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.busy == 0
    done = len(by_id(JobPaths(job).out))
    assert 3 <= done < 200
    assert await jobs.repair(job) == JobCounts(200, done, 0)
    after = FakeClient(FakeModelInfo())
    assert await service(after).run(job, progress) == JobCounts(200, 200, 0)
    assert sum(after.tries.values()) == 200 - done
    assert after.answered, "partial answers are continued"
    (tmp_path / "whole").mkdir()
    bench = Bench(write_job(tmp_path / "whole", lines))
    await bench.run()
    assert by_id(JobPaths(job).out) == by_id(bench.paths.out)


async def test_repair_mends_what_a_kill_tore(tmp_path: Path) -> None:
    """Nothing runs, a torn record goes, and the counts are those of all lines."""
    job = write_job(tmp_path, chats(6))
    jobs = service(FakeClient(FakeModelInfo()))
    await jobs.run(job, lambda counts: None)
    out = JobPaths(job).out
    records = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(records[:4]) + records[4][:20])
    client = FakeClient(FakeModelInfo())
    assert await service(client).repair(job) == JobCounts(6, 4, 0)
    assert out.read_bytes() == b"".join(records[:4])
    assert not client.tries


async def test_check_finds_what_no_line_may_be(tmp_path: Path) -> None:
    job = write_job(tmp_path, [chat("a", "x"), "bad", {"id": "b", "prompt": "x"}, chat("a", "y")])
    checked = await service(FakeClient(FakeModelInfo())).check(job, CHAT)
    assert checked.total == 4
    assert [(each.line, each.code, each.param) for each in checked.problems] == [
        (2, "invalid_line", None),
        (3, "invalid_line", "url"),
        (4, "invalid_line", "custom_id"),
    ]
    assert not JobPaths(job).folder.exists()
    assert not (
        await service(FakeClient(FakeModelInfo())).check(write_job(tmp_path, chats(2), "b.jsonl"), CHAT)
    ).problems
    empty = write_job(tmp_path, ["", ""], "empty.jsonl")
    assert (await service(FakeClient(FakeModelInfo())).check(empty, CHAT)).total == 0
    with pytest.raises(JobError, match="cannot read"):
        await service(FakeClient(FakeModelInfo())).check(tmp_path / "none.jsonl", CHAT)


async def test_lines_are_prepared_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job in a server leaves the worker threads to those who wait; by itself it takes them all."""
    import mlxrun.api.openai.request

    real, busy, seen = mlxrun.api.openai.request.prepare_request, 0, list[int]()

    async def prepare(*args: Any, **more: Any) -> Any:
        nonlocal busy
        busy += 1
        seen.append(busy)
        await asyncio.sleep(0.001)
        busy -= 1
        return await real(*args, **more)

    monkeypatch.setattr(mlxrun.api.openai.request, "prepare_request", prepare)
    config = make_config(concurrency=16)
    await service(FakeClient(FakeModelInfo()), config).run(
        write_job(tmp_path, chats(40)), lambda counts: None
    )
    assert max(seen) == PREPARED_AT_ONCE
    seen.clear()
    await Bench(write_job(tmp_path, chats(40), "alone.jsonl"), config).run()
    assert max(seen) > PREPARED_AT_ONCE


async def test_the_limits_of_the_server(tmp_path: Path) -> None:
    """What a live request may not ask, a line may not either; in a job by itself there is no such limit."""
    long = chat("long", "word " * 200)
    many = chat("many", "x")
    many["body"]["messages"] *= 9
    job = write_job(tmp_path, [*chats(2), long, many])
    limits = ServerSettings(max_messages=8, max_prompt_tokens=100)
    jobs = service(FakeClient(FakeModelInfo()), replace(make_config(), server=limits))
    assert await jobs.run(job, lambda counts: None) == JobCounts(4, 2, 2)
    errors = {record["custom_id"]: record["error"] for record in read(JobPaths(job).errors)}
    assert (errors["long"]["code"], "server.max_prompt_tokens" in errors["long"]["message"]) == (
        "context_length_exceeded",
        True,
    )
    assert (errors["many"]["param"], "server.max_messages" in errors["many"]["message"]) == ("messages", True)
    bench = Bench(write_job(tmp_path, [*chats(2), long, many], "alone.jsonl"))
    assert (await bench.run()).meter.failed == 0


async def test_as_long_as_the_endpoint_would(tmp_path: Path) -> None:
    """Without max_tokens a line may fill the context, as a live request may; in a job it ends sooner."""
    line = JobLine(1, "a", CHAT, {"messages": [{"role": "user", "content": "hello"}]})
    host, config = FakeModelInfo(), make_config()
    for limit, wanted in ((None, host.context_length), (DEFAULT_MAX_TOKENS, DEFAULT_MAX_TOKENS)):
        (request,) = (await LinePreparer(host, config, tmp_path, max_tokens=limit).prepare(line)).requests
        assert request.params.max_tokens == min(wanted, host.context_length - len(request.prompt))


def test_keys_without_a_folder_open_nothing(tmp_path: Path) -> None:
    """An image path of a stranger is part of the key by its name alone."""
    (tmp_path / "a.png").write_bytes(b"1")
    content = [{"type": "image_url", "image_url": {"url": str(tmp_path / "a.png")}}]
    line = JobLine(1, "a", CHAT, {"messages": [{"role": "user", "content": content}]})

    def keys() -> tuple[bytes, bytes]:
        return LineKeys("s", None, 100).compute_key(line), LineKeys("s", tmp_path, 100).compute_key(line)

    before = keys()
    (tmp_path / "a.png").write_bytes(b"2")
    after = keys()
    assert before[0] == after[0]
    assert before[1] != after[1]


async def test_a_stop_that_is_not_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a job in a server is stopped, the server lives."""
    monkeypatch.setattr("os._exit", lambda code: pytest.fail("the process would end"))
    said: list[str] = []
    stop = StopSignals(said.append, owns_process=False)
    with stop.handle_signals():
        stop.request()
        stop.request()
    assert stop.requested
    assert said and "once more" not in said[0]
    stop._stuck = True
    stop.exit_if_stuck()
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    owner = StopSignals(said.append)
    owner.request()
    owner.request()
    assert ended == [130]


async def test_two_jobs_at_once(tmp_path: Path) -> None:
    """Folders of their own, one engine: nothing mixes."""
    client = FakeClient(FakeModelInfo(), 0.002)
    jobs = service(client, replace(make_config(), sampling=make_config().sampling))
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        found.append(write_job(tmp_path / name, [chat(f"{name}{i}", f"{name} {i}") for i in range(10)]))
    counts = await asyncio.gather(*(jobs.run(job, lambda counts: None) for job in found))
    assert counts == [JobCounts(10, 10, 0)] * 2
    for job, name in zip(found, "ab", strict=True):
        assert by_id(JobPaths(job).out).keys() == {f"{name}{i}" for i in range(10)}
        assert json.loads(JobPaths(job).manifest.read_bytes())["counts"]["done"] == 10
