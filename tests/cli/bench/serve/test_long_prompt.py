"""`mlxrun bench serve --workload long`: two passes over a scripted server, whose clock moves in steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from mlxrun.cli.bench.serve import long_prompt
from mlxrun.cli.bench.serve.long_prompt import (
    MEASURES,
    START_DELTAS,
    STREAM_TOKENS,
    BesideLongPrompt,
    compute_long_numbers,
    run_long_round,
)
from mlxrun.cli.bench.serve.streaming_client import LoadPattern, StreamTimes, Target
from mlxrun.cli.bench.serve.workloads import PromptSize, RoundResult, ServePlan
from mlxrun.cli.main import main
from tests.cli.bench.serve.test_benchmark import Script, chunk, text

STREAMS = 3
STEP = 1 / 64  # seconds; sums of it are exact
CHUNKS = 10  # steps that the long prompt takes once the short one is there
SIZE = PromptSize(20, 8, 200)


class Answer:
    """One request at the server: how many tokens are left, and the deltas on their way."""

    def __init__(self, words: int, tokens: int) -> None:
        self.words, self.left = words, tokens
        self.stream = tokens == STREAM_TOKENS
        self.chunks = CHUNKS if words == SIZE.long else 0
        self.deltas: asyncio.Queue[str] = asyncio.Queue()


class Steps(Script):
    """Every step gives each answer a delta; one with a chunk of the long prompt takes half as long again.

    `stalls`: nothing else is answered under the long prompt. `most`: deltas after which a stream ends.
    `late`: short requests that are slow after streams were closed. `health`: its status, 0 for none.
    `full`: "stream", "long" or "short": one such request is refused.
    """

    def __init__(
        self, stalls: bool = False, most: int = STREAM_TOKENS, late: int = 0, health: int = 0, full: str = ""
    ) -> None:
        super().__init__()
        self.stalls, self.most, self.late, self.status, self.full = stalls, most, late, health, full
        self.now = 0.0
        self.open: list[Answer] = []
        self.checks = self.closed = 0
        self.short_came = False

    def app(self) -> web.Application:
        app = super().app()
        if self.status:
            app.router.add_get("/health", self.health)
        return app

    async def health(self, request: web.Request) -> web.Response:
        self.checks += 1
        return web.Response(status=200 if self.checks == 1 else self.status)

    async def run(self) -> None:
        while True:
            if self.open:
                self.step()
            # The client reads what was written before the clock moves again.
            await asyncio.sleep(0.001)
            for _ in range(20):
                await asyncio.sleep(0)

    def step(self) -> None:
        long = next((a for a in self.open if a.chunks), None)
        slow = 4 if self.late and self.closed and len(self.open) == 1 else 1
        self.now += STEP * (1.5 if long else slow)
        if long and self.short_came:
            long.chunks -= 1
        for answer in self.open:
            if answer is not long and not (long and self.stalls):
                answer.deltas.put_nowait("a")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        words = len(body["messages"][0]["content"].split())
        answer = Answer(words, min(body["max_tokens"], self.most))
        answer.stream = body["max_tokens"] == STREAM_TOKENS
        beside = any(a.chunks for a in self.open)
        kind = "stream" if answer.stream else "long" if answer.chunks else "short" if beside else "load_check"
        self.short_came |= kind == "short"
        if self.full == kind:
            self.full = ""
            return web.json_response({"error": {"message": "full"}}, status=429)
        self.open.append(answer)
        try:
            return await self.send(request, answer)
        finally:
            self.open.remove(answer)
            if answer.stream:
                self.closed += 1
            elif self.closed and self.late:
                self.late -= 1

    async def send(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while answer.left:
            await response.write(chunk(**text(await answer.deltas.get())))
            answer.left -= 1
        usage = {"prompt_tokens": answer.words, "completion_tokens": 1}
        await response.write(chunk(choices=[], usage=usage) + b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def running(script: Steps) -> AsyncIterator[str]:
    async with TestServer(script.app()) as server:
        steps = asyncio.create_task(script.run())
        yield str(server.make_url("/v1"))
        steps.cancel()
        with suppress(asyncio.CancelledError):
            await steps


async def round_of(script: Steps) -> RoundResult:
    async with running(script) as url:
        target = Target("t", url, "tiny")
        plan = ServePlan((target,), ("long",), SIZE, 1, LoadPattern(STREAMS))
        return await run_long_round(target, plan, "0", lambda: script.now)


async def test_gaps_beside_a_long_prompt_over_those_without() -> None:
    """Steps are half as long again under the long prompt, so gaps are 1.5 times those without it."""
    found = (await round_of(Steps())).numbers
    assert (found["gap_p50"], found["gap_p99"]) == (1.5 * STEP, 1.5 * STEP)
    assert (found["alone_p50"], found["alone_p99"], found["ratio_p99"]) == (STEP, STEP, 1.5)
    assert (found["gaps"] or 0) >= STREAMS * CHUNKS and found["ended"] == found["errors"] == 0
    assert (found["long_tokens"], found["long_cached"]) == (SIZE.long, 0)
    assert (found["long_ttft"] or 0) >= CHUNKS * STEP > (found["short_ttft"] or 1)
    assert found["health_p99"] is None


async def test_a_server_that_stalls_has_a_larger_ratio() -> None:
    """The twin: a gap counts that ends only after the first delta of the long prompt."""
    found = (await round_of(Steps(stalls=True))).numbers
    assert (found["gap_p99"] or 0) > CHUNKS * 1.5 * STEP
    assert found["alone_p99"] == STEP and (found["ratio_p99"] or 0) > 1.5 * CHUNKS
    assert (found["short_ttft"] or 0) > CHUNKS * 1.5 * STEP


async def test_what_is_sent() -> None:
    """Streams of both passes have as many words, and other ones; the short prompt is behind the long one."""
    script = Steps()
    await round_of(script)
    prompts = [body["messages"][0]["content"] for body in script.bodies]
    assert len(set(prompts)) == len(prompts)
    sent = [(len(p.split()), b["max_tokens"]) for p, b in zip(prompts, script.bodies, strict=True)]
    stream, probe = (SIZE.prompt, STREAM_TOKENS), (SIZE.prompt, long_prompt.SHORT_TOKENS)
    long = (SIZE.long, long_prompt.LONG_TOKENS)
    streams = [stream] * STREAMS
    assert sent == [probe] * 3 + streams + [long, probe, probe] + streams + [probe]
    assert not script.open, "streams that nobody needs any more are closed"


async def test_streams_that_end_early_are_counted() -> None:
    """As long as they last they are measured; if none lasts that is an error."""
    found = await round_of(Steps(most=START_DELTAS + 4))
    assert (found.numbers["ended"], found.numbers["ratio_p99"], found.errors) == (STREAMS, 1.5, ())
    found = await round_of(Steps(most=START_DELTAS))
    assert (found.numbers["ended"], found.numbers["ratio_p99"]) == (STREAMS, None)
    assert found.errors == ("no stream had a delta while the long prompt was prefilled",)


@pytest.mark.parametrize(("status", "errors"), [(200, 0), (503, 1)])
async def test_health_is_asked_for_meanwhile(status: int, errors: int) -> None:
    """A status that is not 200 is an error of the round, and no latency."""
    script = Steps(health=status)
    found = await round_of(script)
    assert script.checks > 1
    assert (found.numbers["health_p99"] is None) == bool(errors)
    assert set(found.errors) == ({"/health: 503"} if errors else set())
    assert found.numbers["errors"] == len(found.errors)


async def test_what_fails_is_an_error_and_nothing_else() -> None:
    """A stream is left out, a short prompt too; without the long prompt there is no number."""
    for full, what in (
        ("stream", "a stream"),
        ("short", "the short prompt"),
        ("load_check", "a short request"),
    ):
        found = await round_of(Steps(full=full))
        assert len(found.errors) == 1 and found.errors[0].startswith(what) and "429" in found.errors[0]
        assert found.numbers["ratio_p99"] == (None if full == "load_check" else 1.5)
        assert found.numbers["short_ttft"] is None or full == "stream"
    found = await round_of(Steps(full="long"))
    assert found.errors[0].startswith("the long prompt: 429")
    assert {key for key, value in found.numbers.items() if value is not None} == {"errors"}


class SmallContext(Steps):
    """Refuses what does not fit a context of 512 tokens, as servers do."""

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["max_tokens"] > 512:
            return web.json_response({"error": {"message": "512 tokens at most"}}, status=400)
        return await super().chat(request)


async def test_a_context_that_is_too_small_is_said_and_not_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The warm-up ends it with the server's reason, instead of a table of errors."""
    async with running(SmallContext()) as url:
        arguments = ["bench", "serve", "--url", url, "--workload", "long", "--concurrency", "2"]
        code = await asyncio.to_thread(main, [*arguments, "--prompt-words", "20", "--long-words", "200"])
    shown = capsys.readouterr()
    assert code == 3 and shown.out == ""
    assert "long server 1: the warm-up failed, so nothing was measured: every stream" in shown.err
    assert "512 tokens at most" in shown.err


