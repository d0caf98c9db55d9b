"""The log line of each request, and the metrics that agree with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from mlxrun.core.errors import EngineDead, Overloaded
from mlxrun.server.endpoints import admin
from tests.helpers.raw_clients import connect, cut, until
from tests.helpers.server_fakes import MINI, Serving, make_chat_body, make_script, run_server, server_config
from tests.helpers.timers import fire_timers
from tests.server.test_live_requests_metrics import metric

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
