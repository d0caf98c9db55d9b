"""`mlxrun bench serve --workload interactive`: a round over a scripted server and its clock."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from mlxrun.api.text.media.pdf_process import draw_pages
from mlxrun.cli.bench.serve import interactive, long_prompt
from mlxrun.cli.bench.serve.interactive import MEASURES, run_interactive_round
from mlxrun.cli.bench.serve.streaming_client import LoadPattern, Target
from mlxrun.cli.bench.serve.workloads import PromptSize, RoundResult, ServePlan
from tests.cli.bench.serve.test_benchmark import Script, chunk, text
from tests.helpers.pdf_files import open_pdf

SIZE = PromptSize(20, 8, 200)


class Desk(Script):
    """Its clock moves by the seconds that each kind of request takes until its first token. A long prompt is
    under way until a short one has come, or its client has gone. `late`: it is done before that."""

    def __init__(self, full: str = "", late: bool = False, status: int = 200) -> None:
        super().__init__()
        self.full, self.late, self.status = full, late, status
        self.now = 0.0
        self.kinds: list[str] = []
        self.long_prompts = 0
        self.calls: Counter[str] = Counter()
        self.written = False  # the first delta of a short request beside a long one
        self.answered = asyncio.Event()  # it was read, and its time taken
        self.over = asyncio.Event()  # the first long prompt
        self.delays = self.begun = 0  # of the benchmark before a short request; long prompts that have come

    async def sleep(self, seconds: float) -> None:
        """In place of the benchmark's pauses, however slow the machine is: before a short request until the
        server has the long prompt and was called beside it, between those calls until it is answered."""
        await asyncio.sleep(0.001)
        if seconds != interactive.DELAY:
            await self.over.wait()
            return
        self.delays += 1
        while not self.answered.is_set() and (self.begun < self.delays or min(self.calls.values()) < 2):
            await asyncio.sleep(0.001)

    def read_clock(self) -> float:
        if self.written:
            self.answered.set()
        return self.now

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_get("/health", self.get)
        app.router.add_get("/v1/status", self.get)
        return app

    async def get(self, request: web.Request) -> web.Response:
        self.calls[request.path] += 1
        if self.calls[request.path] == 2:  # the first one finds out whether the path is there
            self.now += 0.125 if request.path == "/health" else 0.25
        return web.Response(status=self.status if self.calls[request.path] > 1 else 200)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        content = body["messages"][0]["content"]
        is_long = not isinstance(content, str) or len(content.split()) == SIZE.long
        kind = "long" if is_long else "behind" if self.long_prompts else "alone"
        self.kinds.append(kind)
        if kind == self.full:
            self.answered.set()
            self.over.set()
            return web.json_response({"error": {"message": "full"}}, status=429)
        response = web.StreamResponse()
        await response.prepare(request)
        self.long_prompts += is_long
        self.begun += is_long
        try:
            if is_long and not self.late:
                await self.answered.wait()
            self.now += {"long": 10, "behind": 3, "alone": 1}[kind]
            self.written = kind == "behind"
            await response.write(chunk(**text("a")))
        finally:
            self.long_prompts -= is_long
        if is_long:
            self.over.set()
        await response.write(chunk(choices=[], usage={"prompt_tokens": 9, "completion_tokens": 1}))
        await response.write(b"data: [DONE]\n\n")
        if is_long:
            self.answered.clear()
        return response


async def round_of(script: Desk, monkeypatch: pytest.MonkeyPatch, size: PromptSize = SIZE) -> RoundResult:
    for module in (interactive, long_prompt):
        monkeypatch.setattr(module, "asyncio", SimpleNamespace(**vars(asyncio) | {"sleep": script.sleep}))
    async with TestServer(script.app(), handler_cancellation=True) as server:
        target = Target("t", str(server.make_url("/v1")), "tiny")
        plan = ServePlan((target,), ("interactive",), size, 1, LoadPattern(1))
        return await run_interactive_round(target, plan, "0", script.read_clock)


async def test_the_times_of_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Desk()
    found = await round_of(script, monkeypatch)
    assert found.errors == ()
    numbers = found.numbers
    assert (numbers["alone"], numbers["behind"], numbers["ratio"]) == (1, 3, 3)
    assert (numbers["after_cancel"], numbers["long_tokens"], numbers["errors"]) == (1, 9, 0)
    assert (numbers["long_ttft"] or 0) >= 13
    assert (numbers["health_max"] or 0) >= 0.125 and (numbers["status_max"] or 0) >= 0.25
    assert set(numbers) == set(MEASURES)
    assert script.kinds == [
        *["alone"] * interactive.ALONE,
        "long",
        "behind",
        "alone",
        "long",
        "alone",
        "alone",
    ]
    prompts = [body["messages"][0]["content"] for body in script.bodies]
    assert len(set(prompts)) == len(prompts)


async def test_the_long_prompt_may_be_a_pdf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of as many pages as are wanted, all different; other ones for each prompt."""
    script = Desk()
    found = await round_of(script, monkeypatch, replace(SIZE, pages=3))
    assert found.errors == () and found.numbers["ratio"] == 3
    contents = [body["messages"][0]["content"] for body in script.bodies]
    files = [content[0] for content in contents if not isinstance(content, str)]
    datas = [base64.b64decode(part["file"]["file_data"].partition(",")[2]) for part in files]
    pages = [page.tobytes() for data in datas for page in draw_pages(data, open_pdf(data).sizes, 72)]
    assert len(datas) == 2 and len(set(pages)) == len(pages) == 6


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"full": "alone"}, "a short request before the round: 429"),
        ({"full": "behind"}, "the short one behind it: 429"),
        ({"full": "long"}, "the long prompt: 429"),
        ({"late": True}, "the short one behind it: the long prompt was done before it came"),
    ],
)
async def test_what_fails_leaves_no_numbers(
    options: dict[str, Any], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Desk(**options)
    found = await round_of(script, monkeypatch)
    assert found.errors[0].startswith(error)
    assert {key for key, value in found.numbers.items() if value is not None} == {"errors"}


async def test_a_status_that_is_refused_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = await round_of(Desk(status=503), monkeypatch)
    assert set(found.errors) == {"/health: 503", "/v1/status: 503"}
    assert found.numbers["status_max"] is None and found.numbers["behind"] == 3