async def test_the_next_pass_waits_for_an_idle_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the twin that never gets idle: an error, not a figure that nobody can trust."""
    monkeypatch.setattr(long_prompt, "IDLE_PAUSE", 0)
    quick, slow = Steps(), Steps(late=2)
    assert not (await round_of(quick)).errors and not (await round_of(slow)).errors
    assert len(slow.bodies) == len(quick.bodies) + 2
    monkeypatch.setattr(long_prompt, "IDLE_LIMIT", 1.0)
    found = await round_of(Steps(late=1000))
    assert set(found.errors) == {"the server was still busy 1 s after its streams were closed"}


def seen(*deltas: float, **fields: Any) -> StreamTimes:
    return StreamTimes(0.0, list(deltas), **fields)


def test_the_same_pieces_of_the_same_streams() -> None:
    """By hand: the long prompt is sent at 2.5 s and has its first delta at 6. The first stream waited for its
    deltas 2 to 4 meanwhile (1, 2 and 3 s). The second ended at 5: one delta of 1.5 s."""
    long, short = StreamTimes(2.5, [6.0], 7.0, 100, 25, 1), StreamTimes(2.75, [3.5], 4.0, 10, 0, 1)
    streams = [seen(1, 2, 3, 5, 8, 9), seen(3.5, 5, done=True), seen(error="gone", done=True)]
    alone = [seen(0, 9, 10, 10.5, 11, 99), seen(1, 2), seen(0, 50, 100)]
    found = compute_long_numbers(BesideLongPrompt(streams, long, short, [0.25, 0.5]), alone)
    assert (found["gaps"], found["gap_p50"], found["gap_p99"]) == (4, 1.5, 3)
    assert (found["alone_p50"], found["alone_p99"], found["ratio_p99"]) == (0.5, 1, 3)
    assert (found["long_ttft"], found["short_ttft"], found["health_p99"]) == (3.5, 0.75, 0.5)
    assert (found["long_tokens"], found["long_cached"], found["ended"]) == (100, 0.25, 1)
    shorter = [seen(0, 9, 10, done=True), seen(1, 2), seen()]
    found = compute_long_numbers(BesideLongPrompt(streams, long, short), shorter)
    assert (found["gaps"], found["gap_p99"], found["ended"], found["health_p99"]) == (2, 1.5, 2, None)


async def test_the_command_shows_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_prompt, "SLACK", 1e9)  # the clock is the real one here
    flags = (
        f"--workload long --concurrency 2 --prompt-words {SIZE.prompt} --long-words {SIZE.long} --repeat 1"
    )
    async with running(Steps(health=200)) as url:
        code = await asyncio.to_thread(main, ["bench", "serve", "--url", url, *flags.split()])
    shown = capsys.readouterr()
    assert code == 0 and "long server 1 1/1: p99 with the long prompt / without it" in shown.err
    rows = [line.split("|")[2].strip() for line in shown.out.splitlines() if "|" in line]
    assert rows[2:] == [measure.title for measure in MEASURES.values()]
    assert f"2 streams of {SIZE.prompt} words, and one prompt of {SIZE.long} among them" in shown.out
