"""The log line of each request, and the metrics that agree with it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from mlxrun.core.errors import EngineDead, Overloaded
from mlxrun.core.request import HitKind, TokenEvent
from mlxrun.core.visible_text import JsonFormatter
from mlxrun.server.endpoints import admin
from tests.helpers.engine_fakes import Clock
from tests.helpers.raw_clients import connect, cut, until
from tests.helpers.server_fakes import MINI, Serving, make_chat_body, make_script, run_server, server_config
from tests.helpers.timers import fire_timers
from tests.server.test_request_metrics import metric

ONLY = [MINI, admin.SURFACE]


@pytest.fixture(autouse=True)
def _seen(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "mlxrun"):
        yield


def line(caplog: pytest.LogCaptureFixture, part: str = "POST /mini") -> str:
    """The only line of the log that tells of the request, without its id and its seconds."""
    (found,) = [text for record in caplog.records if part in (text := record.getMessage())]
    words = found.split()
    assert words[5].endswith("s") and float(words[5][:-1]) >= 0
    return " ".join([*words[1:5], *words[6:]])


async def counted(s: Serving) -> dict[str, float]:
    """How the requests of /mini counted, by status."""
    start = "mlxrun_requests_total status="
    found = {name: value for name, value in (await metric(s)).items() if name.startswith(start)}
    return {
        name.removeprefix(start).split()[0]: value
        for name, value in found.items()
        if name.endswith("surface=mini")
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_complete_answer(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The twin of all below: nothing is said but the status."""
    async with run_server(surfaces=ONLY) as s:
        await s.post("/mini", make_chat_body(stream=stream))
        assert line(caplog) == "POST /mini 200 -"
        assert await counted(s) == {"200": 1}


def read_row(caplog: pytest.LogCaptureFixture, part: str = " POST /mini ") -> dict[str, Any]:
    """The only such line of the log, as JSON has it, without time, level and logger."""
    (record,) = [record for record in caplog.records if part in record.getMessage()]
    row: dict[str, Any] = json.loads(JsonFormatter().format(record))
    return {name: value for name, value in row.items() if name not in ("time", "level", "logger", "message")}


async def test_the_fields_of_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    """It took 2 s in the queue, 3 s of prefill, 4 s of decoding, and 1 s until it was sent."""
    clock = Clock()
    keys = {"ann": "sesame-0123456789"}

    def wait(seconds: float, tokens: int) -> Any:
        async def act() -> None:
            await until(lambda: [live.output_tokens for live in s.live] == [tokens])
            clock.now += seconds

        return act

    hit = TokenEvent("", (), (), 16, 16, HitKind.LCP, queue_seconds=2.0)
    script = make_script(hit, wait(5, 0), "abc", wait(4, 3), "de", wait(1, 5))
    async with run_server(server_config(api_keys=keys), surfaces=ONLY, script=script, clock=clock) as s:
        await s.post("/mini", make_chat_body(), x_request_id="mine", x_api_key=keys["ann"])
        found = await metric(s, x_api_key=keys["ann"])
    assert read_row(caplog) == {
        "request_id": "mine",
        "method": "POST",
        "endpoint": "/mini",
        "status": 200,
        "key": "ann",
        "total_ms": 10_000.0,
        "end": None,
        "error": None,
        "detail": None,
        "prompt_tokens": 20,
        "cached_tokens": 16,
        "output_tokens": 5,
        "queue_ms": 2000.0,
        "prefill_ms": 3000.0,
        "decode_ms": 4000.0,
        "tokens_per_second": 1.0,
    }
    assert found["mlxrun_queue_seconds_sum"] == 2.0 and found["mlxrun_queue_seconds_count"] == 1.0


async def test_the_fields_of_requests_without_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    forever = asyncio.Event()
    async with run_server(surfaces=ONLY, script=make_script(forever.wait)) as s:
        assert (await s.get("/nothing%0Ahere")).status == 404
        row = read_row(caplog, "/nothing")
        assert (row["endpoint"], row["status"], row["error"]) == ("/nothing%0Ahere", 404, "not_found")
        assert "queue_ms" not in row and row["key"] is None
        assert (await s.post("/mini", {"messages": [], "x\ny": 1})).status == 400
        row = read_row(caplog)
        assert (row["error"], row["detail"]) == ("unknown_parameter", "x\ny")
        caplog.clear()
        received = asyncio.create_task(s.post("/mini", make_chat_body(), x_request_id="mine"))
        await until(lambda: s.live.get("mine"))
        await s.post("/v1/requests/mine/cancel", {})
        await received
        row = read_row(caplog)
        assert (row["status"], row["error"], row["output_tokens"]) == (499, "request_cancelled", 0)
        assert row["queue_ms"] >= 0 and row["prefill_ms"] is row["decode_ms"] is None


@pytest.mark.parametrize(
    ("stream", "reported"),
    [
        (False, "POST /mini 499 - request_cancelled"),
        (True, "POST /mini 200 - stream ended: request_cancelled"),
    ],
    ids=["whole", "stream"],
)
async def test_a_cancelled_request(stream: bool, reported: str, caplog: pytest.LogCaptureFixture) -> None:
    """A stream's 200 went out long before; it counts as cancelled all the same."""
    forever = asyncio.Event()
    async with run_server(surfaces=ONLY, script=make_script("abc", forever.wait)) as s:
        received = asyncio.create_task(s.post("/mini", make_chat_body(stream=stream), x_request_id="mine"))
        await until(lambda: [live.output_tokens for live in s.live] == [3])
        assert (await s.post("/v1/requests/mine/cancel", {})).status == 200
        await received
        await s.settle()
        assert line(caplog) == reported
        assert await counted(s) == {"499": 1}


@pytest.mark.parametrize(
    ("error", "counts"), [(EngineDead("gone"), "503"), (Overloaded("full"), "429")], ids=["503", "429"]
)
async def test_a_failed_stream(error: Any, counts: str, caplog: pytest.LogCaptureFixture) -> None:
    async with run_server(surfaces=ONLY, script=make_script("abc", error)) as s:
        assert (await s.post("/mini", make_chat_body(stream=True))).status == 200
        assert line(caplog) == f"POST /mini 200 - stream ended: {error.code}"
        assert await counted(s) == {counts: 1}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("before", [(), ("abc",)], ids=["queued", "decode"])
async def test_a_disconnected_client(
    stream: bool, before: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """One line, and no traceback."""
    forever = asyncio.Event()
    async with run_server(surfaces=ONLY, script=make_script(*before, forever.wait)) as s:
        _, writer = await connect(s, make_chat_body(stream=stream))
        await until(lambda: [live.output_tokens for live in s.live] == [3 * len(before)])
        cut(writer)
        await s.settle()
        assert line(caplog, "POST /mini") == "POST /mini 499 - client gone"
        assert await counted(s) == {"499": 1}
        assert all(record.exc_info is None for record in caplog.records)


async def test_a_reader_that_is_disconnected_after_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    """It is no client that went away: the server cut it off, and says why."""
    config = server_config(request_timeout=3600.0, keepalive=0.1)
    async with run_server(config, surfaces=ONLY, script=make_script(*["abcdefgh" * 20] * 50)) as s:
        _, writer = await connect(s, make_chat_body(stream=True, max_tokens=4000), small=True)
        await until(lambda: s.engine.scripts_done == 1)
        fire_timers("LiveRequest.fail")
        await until(lambda: not s.active)
        writer.close()
        assert line(caplog) == "POST /mini 499 - connection cut: request_timeout"
        assert await counted(s) == {"504": 1}
