"""What an operator reads afterwards: one honest line a request, numbers that agree with it, and what
`mlxrun serve` says of a config with several mistakes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxrun.cli.main import main
from mlxrun.errors import EngineDead, Overloaded
from mlxrun.server.endpoints import admin
from tests.helpers.server_fakes import MINI, Serving, hello, says, server_config, serving
from tests.server.endpoints.test_admin import metric
from tests.server.test_live_requests import connect, cut, until

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
async def test_an_answer_that_is_complete(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The twin of all below: nothing is said but the status."""
    async with serving(surfaces=ONLY) as s:
        await s.post("/mini", hello(stream=stream))
        assert line(caplog) == "POST /mini 200 -"
        assert await counted(s) == {"200": 1}


@pytest.mark.parametrize(
    ("stream", "told"),
    [(False, "POST /mini 499 -"), (True, "POST /mini 200 - stream ended: request_cancelled")],
    ids=["whole", "stream"],
)
async def test_a_request_that_was_cancelled(
    stream: bool, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A stream's 200 went out long before; it counts as cancelled all the same."""
    forever = asyncio.Event()
    async with serving(surfaces=ONLY, script=says("abc", forever.wait)) as s:
        asked = asyncio.create_task(s.post("/mini", hello(stream=stream), x_request_id="mine"))
        await until(lambda: [live.output_tokens for live in s.server.live] == [3])
        assert (await s.post("/v1/requests/mine/cancel", {})).status == 200
        await asked
        await s.settle()
        assert line(caplog) == told
        assert await counted(s) == {"499": 1}


@pytest.mark.parametrize(
    ("error", "counts"), [(EngineDead("gone"), "503"), (Overloaded("full"), "429")], ids=["503", "429"]
)
async def test_a_stream_that_failed(error: Any, counts: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(surfaces=ONLY, script=says("abc", error)) as s:
        assert (await s.post("/mini", hello(stream=True))).status == 200
        assert line(caplog) == f"POST /mini 200 - stream ended: {error.code}"
        assert await counted(s) == {counts: 1}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("before", [(), ("abc",)], ids=["queued", "decode"])
async def test_a_client_that_vanished(
    stream: bool, before: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """A24, A25: one line, and no traceback."""
    forever = asyncio.Event()
    async with serving(surfaces=ONLY, script=says(*before, forever.wait)) as s:
        _, writer = await connect(s, hello(stream=stream))
        await until(lambda: [live.output_tokens for live in s.server.live] == [3 * len(before)])
        cut(writer)
        await s.settle()
        assert line(caplog, "POST /mini") == "POST /mini 499 - client gone"
        assert await counted(s) == {"499": 1}
        assert all(record.exc_info is None for record in caplog.records)


async def test_a_reader_that_took_nothing_until_its_time_was_over(caplog: pytest.LogCaptureFixture) -> None:
    """It is no client that went away: the server cut it off, and says why."""
    config = server_config(request_timeout=0.3, keepalive=0.1)
    async with serving(config, surfaces=ONLY, script=says(*["abcdefgh" * 20] * 50)) as s:
        _, writer = await connect(s, hello(stream=True, max_tokens=4000), small=True)
        await until(lambda: len(s.server.live) == 1)
        await until(lambda: not s.server.active)
        writer.close()
        assert line(caplog) == "POST /mini 499 - connection cut: request_timeout"
        assert await counted(s) == {"504": 1}


# -- numbers --------------------------------------------------------------------------------------------


async def test_the_status_names_the_model_and_the_limits() -> None:
    """A65: what is served, how much may run, and how much the files may take."""
    async with serving(surfaces=ONLY) as s, serving(surfaces=ONLY, loaded=False) as loading:
        status = (await s.get("/v1/status")).json
        assert status["model"] == {"name": "fake", "context_length": 4096, "vision": False}
        assert status["limits"] == {"max_running": 32, "max_queue": 1024}
        assert status["files"] == {"count": 0, "bytes": 0, "max_bytes": 10_000_000_000}
        before = (await loading.get("/v1/status")).json
        assert before["model"] is None and before["limits"] == status["limits"]


async def test_the_metrics_have_what_is_asked_for() -> None:
    now = [100.0]
    gate = asyncio.Event()
    async with serving(surfaces=ONLY, script=says("abc", gate.wait), clock=lambda: now[0]) as s:
        s.engine.counts = {"tokens": 321}
        asked = asyncio.create_task(s.post("/mini", hello()))
        await until(lambda: [live.output_tokens for live in s.server.live] == [3])
        assert (await metric(s))["mlxrun_request_duration_seconds_count"] == 0
        now[0] += 7
        gate.set()
        await asked
        found = await metric(s)
        assert found["mlxrun_request_duration_seconds_sum"] == 7
        assert found["mlxrun_cache_tokens_total"] == 321
        assert found["mlxrun_limits name=max_running"] == 32
        assert found["mlxrun_batches state=running"] == found["mlxrun_batches state=waiting"] == 0
        assert found["mlxrun_files_bytes"] == 0
        assert found["mlxrun_files_max_bytes"] == 10_000_000_000
        (info,) = [name for name in found if name.startswith("mlxrun_info ")]
        assert "model=fake" in info and f"config_hash={s.server.digest}" in info


# -- the command ----------------------------------------------------------------------------------------


@pytest.fixture
def _no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mlxrun.cli.serve._serve", never)


@pytest.mark.usefixtures("_no_server")
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--set", "server.port=abc", "--port", "0"], ["server.port: 'abc' is not an integer"]),
        (["--set", "server.port=-1", "--port", "70000"], ["70000 is more than", "-1 is less than"]),
        (["--set", "server.prt=1", "--set", "server.port=x", "--port", "1"], ["server.prt", "server.port"]),
    ],
    ids=["hidden", "both", "with others"],
)
def test_an_option_hides_no_mistake(
    flags: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A66: every mistake is shown, each once, also where --port or --host would have gone over it."""
    assert main(["serve", *flags]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == len(said), shown
    for text in said:
        assert sum(text in each for each in shown) == 1, shown


@pytest.mark.usefixtures("_no_server")
@pytest.mark.parametrize("flags", [["--set", "server.port=1", "--port", "0"], ["--port", "0"]], ids=str)
def test_an_option_goes_over_what_is_right(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The twin: it comes to the start."""
    assert main(["serve", *flags]) == 3
    assert "server.port" not in capsys.readouterr().err


@pytest.mark.usefixtures("_no_server")
def test_a_file_that_an_option_makes_right(capsys: pytest.CaptureFixture[str]) -> None:
    """What contradicts itself without the option is no mistake with it."""
    Path("c.yaml").write_text("server:\n  host: 0.0.0.0\n")
    assert main(["serve", "-c", "c.yaml", "--host", "127.0.0.1"]) == 3
    assert main(["serve", "-c", "c.yaml"]) == 2
    assert "server.host" in capsys.readouterr().err
