"""`mlxrun bench serve`: what is sent, what is noted, what follows from it; over a scripted server."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from PIL import Image

from mlxrun.cli.bench.engine.measurement import compute_percentile
from mlxrun.cli.bench.serve.benchmark import (
    compute_medians,
    compute_numbers,
    print_serve_report,
    run_serve_bench,
)
from mlxrun.cli.bench.serve.streaming_client import LoadPattern, StreamTimes, Target, find_model, send_all
from mlxrun.cli.bench.serve.workloads import WORKLOADS, PromptSize, ServePlan, make_bodies
from mlxrun.core.errors import MlxrunError

SIZE = PromptSize(40, 8)


def chunk(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(content: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": content}}]}


class Script:
    """A server that answers as its `trouble` says, by the number of the request."""

    def __init__(self, trouble: dict[int, str] | None = None, usage: bool = True) -> None:
        self.trouble = trouble or {}
        self.usage = usage
        self.bodies: list[dict[str, Any]] = []
        self.busy = self.most = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/v1/models", self.models)
        return app

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        trouble = self.trouble.get(len(self.bodies))
        if trouble == "full":
            return web.json_response({"error": {"message": "full"}}, status=429)
        self.busy += 1
        self.most = max(self.most, self.busy)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b": hello\n\n" + chunk(choices=[{"index": 0, "delta": {"role": "assistant"}}]))
        if trouble == "breaks":
            await response.write(chunk(error={"message": "broken"}))
            return response
        if trouble != "mute":
            for delta in "abc":
                await response.write(chunk(**text(delta)))
        if self.usage:
            details = {"cached_tokens": 10}
            usage = {"prompt_tokens": 20, "completion_tokens": 7, "prompt_tokens_details": details}
            await response.write(chunk(choices=[], usage=usage))
        if trouble != "cut":
            await response.write(b"data: [DONE]\n\n")
        self.busy -= 1
        return response


async def seen_of(script: Script, count: int, load: LoadPattern | None = None) -> list[StreamTimes]:
    async with TestServer(script.app()) as server:
        target = Target("t", str(server.make_url("/v1")), "tiny", "secret")
        return await send_all(target, make_bodies("chat", SIZE, count, "0"), load or LoadPattern(4))


async def test_what_is_noted() -> None:
    """Tokens are what usage says; a delta is a chunk with text, not the role, a comment or the usage."""
    script = Script()
    seen = await seen_of(script, 6)
    assert [(s.prompt, s.cached, s.output, len(s.deltas), s.error) for s in seen] == [
        (20, 10, 7, 3, None)
    ] * 6
    assert all(s.sent <= s.deltas[0] <= s.deltas[-1] <= s.end for s in seen)
    body = script.bodies[0]
    assert body["stream"] is True and body["model"] == "tiny" and body["max_tokens"] == SIZE.output
    assert script.most <= 4


async def test_without_usage_pieces_are_counted() -> None:
    (seen,) = await seen_of(Script(usage=False), 1)
    assert (seen.output, seen.prompt) == (3, 0)


@pytest.mark.parametrize(
    ("trouble", "match"),
    [("full", "429"), ("breaks", "broken"), ("mute", "without content"), ("cut", "before [DONE]")],
)
async def test_errors_are_of_their_request_alone(trouble: str, match: str) -> None:
    seen = await seen_of(Script({2: trouble}), 3, LoadPattern(1))
    assert [s.error is None for s in seen] == [True, False, True]
    assert match in str(seen[1].error)
    assert compute_numbers(seen)["errors"] == 1


async def test_a_server_that_is_not_there_is_an_error() -> None:
    (seen,) = await send_all(
        Target("t", "http://127.0.0.1:1/v1", "m"), make_bodies("chat", SIZE, 1, "0"), LoadPattern(1)
    )
    assert seen.error is not None and compute_numbers([seen])["output_rate"] is None


async def test_a_warm_up_of_errors_stops_it() -> None:
    """With the first error; one good request is enough to go on."""
    for bad, goes_on in (({1: "full", 2: "cut"}, False), ({1: "full"}, True)):
        script = Script(bad)
        async with TestServer(script.app()) as server:
            target = Target("t", str(server.make_url("/v1")), "tiny")
            plan = ServePlan((target,), ("chat",), SIZE, 2, LoadPattern(1), repeat=1)
            if goes_on:
                report = await asyncio.to_thread(run_serve_bench, plan, lambda line: None)
                assert report["workloads"]["chat"]["t"]["runs"][0]["errors"] == 0
                continue
            with pytest.raises(
                MlxrunError, match=r"chat t: the warm-up failed, so nothing was measured: 429.*full"
            ):
                await asyncio.to_thread(run_serve_bench, plan, lambda line: None)
            assert len(script.bodies) == 2


async def test_an_open_loop_does_not_wait() -> None:
    script = Script()
    seen = await seen_of(script, 5, LoadPattern(1, rate=10_000.0))
    assert len(seen) == 5 and all(s.error is None for s in seen)


async def test_the_model_is_asked_for() -> None:
    async with TestServer(Script().app()) as server:
        assert await find_model(Target("t", str(server.make_url("/v1")))) == "tiny"


def test_numbers_of_a_round() -> None:
    """Two requests by hand: 10 tokens in 4 s; first deltas after 1 and 2 s; gaps 1, 1 and 0.5 s."""
    seen = [StreamTimes(0.0, [1.0, 2.0, 3.0], 3.0, 10, 5, 6), StreamTimes(1.0, [3.0, 3.5], 4.0, 10, 0, 4)]
    found = compute_numbers(seen)
    assert (found["output_rate"], found["request_rate"], found["cached_share"]) == (2.5, 0.5, 0.25)
    assert (found["ttft_p50"], found["ttft_p99"]) == (1.0, 2.0)
    assert (found["gap_p50"], found["gap_p95"], found["latency_p50"]) == (1.0, 1.0, 3.0)


def test_percentiles_are_values_that_were_seen() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [compute_percentile(values, share) for share in (50, 95, 99, 100)] == [50.0, 95.0, 99.0, 100.0]
    assert compute_percentile([7.0], 99) == 7.0


def test_medians_leave_out_what_is_missing() -> None:
    run = compute_numbers([StreamTimes(0.0, [1.0], 2.0, 1, 0, 1)])
    empty = compute_numbers([StreamTimes(0.0, error="gone")])
    assert compute_medians([run, empty])["ttft_p50"] == 1.0
    assert compute_medians([empty])["ttft_p50"] is None


@pytest.mark.parametrize("name", WORKLOADS)
def test_rounds_differ_and_seeds_repeat(name: str) -> None:
    one, again, other = (make_bodies(name, SIZE, 8, seed) for seed in ("1", "1", "2"))
    assert one == again and all(a != b for a, b in zip(one, other, strict=True))
    assert len({json.dumps(body) for body in one}) == 8


def test_shared_prompts_begin_alike_in_every_round() -> None:
    systems = {b["messages"][0]["content"] for seed in "12" for b in make_bodies("shared", SIZE, 4, seed)}
    assert len(systems) == 1 and len(systems.pop().split()) == 36


def test_mixed_prompts_have_four_lengths() -> None:
    lengths = [len(b["messages"][0]["content"].split()) for b in make_bodies("mixed", SIZE, 8, "0")]
    assert lengths == [10, 40, 80, 160] * 2


def test_the_picture_is_one() -> None:
    part = make_bodies("image", SIZE, 1, "0")[0]["messages"][0]["content"][0]
    data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        assert image.size == (64, 64) and len(image.convert("RGB").getcolors(4096) or ()) > 8


def test_a_report_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The first server is compared with each other; above 1 is better, also where less is better."""
    draw = random.Random(0)
    fast = compute_numbers([StreamTimes(0.0, [0.1, 0.2], 0.2, 10, 0, 20)])
    slow = compute_numbers([StreamTimes(0.0, [0.4, 0.8], 0.8, 10, 0, 20), StreamTimes(0.0, error="gone")])
    sides = {
        "fast": {"runs": [fast], "median": compute_medians([fast]), "errors": {}},
        "slow": {"runs": [slow], "median": compute_medians([slow]), "errors": {"gone": 1}},
    }
    settings = {"requests": 1, "repeat": 1, "prompt_words": 1, "output_tokens": 2, "rate": None}
    report = {
        "targets": {"fast": {}, "slow": {}},
        "settings": settings | {"concurrency": draw.randint(1, 9)},
        "workloads": {"chat": sides},
    }
    print_serve_report(report)
    shown = capsys.readouterr().out
    rows = {line.split("|")[2].strip(): line.split("|")[3:6] for line in shown.splitlines() if "|" in line}
    assert [cell.strip() for cell in rows["output"]] == ["100 tok/s", "25 tok/s", "4.00"]
    assert [cell.strip() for cell in rows["TTFT p50"]] == ["100.0 ms", "400.0 ms", "4.00"]
    assert "chat slow: 1 x gone" in shown
