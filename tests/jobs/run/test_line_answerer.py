"""Answering lines: seeds, choices, limits; continued answers; jobs of every API, resumed and scored."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxrun.config.settings import SamplingSettings
from mlxrun.core.request import FinishReason, Request, TokenEvent, TokenLogprob
from mlxrun.jobs.lines.job_file import MESSAGE, RESPONSE, JobLine
from mlxrun.jobs.run.line_answerer import DEFAULT_MAX_TOKENS, LinePreparer, derive_line_seed, split_event
from mlxrun.jobs.run.stop_signals import Interrupted
from tests.helpers.batch_fakes import Bench, FakeClient, by_id, chat, make_config, read, write_job
from tests.helpers.raw_clients import until
from tests.helpers.tokenizers import FakeModelInfo

CHAT = "/v1/chat/completions"


async def test_seeds(tmp_path: Path) -> None:
    """A line's own seed counts; without one its id and the config's seed decide alone."""
    job = [chat("a", "one"), chat("b", "one"), chat("c", "one", seed=5), chat("d", "one", seed=5)]
    bench = Bench(write_job(tmp_path, job))
    await bench.run()
    seeds = {r["custom_id"]: r["response"]["body"]["mlxrun"]["seed"] for r in read(bench.paths.out)}
    assert seeds["a"] != seeds["b"]
    assert seeds["c"] == seeds["d"] == 5
    first = by_id(bench.paths.out)
    write_job(tmp_path, job[::-1])
    await bench.run(fresh=True)
    assert by_id(bench.paths.out) == first
    bench.config = replace(bench.config, sampling=SamplingSettings(seed=7))
    await bench.run(fresh=True)
    others = {r["custom_id"]: r["response"]["body"]["mlxrun"]["seed"] for r in read(bench.paths.out)}
    assert others["a"] != seeds["a"]
    assert others["c"] == 5
    assert json.loads(bench.paths.manifest.read_text())["seeds"]["base"] == 7


async def test_several_choices_and_prompts(tmp_path: Path) -> None:
    """n and lists of prompts: one record a line; a stop string ends a request early."""
    lines = [
        chat("n", "hi", n=3),
        {"id": "list", "prompt": ["one", "two"]},
        {"id": "stop", "messages": [{"role": "user", "content": "left right"}], "stop": [" rig"]},
    ]
    bench = Bench(write_job(tmp_path, lines))
    assert (await bench.run()).exit_code == 0
    bodies = {r["custom_id"]: r["response"]["body"] for r in read(bench.paths.out)}
    assert len({c["message"]["content"] for c in bodies["n"]["choices"]}) > 1
    assert [c["text"][:3] for c in bodies["list"]["choices"]] == ["one", "two"]
    assert bodies["stop"]["choices"][0]["message"]["content"] == "left"
    assert bench.client.aborted == 1


async def test_as_long_as_the_endpoint_would(tmp_path: Path) -> None:
    """Without max_tokens a line may fill the context, as a live request may; in a job it ends sooner."""
    line = JobLine(1, "a", CHAT, {"messages": [{"role": "user", "content": "hello"}]})
    host, config = FakeModelInfo(), make_config()
    for limit, wanted in ((None, host.context_length), (DEFAULT_MAX_TOKENS, DEFAULT_MAX_TOKENS)):
        body = await LinePreparer(host, config, tmp_path, max_tokens=limit).prepare(line)
        (request,) = body.prepared.requests
        assert request.params.max_tokens == min(wanted, host.context_length - len(request.prompt))


def test_the_seed_of_a_line() -> None:
    """31 bits, by the base and the id alone."""
    seeds = {derive_line_seed(base, name) for base in range(20) for name in ("a", "b", "\u0159")}
    assert len(seeds) == 60 and all(0 <= seed < 1 << 31 for seed in seeds)
    assert derive_line_seed(0, "good") == 1344898677


@pytest.mark.parametrize("url", [MESSAGE, RESPONSE])
async def test_seeds_of_other_apis(tmp_path: Path, url: str) -> None:
    """The line's seed also where the API has no field for it; that of the body where it has one."""
    preparer = LinePreparer(FakeModelInfo(), make_config(), tmp_path)
    given: dict[str, Any] = {"model": "m", "input": "x"}
    if url == MESSAGE:
        given = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
    body = await preparer.prepare(JobLine(1, "a", url, given))
    assert body.prepared.seed == derive_line_seed(0, "a")
    if url == RESPONSE:
        body = await preparer.prepare(JobLine(1, "a", url, {**given, "seed": 7}))
        assert body.prepared.seed == 7


