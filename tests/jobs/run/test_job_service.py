"""Jobs beside live requests: the same run on a shared engine, interrupted by cancelling."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from mlxrun.config.settings import Config, SamplingSettings, ServerSettings
from mlxrun.core.errors import JobError
from mlxrun.jobs.lines.job_file import JobLine, open_job
from mlxrun.jobs.lines.line_keys import LineKeys
from mlxrun.jobs.records.output_records import BatchStamp
from mlxrun.jobs.records.output_writer import OutputWriter
from mlxrun.jobs.records.run_paths import JobPaths
from mlxrun.jobs.run.job_service import PREPARED_AT_ONCE, JobCounts, JobService
from mlxrun.jobs.run.partial_answers import parse_records
from mlxrun.jobs.run.stop_signals import Interrupted
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
    return JobService.for_engine(client, config or make_config(), "0" * 64, lambda: {"name": "fake"})


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


async def test_a_wrong_eval_of_another_type_fails_its_line_alone(tmp_path: Path) -> None:
    odd = {"expected": 0, "match": "likeliest", "context_chars": 1, "normalize": []}
    job = write_job(tmp_path, [*chats(2), chat("odd", "hello", odd)])
    jobs = service(FakeClient(FakeModelInfo()))
    assert (await jobs.check(job, CHAT)).problems == ()
    assert await jobs.run(job, lambda counts: None) == JobCounts(3, 2, 1)


async def test_other_settings_run_all_again_without_a_question(tmp_path: Path) -> None:
    """A server has nobody to ask: its old answers are moved away, and none is in the output."""
    job = write_job(tmp_path, chats(4))
    client, paths = FakeClient(FakeModelInfo()), JobPaths(job)
    await service(client).run(job, lambda counts: None)
    old = by_id(paths.out)
    warmer = replace(make_config(), sampling=SamplingSettings(temperature=0.5))
    assert await service(client, warmer).run(job, lambda counts: None) == JobCounts(4, 4, 0)
    assert by_id(paths.dropped) == old
    assert len(by_id(paths.out)) == 4 and not set(by_id(paths.out).values()) & set(old.values())


async def test_cancelling_keeps_what_is_done(tmp_path: Path) -> None:
    """Without a signal: the next call goes on, in the middle of answers too, to the same bytes."""
    lines = chats(200)
    lines[3] = chat("long", "a" * 100)  # whose answer has begun by then and not ended
    job = write_job(tmp_path, lines)
    client = FakeClient(FakeModelInfo())
    client.stop_after(100)
    jobs, enough = service(client), asyncio.Event()

    def progress(counts: JobCounts) -> None:
        if counts.done >= 3:
            enough.set()

    task = asyncio.create_task(jobs.run(job, progress))
    await asyncio.wait_for(enough.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.busy == 0
    done = len(by_id(JobPaths(job).out))
    assert 3 <= done < 200
    assert await jobs.repair(job) == JobCounts(200, done, 0)
    with JobPaths(job).answers.open("rb") as file:  # of lines to do: some are complete, and only not written
        complete = sum(choices[0].finish is not None for choices in parse_records(file).values())
    after = FakeClient(FakeModelInfo())
    assert await service(after).run(job, progress) == JobCounts(200, 200, 0)
    assert sum(after.tries.values()) == 200 - done - complete
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


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
async def test_a_file_in_another_encoding_is_found_by_its_check(encoding: str, tmp_path: Path) -> None:
    """It is the file's mistake: no other try reads it."""
    job = write_job(tmp_path, chats(2))
    job.write_bytes(job.read_text(encoding="utf-8").encode(encoding))
    (problem,) = (await service(FakeClient(FakeModelInfo())).check(job, CHAT)).problems
    assert problem.code == "invalid_encoding" and problem.line is None
    assert problem.message.startswith(f"it is in {encoding[:6].upper()} (") and "UTF-8" in problem.message
    with pytest.raises(JobError, match=f"{job.name}: cannot read the job file: it is in UTF"):
        open_job(job)


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


STREAMED = {**chat("s", "x"), "body": {**chat("s", "x")["body"], "stream": True}}


async def check(folder: Path, lines: list[Any], **settings: Any) -> list[tuple[int | None, str | None]]:
    """The lines and params of the problems of a file."""
    jobs = service(FakeClient(FakeModelInfo()), make_config(**settings))
    checked = await jobs.check(write_job(folder, lines), CHAT)
    assert checked.total == len(lines)
    return [(problem.line, problem.param) for problem in checked.problems]


