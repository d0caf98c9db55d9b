"""Streams of events: slow readers, keep-alives, and events that have all come."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from aiohttp import web

from mlxrun.api.parsers.answer_parser import ModelFormats
from mlxrun.api.parsers.delta import PlainParser
from mlxrun.core.request import Request, TokenEvent
from mlxrun.server.http import sse
from mlxrun.server.http.sse import open_stream
from mlxrun.server.http.surface import Endpoint, Surface
from tests.helpers.raw_clients import ONLY, connect, until
from tests.helpers.server_fakes import (
    Reply,
    make_chat_body,
    make_script,
    parse_events,
    run_server,
    server_config,
)
from tests.helpers.timers import fire_timers

# -- slow readers ---------------------------------------------------------------------------------------


async def test_a_slow_reader_does_not_delay_others() -> None:
    """Its tokens merge; another request is answered meanwhile; once it reads, it gets all."""
    count = 5_000
    text = "".join(random.Random(1).choices("abcdefgh ", k=count))

    def script(request: Request) -> list[Any]:
        return [text] if request.params.max_tokens > 100 else ["quick"]

    async with run_server(surfaces=ONLY, script=script, model_info=_long()) as s:
        reader, writer = await connect(s, make_chat_body(stream=True, max_tokens=count), small=True)
        await until(lambda: len(s.live) == 1)
        (live,) = s.live
        await until(lambda: s.engine.scripts_done == 1)
        assert live.output_tokens < count, "all was taken: the buffers are too large for this test"
        assert (await s.post("/mini", make_chat_body(max_tokens=10))).json["texts"] == ["quick"]
        writer.transport.resume_reading()
        got: list[str] = []
        ended = False
        while not ended:
            line = await reader.readline()
            assert line, "the stream was cut"
            if line.startswith(b"data: "):
                data = json.loads(line[6:])
                got.append(data["text"])
                ended = data["end"] is not None
        assert "".join(got) == text
        assert max(len(part) for part in got) > 100, "pieces were merged"
        writer.close()
        await s.settle()


async def test_a_reader_that_never_reads_is_disconnected() -> None:
    """Once its request has timed out, so that a connection is not held for ever."""
    text = "abcdefgh " * 500
    config = server_config(keepalive=0.1, request_timeout=3600.0)
    async with run_server(config, surfaces=ONLY, script=make_script(text), model_info=_long()) as s:
        _, writer = await connect(s, make_chat_body(stream=True, max_tokens=4_000), small=True)
        await until(lambda: s.engine.scripts_done == 1)
        fire_timers("LiveRequest.fail")
        await s.settle()
        assert len(s.engine.aborted) == 1
        writer.close()


def _long() -> Any:
    from tests.helpers.tokenizers import FakeModelInfo

    return FakeModelInfo(context_length=8_000_000)


# -- keep-alive -----------------------------------------------------------------------------------------


async def test_keep_alive_comments_show_the_progress() -> None:
    """While nothing comes the stream tells the phase and the progress."""
    gates = [asyncio.Event() for _ in range(3)]
    script = make_script(
        gates[0].wait, TokenEvent("", num_computed_tokens=5), gates[1].wait, "ab", gates[2].wait, "c"
    )
    async with run_server(server_config(keepalive=0.1), surfaces=ONLY, script=script) as s:
        reader, writer = await connect(s, make_chat_body(stream=True))
        for gate, said in zip(gates, (b": queued\n", b": prefill 5/20\n", b": decode 2\n"), strict=True):
            await asyncio.wait_for(reader.readuntil(said), 60)
            await asyncio.wait_for(reader.readuntil(said), 60)  # and again
            gate.set()
        assert b": queued" not in await asyncio.wait_for(reader.readuntil(b'"stop"'), 60)
        writer.close()
        await s.settle()


async def test_a_surface_can_send_its_own_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, original = asyncio.Event(), sse.EventStream.__init__

    def init(self: Any, request: Any, **_: Any) -> None:
        original(self, request, ping=lambda: ("ping", {"type": "ping"}))

    monkeypatch.setattr(sse.EventStream, "__init__", init)
    async with run_server(
        server_config(keepalive=0.1), surfaces=ONLY, script=make_script(gate.wait, "x")
    ) as s:
        async with s.http.post(f"{s.url}/mini", json=make_chat_body(stream=True)) as response:
            text = await response.content.readuntil(b"\n\n")
            gate.set()
            text += await response.read()
        events = parse_events(text.decode())
        assert events[0] == ("ping", {"type": "ping"})
        assert events[-1][1]["end"] == "stop"


async def test_tokens_without_deltas_keep_the_stream_alive_until_it_times_out() -> None:
    """A parser that swallows text is no silent hang: progress, then an error."""

    class Swallow(PlainParser):
        def feed(self, text: str) -> list[Any]:
            return []

    class Swallowing(ModelFormats):
        def make_parser(self, *_: Any) -> Any:
            return Swallow()

    tick = asyncio.Event()

    def script(request: Request) -> Any:
        while True:
            yield "x"
            yield lambda: asyncio.sleep(0.01)

    config = server_config(keepalive=0.1, request_timeout=3600.0)
    async with run_server(config, surfaces=ONLY, script=script, formats=Swallowing()) as s:
        async with s.http.post(f"{s.url}/mini", json=make_chat_body(stream=True)) as response:
            text = b""
            while text.count(b": decode ") < 3:
                assert not response.content.at_eof(), text
                text += await response.content.readline()
            fire_timers("LiveRequest.fail")
            reply = Reply(response.status, {}, text + await response.read())
        comments = [line for line in reply.body.decode().split("\n") if line.startswith(": decode ")]
        assert len(comments) >= 2
        numbers = [int(line.split(" ")[2]) for line in comments]
        assert numbers == sorted(set(numbers))
        assert reply.events == [(None, {"error": "request_timeout"})]
        await s.settle()
    tick.set()


# -- events that have all come ----------------------------------------------------------------------------


async def test_a_stream_of_events_that_have_come_needs_no_request() -> None:
    """They are sent at once, and no comment comes between."""

    async def send(request: web.Request) -> web.StreamResponse:
        async with open_stream(request) as stream:
            assert not stream.started
            for number in range(3):
                await stream.send({"number": number}, "count")
                await asyncio.sleep(0.1)
        return stream.response

    surface = Surface("mini", (Endpoint("GET", "/events", send, "Events"),))
    async with run_server(server_config(keepalive=0.1), surfaces=[surface]) as s:
        reply = await s.get("/events")
        assert reply.events == [("count", {"number": number}) for number in range(3)]
        assert b": " not in reply.body.replace(b"event: ", b"").replace(b"data: ", b"")


async def test_lines_of_an_event_stay_one_event() -> None:
    async def send(request: web.Request) -> web.StreamResponse:
        async with open_stream(request) as stream:
            await stream.send("a\nb")
        return stream.response

    surface = Surface("mini", (Endpoint("GET", "/events", send, "Events"),))
    async with run_server(surfaces=[surface]) as s:
        assert (await s.get("/events")).body == b"data: a\ndata: b\n\n"