def test_events_of_one_token() -> None:
    """Joined they are the event; the finish, and only it, is on the last one."""
    logprobs = tuple(TokenLogprob(-float(i), ()) for i in range(3))
    event = TokenEvent("r", (1, 2, 3), logprobs, 9, 4, None, FinishReason.STOP)
    found = list(split_event(event))
    assert [each.tokens for each in found] == [(1,), (2,), (3,)]
    assert [each.logprobs for each in found] == [(each,) for each in logprobs]
    assert [each.finish for each in found] == [None, None, FinishReason.STOP]
    assert {(each.num_computed_tokens, each.num_cached_tokens) for each in found} == {(9, 4)}
    for whole in (TokenEvent("r"), TokenEvent("r", (1,), finish=FinishReason.LENGTH)):
        assert list(split_event(whole)) == [whole]


def make_lines(count: int) -> list[dict[str, Any]]:
    """Lines of every API in turn, each scored by what the engine echoes."""
    lines = []
    for i in range(count):
        text = f"say {i} of many words"
        message = {"role": "user", "content": text}
        bodies: list[dict[str, Any]] = [
            {"prompt": text},
            {"messages": [message]},
            {"input": [{"role": "user", "content": text}], "store": True},
            {"url": MESSAGE, "model": "m", "max_tokens": 99, "messages": [message]},
        ]
        expected = {"expected": text if i % 8 < 6 else "else", "match": "contains", "group": f"api {i % 4}"}
        lines.append({"id": f"line-{i}", **bodies[i % 4], "eval": expected})
    return lines


async def test_a_job_of_every_api_is_resumed_and_scored(tmp_path: Path) -> None:
    """Stopped in the middle of its answers, it continues inside them, to the bytes and the scores of a job
    that was never stopped."""
    lines = make_lines(24)
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    whole = Bench(write_job(tmp_path / "whole", lines), make_config(order="input"))
    outcome = await whole.run()
    groups = {name: (group.correct, group.lines) for name, group in outcome.scores.groups.items()}
    assert groups == {f"api {i}": (6 if i < 2 else 3, 6) for i in range(4)}
    bench = Bench(write_job(tmp_path / "stopped", lines), make_config(order="input"))
    continued = 0
    for _ in range(40):
        bench.prepare = lambda client: client.stop_after(20)
        task = asyncio.create_task(bench.run())
        await asyncio.sleep(0)  # `client` is that of this run
        await until(lambda task=task: task.done() or bench.client.output == 20)
        if task.done():
            break
        bench.stop.request()
        with pytest.raises(Interrupted):
            await task
        continued += len(bench.client.answered)
    bench.prepare = FakeClient.go_on
    again = await bench.run()
    assert continued + len(bench.client.answered) > 0, "partial answers are continued"
    assert bench.paths.out.read_bytes() == whole.paths.out.read_bytes()
    assert again.scores.groups == outcome.scores.groups
    assert {record["eval"]["score"] for record in read(bench.paths.out)} == {0, 1}


async def test_one_choice_that_fails_ends_the_others(tmp_path: Path) -> None:
    class Failing(FakeClient):
        async def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
            if request.id.endswith("-1"):
                raise KeyError("a bug")
            async for event in super().generate(request):
                yield event

    bench = Bench(write_job(tmp_path, [chat("a", "one two three", n=3), chat("b", "four")]))
    outcome = await run_with(bench, Failing(FakeModelInfo(), 0.01))
    assert (outcome.meter.done, outcome.meter.failed) == (1, 1)
    (record,) = read(bench.paths.errors)
    assert record["error"]["code"] == "internal_error" and "a bug" not in json.dumps(record)


async def run_with(bench: Bench, client: FakeClient) -> Any:
    """One run of a job on this engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.helpers.batch_fakes.FakeClient", lambda *given: client)
        return await bench.run()