async def test_lines_that_can_contain_error_do_not_fail_the_file(tmp_path: Path) -> None:
    alone = [STREAMED, {**chat("m", "x"), "method": "GET"}, {**chat("b", "x"), "body": 3}]
    lines = [*alone, *chats(2)]
    assert await check(tmp_path, lines) == []
    listed = [(1, "stream"), (2, "method"), (3, "body")]
    assert await check(tmp_path, lines, on_invalid="fail") == listed
    assert await check(tmp_path, [*lines, "bad"]) == [*listed, (6, None)]
    # What fails the file is listed, however many other problems are before it.
    many = [{**chat(f"m{i}", "x"), "method": "GET"} for i in range(150)]
    found = await check(tmp_path, [*many, "bad", chat("m3", "x")])
    assert (len(found), found[-1]) == (100, (151, None))
    assert found[0] == (1, "method") and (4, "custom_id") in found


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([STREAMED, chat("s", "x")], [(1, "custom_id")]),
        ([chat("s", "x"), STREAMED], [(2, "custom_id")]),
        ([STREAMED, STREAMED], [(1, "stream"), (2, "custom_id")]),
        ([STREAMED, {"id": "s", "messages": [], "stream": True}], [(1, "stream"), (2, "id")]),
    ],
)
async def test_an_id_of_two_lines_is_found_among_lines_that_fail(
    tmp_path: Path, lines: list[Any], expected: list[Any]
) -> None:
    """Two records of one batch never have the same custom_id."""
    assert await check(tmp_path, lines) == expected


async def test_batches_have_ids_and_times_of_their_own(tmp_path: Path) -> None:
    """Equal lines of two batches: the same answers, but no id twice. A batch that continues runs nothing
    again, and a repair drops none of its records."""
    files = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        job, stamp = write_job(tmp_path / str(number), chats(3)), BatchStamp(f"batch_{number}", 99)
        assert await service(FakeClient(FakeModelInfo())).run(job, print, None, stamp) == JobCounts(3, 3, 0)
        files.append(JobPaths(job).out)
        before, again = files[-1].read_bytes(), FakeClient(FakeModelInfo())
        assert await service(again).repair(job, stamp) == JobCounts(3, 3, 0)
        assert await service(again).run(job, print, None, stamp) == JobCounts(3, 3, 0)
        assert (files[-1].read_bytes(), sum(again.tries.values())) == (before, 0)
    records = [record for file in files for record in read(file)]
    responses = [record["response"] for record in records]
    bodies = [response["body"] for response in responses]
    for ids in (records, bodies):
        assert len({each["id"] for each in ids}) == 6
    assert len({response["request_id"] for response in responses}) == 6
    assert {body["created"] for body in bodies} == {99}
    assert all("cached_tokens" in body["usage"]["prompt_tokens_details"] for body in bodies)
    texts = [body["choices"][0]["message"]["content"] for body in bodies]
    assert sorted(texts[:3]) == sorted(texts[3:])


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


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancelled_check_closes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """After any number of turns of the event loop: a server that stops leaves no job open."""
    opened = list[BinaryIO]()

    def open_and_remember(path: Path) -> BinaryIO:
        opened.append(path.open("rb"))
        return opened[-1]

    monkeypatch.setattr("mlxrun.jobs.lines.line_index.open_job", open_and_remember)
    job = write_job(tmp_path, chats(3))
    task = asyncio.create_task(service(FakeClient(FakeModelInfo())).check(job, CHAT))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))
    assert all(file.closed for file in opened)


async def test_cancelling_again_does_not_cut_the_end_of_a_run_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client cancels a batch twice, or the server stops meanwhile: the files are complete all the same."""
    job = write_job(tmp_path, chats(8))
    client, ending, free = FakeClient(FakeModelInfo(), 3600.0), threading.Event(), threading.Event()
    real = OutputWriter.close

    def close(writer: OutputWriter) -> None:
        ending.set()
        assert free.wait(60)
        real(writer)

    monkeypatch.setattr(OutputWriter, "close", close)
    task = asyncio.create_task(service(client).run(job, lambda counts: None))
    async with asyncio.timeout(60):
        while not client.busy:
            await asyncio.sleep(0.001)
        task.cancel()
        while not ending.is_set():
            await asyncio.sleep(0.001)
    for _ in range(3):
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
    free.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    paths = JobPaths(job)
    assert json.loads(paths.status.read_bytes())["state"] == "interrupted"
    manifest = json.loads(paths.manifest.read_bytes())
    assert [run["exit"] for run in manifest["runs"]] == [Interrupted.exit_code]


async def test_a_tool_loop_is_refused(tmp_path: Path) -> None:
    """A server calls no functions of its clients."""
    job = write_job(tmp_path, [*chats(1), {**chat("a", "hello"), "agent": {"tools": ["tools.py:add"]}}])
    assert await service(FakeClient(FakeModelInfo())).run(job, print) == JobCounts(2, 1, 1)
    (record,) = read(JobPaths(job).errors)
    assert record["error"]["message"].startswith("agent: not supported: a server calls no tools of clients")
