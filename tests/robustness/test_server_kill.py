"""A server with batches in a process of its own that is killed and suspended at random moments: no line is
lost, doubled or changed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.batch_fakes import chat, chats
from tests.helpers.batches_server import RunningServer, ServerSetup, count_answered, make_processes, serve
from tests.helpers.model_fixtures import mark_sweep
from tests.helpers.storm_counts import count, make_rng

SIZES = (90, 60, 30)  # good lines of the batches
PART = 120  # tokens that a process computes, more than ten lines


@pytest.fixture(scope="module")
def processes() -> Iterator[ForkServerContext]:
    with make_processes() as context:
        yield context


def make_lines(size: int) -> list[dict[str, Any]]:
    """Some that take seeds and several choices, and one that is refused."""
    lines = chats(size)
    for at, line in enumerate(lines):
        line["body"] |= ({}, {"n": 2}, {"temperature": 1.0, "seed": at}, {"max_tokens": 5})[at % 4]
    return [*lines, chat("wrong", "hello", temprature=1)]


async def create_batches(site: RunningServer) -> list[str]:
    return [(await site.create(await site.upload(make_lines(size))))["id"] for size in SIZES]


async def read_answers(site: RunningServer, batch: str) -> dict[str, Any]:
    """What each line was answered, without ids and times; each may be there once."""
    done = await site.wait_until_ended(batch)
    assert done["status"] == "completed", done
    records = [*await site.records(done["output_file_id"]), *await site.records(done["error_file_id"])]
    found = {}
    for record in records:
        body = (record["response"] or {}).get("body", {})
        found[record["custom_id"]] = (body.get("choices"), body.get("usage"), record["error"])
    assert len(found) == len(records) == done["request_counts"]["total"], "a line is there twice, or lost"
    return found


def read_records(root: Path) -> dict[str, set[bytes]]:
    """The whole records of each batch under way."""
    return {
        path.name: {line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")}
        for path in root.glob("batches/*/job/*.out.jsonl")
    }


async def suspend(process: ForkServerProcess, seconds: float) -> None:
    """It stands still for a moment, as a laptop does whose lid is closed, and goes on."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    await asyncio.sleep(seconds)
    os.kill(process.pid, signal.SIGCONT)
    count("suspensions")


async def run_and_kill(root: Path, processes: ForkServerContext, rng: random.Random) -> None:
    """One server from its start to its kill, after some more lines or while it starts."""
    process = processes.Process(target=serve, args=(root, PART))
    process.start()
    wanted = count_answered(root) + rng.randrange(0, 5)
    try:
        async with asyncio.timeout(60):
            while count_answered(root) < wanted:
                await asyncio.sleep(rng.random() * 0.01)
                if rng.random() < 0.05:
                    await suspend(process, rng.random() * 0.03)
        if rng.random() < 0.3:
            os.kill(process.pid or 0, signal.SIGSTOP)  # what is stopped can be killed as well
        count("kills of servers", int(process.is_alive()))
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "kills"), mark_sweep([(0, 4), *((seed, 20) for seed in range(16))], [(0, 4)])
)
async def test_kills(tmp_path: Path, processes: ForkServerContext, seed: int, kills: int, night: int) -> None:
    """No record that was written is ever gone, and in the end all are those of a server left alone."""
    async with ServerSetup(tmp_path / "whole").run() as site:
        wanted = [await read_answers(site, batch) for batch in await create_batches(site)]
        tries = sum(site.client.tries.values())
    place, rng, before = ServerSetup(tmp_path / "data", engine=False), make_rng(seed, night), {}
    async with place.run() as site:
        made = await create_batches(site)
    for _ in range(kills):
        await run_and_kill(place.root, processes, rng)
        now = read_records(place.root)
        assert all(lines <= now.get(name, set()) for name, lines in before.items())
        before = {name: lines for name, lines in now.items() if lines}
    assert count_answered(place.root) > kills // 2
    place.engine = True
    async with place.run() as site:
        assert [await read_answers(site, batch) for batch in made] == wanted
        assert sum(site.client.tries.values()) < tries - kills // 2, "what was answered is not computed again"


def test_a_changed_record_would_be_seen(tmp_path: Path) -> None:
    """Mutation: a byte of a record that was written before the kill."""
    path = tmp_path / "batches" / "b" / "job" / "b.out.jsonl"
    path.parent.mkdir(parents=True)
    path.write_bytes(json.dumps({"id": 1}).encode() + b"\n" + b'{"to')
    before = read_records(tmp_path)
    assert before == {"b.out.jsonl": {b'{"id": 1}\n'}}
    path.write_bytes(path.read_bytes().replace(b"1", b"2"))
    assert not before["b.out.jsonl"] <= read_records(tmp_path)["b.out.jsonl"]
