"""Traces, as an OTLP receiver gets them."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from mlxrun.config.settings import Config, TelemetrySettings
from mlxrun.core.errors import ConfigError, EngineDead
from mlxrun.core.request import HitKind, TokenEvent
from mlxrun.server import telemetry
from mlxrun.server.app import list_surfaces, make_app
from mlxrun.server.telemetry import OPERATIONS, TELEMETRY, Telemetry
from tests.helpers import fake_servers
from tests.helpers.command_processes import run_program
from tests.helpers.fake_servers import ServerFleet, run_front
from tests.helpers.raw_clients import connect, cut, until
from tests.helpers.server_fakes import MINI, Serving, make_chat_body, make_script, run_server, server_config

CHAT = "/v1/chat/completions"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SERVER, ERROR, UNSET = 2, 2, 0  # the kind of a span, and its states
OF_OTHERS = weakref.WeakSet[threading.Thread]()  # exporters of tests before these, which may never end


@dataclass
class Span:
    """One span as it arrived. Times are nanoseconds since 1970."""

    name: str
    attributes: dict[str, Any]
    raw: Any

    @property
    def times(self) -> tuple[int, int]:
        return self.raw.start_time_unix_nano, self.raw.end_time_unix_nano


@dataclass
class Receiver:
    """What an OTLP receiver at `url` has got."""

    url: str = ""
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)

    async def receive(self, request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest()
        message.ParseFromString(await request.read())
        self.requests.append(message)
        return web.Response(content_type="application/x-protobuf")

    @property
    def spans(self) -> list[Span]:
        return [
            Span(raw.name, {each.key: read_value(each.value) for each in raw.attributes}, raw)
            for message in self.requests
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for raw in scope.spans
        ]

    def split(self) -> tuple[Span, list[Span]]:
        """The one request's span, and its children."""
        (root,) = [span for span in self.spans if span.raw.kind == SERVER]
        return root, [span for span in self.spans if span.raw.kind != SERVER]


def read_value(value: Any) -> Any:
    name = value.WhichOneof("value")
    found = getattr(value, name)
    return [read_value(each) for each in found.values] if name == "array_value" else found


@pytest.fixture(autouse=True, scope="module")
def threads_end() -> Iterator[None]:
    """Exporters that repeat a request draw random numbers, which would disturb generated cases elsewhere."""
    OF_OTHERS.update(list_exporters())
    yield
    join_exporters()


def list_exporters() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("Otel")]


def join_exporters() -> None:
    for thread in list_exporters():
        if thread not in OF_OTHERS:
            thread.join(20.0)


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    found, app = Receiver(), web.Application()
    app.router.add_post("/v1/traces", found.receive)
    async with TestServer(app) as server:
        found.url = str(server.make_url("/"))
        yield found


def traced(url: str, **fields: Any) -> Config:
    return replace(server_config(**fields), telemetry=TelemetrySettings(url))


@asynccontextmanager
async def serve(url: str, *acts: Any, **options: Any) -> AsyncIterator[Serving]:
    """A server whose spans have been sent once the block has ended."""
    async with run_server(traced(url), script=make_script(*acts), **options) as s:
        yield s
        await s.settle()


HIT = TokenEvent("", num_computed_tokens=3, num_cached_tokens=3, hit_kind=HitKind.PREFIX, queue_seconds=0.25)


async def test_a_request_is_a_span_with_its_phases(receiver: Receiver) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    async with serve(receiver.url, HIT, "Hello", " world") as s:
        body = make_chat_body(temperature=0.5, top_p=0.75, max_tokens=50)
        reply = await s.post(CHAT, body, **headers)
    usage = reply.json["usage"]
    span, children = receiver.split()
    first = span.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert span.name == "chat fake" and span.raw.status.code == UNSET and first > 0
    assert span.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "mlxrun",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.stream": False,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.response.finish_reasons": ["stop"],
        "http.request.method": "POST",
        "http.route": CHAT,
        "http.response.status_code": 200,
        "mlxrun.request_id": "mine",
    }
    assert (span.raw.trace_id.hex(), span.raw.parent_span_id.hex()) == (TRACE, PARENT)
    assert [child.name for child in children] == ["queue", "prefill", "decode"]
    assert {child.raw.parent_span_id for child in children} == {span.raw.span_id}
    assert {child.raw.trace_id.hex() for child in children} == {TRACE}
    queue, prefill, decode = (child.times for child in children)
    assert queue[1] - queue[0] == 250_000_000 and queue[1] == prefill[0] and prefill[1] == decode[0]
    (resource,) = receiver.requests[0].resource_spans
    described = {each.key: read_value(each.value) for each in resource.resource.attributes}
    assert described["service.name"] == "mlxrun"


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, {"stream": True, "n": 2}, "chat fake"),
        ("/v1/completions", {"prompt": "a"}, "text_completion fake"),
        ("/v1/messages", {"model": "m", "max_tokens": 99}, "chat fake"),
        ("/v1/responses", {"input": "a", "stream": True}, "chat fake"),
        ("/api/chat", {"model": "m"}, "chat fake"),
        ("/api/generate", {"model": "m", "prompt": "a"}, "text_completion fake"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith("/") else "",
)
async def test_every_surface_is_recorded(
    receiver: Receiver, path: str, body: dict[str, Any], name: str
) -> None:
    body = body if "prompt" in body or "input" in body else make_chat_body(**body)
    async with serve(receiver.url, "secret words") as s:
        assert (await s.post(path, body)).status == 200
    span, children = receiver.split()
    assert (span.name, span.attributes["http.route"]) == (name, path)
    count = body.get("n", 1)
    assert span.attributes["gen_ai.response.finish_reasons"] == ["stop"] * count
    assert span.attributes.get("gen_ai.request.choice.count", 1) == count
    assert len(children) == 3 and span.raw.parent_span_id == b""
    known = {value for key, value in vars(gen_ai_attributes).items() if key.startswith("GEN_AI_")}
    assert {key for key in span.attributes if key.startswith("gen_ai.")} <= known
    sent = b"".join(message.SerializeToString() for message in receiver.requests)
    assert b"secret" not in sent and b"hello" not in sent


def test_what_asks_the_model_has_an_operation() -> None:
    asking = {
        endpoint.path
        for surface in list_surfaces()
        for endpoint in surface.endpoints
        if surface.name in ("openai", "responses", "anthropic", "ollama", "embeddings", "transcriptions")
        and endpoint.method == "POST"
        and endpoint.handler.__name__.startswith("create_")
        and "conversations" not in endpoint.path
    }
    assert asking == OPERATIONS.keys()


@pytest.mark.parametrize(
    ("acts", "body", "error", "status", "state"),
    [
        ((), {"temperature": -1}, "invalid_value", 400, UNSET),
        ((EngineDead("gone"),), {}, "engine_unavailable", 503, ERROR),
        (("a", EngineDead("gone")), {"stream": True}, "engine_unavailable", 200, ERROR),
    ],
    ids=["refused", "failed", "stream"],
)
async def test_errors_have_a_type(
    receiver: Receiver, acts: Sequence[Any], body: dict[str, Any], error: str, status: int, state: int
) -> None:
    async with serve(receiver.url, *acts) as s:
        await s.post(CHAT, make_chat_body(**body))
    span, children = receiver.split()
    assert (span.attributes["error.type"], span.raw.status.code) == (error, state)
    assert span.attributes["http.response.status_code"] == status
    assert span.name == ("chat" if status == 400 else "chat fake") and bool(children) == (status != 400)


async def test_a_client_that_leaves_is_recorded(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATIONS, "/mini", "chat")
    async with serve(receiver.url, HIT, asyncio.Event().wait, surfaces=[MINI]) as s:
        _, writer = await connect(s, make_chat_body())
        await until(lambda: [live.phase for live in s.live] == ["prefill"])
        cut(writer)
    span, children = receiver.split()
    assert span.attributes["error.type"] == "client_gone" and span.raw.status.code == UNSET
    assert [child.name for child in children] == ["queue", "prefill"]


async def test_a_response_in_the_background_has_a_span_of_its_own(receiver: Receiver) -> None:
    gate = asyncio.Event()
    async with serve(receiver.url, HIT, "a", gate.wait, "b") as s:
        body = {"input": "a", "background": True}
        made = (await s.post("/v1/responses", body, traceparent=f"00-{TRACE}-{PARENT}-01")).json
        gate.set()
        await s.settle()
    created, answered = (span for span in receiver.spans if span.raw.kind == SERVER)
    assert created.attributes["http.route"] == "/v1/responses"
    assert "gen_ai.usage.output_tokens" not in created.attributes
    assert answered.attributes["gen_ai.usage.output_tokens"] == 2
    assert answered.attributes["mlxrun.request_id"] == made["id"]
    assert {span.raw.trace_id.hex() for span in receiver.spans} == {TRACE}


async def test_other_paths_and_traces_that_are_not_sampled_are_left_out(receiver: Receiver) -> None:
    async with serve(receiver.url, "a") as s:
        for path in ("/health", "/v1/models", "/metrics", "/nothing"):
            await s.get(path)
        await s.post(CHAT, make_chat_body(), traceparent=f"00-{TRACE}-{PARENT}-00")
    assert receiver.spans == []


@pytest.mark.parametrize("header", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01", "\x80" * 55])
async def test_a_broken_traceparent_begins_a_trace(receiver: Receiver, header: str) -> None:
    async with serve(receiver.url, "a") as s:
        assert (await s.post(CHAT, make_chat_body(), traceparent=header)).status == 200
    span, _ = receiver.split()
    assert span.raw.parent_span_id == b"" and span.raw.trace_id.hex() != TRACE


@pytest.fixture
def traces_front(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Front and workers have the same config."""
    monkeypatch.setattr(fake_servers, "server_config", lambda **fields: traced(receiver.url, **fields))


@pytest.mark.usefixtures("traces_front")
async def test_behind_a_front_the_worker_records(receiver: Receiver) -> None:
    """A request has one span, in its client's trace. What the front refuses has one too."""
    async with run_front(ServerFleet(lambda number: make_script("a")), 1) as front:
        reply = await front.post(CHAT, make_chat_body(), traceparent=f"00-{TRACE}-{PARENT}-01")
        assert reply.status == 200
        assert (await front.post(CHAT, make_chat_body(), origin="http://a.example")).status == 403
    answered, refused = sorted((s for s in receiver.spans if s.raw.kind == SERVER), key=lambda s: s.times)
    assert answered.raw.trace_id.hex() == TRACE and answered.attributes["gen_ai.usage.output_tokens"] == 1
    assert refused.attributes["http.response.status_code"] == 403 and refused.name == "chat"


@pytest.mark.usefixtures("traces_front")
async def test_the_front_records_the_end_of_a_worker(receiver: Receiver) -> None:
    gate = asyncio.Event()
    async with run_front(ServerFleet(lambda number: make_script("a", gate.wait)), 1) as front:
        body = make_chat_body(stream=True)
        async with front.http.post(front.url + CHAT, json=body) as response:
            await response.content.readuntil(b'"a"')
            front.fleet.workers[0].kill()
            assert b"the worker died" in await response.read()
    errors = [span.attributes.get("error.type") for span in receiver.spans if span.raw.kind == SERVER]
    assert "engine_unavailable" in errors


async def test_the_api_key_is_named(receiver: Receiver) -> None:
    async with run_server(traced(f"{receiver.url}v1/traces", api_keys={"ann": "sesame"})) as s:
        assert (await s.post(CHAT, make_chat_body(), x_api_key="sesame")).status == 200
    assert receiver.split()[0].attributes["mlxrun.key"] == "ann"


async def test_a_receiver_that_hangs_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the end of the server."""
    monkeypatch.setattr(telemetry, "_FLUSH_SECONDS", 0.1)
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")  # each span is sent at once
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "2")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # after which the exporter's thread ends
    requested, never = asyncio.Event(), asyncio.Event()

    async def hang(request: web.Request) -> web.Response:
        requested.set()
        await never.wait()
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", hang)
    async with TestServer(app) as server:
        async with serve(str(server.make_url("/")), "a") as s:
            for _ in range(20):
                assert (await s.post(CHAT, make_chat_body())).status == 200
            await requested.wait()
            assert (await s.post(CHAT, make_chat_body())).status == 200
        assert not never.is_set()
        never.set()
    await asyncio.to_thread(join_exporters)  # what they log is of this test


async def test_a_receiver_that_is_down_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    exporter = logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    monkeypatch.setattr(exporter, "filters", [])  # those of servers that other tests have not closed
    found: list[logging.LogRecord] = []
    async with serve("http://127.0.0.1:9", "a") as s, asyncio.timeout(20):
        name = s.app[TELEMETRY]._log.name
        for _ in range(5):
            assert (await s.post(CHAT, make_chat_body())).status == 200
        while not found:  # an exporter that is stopped before its first failure says nothing
            await asyncio.sleep(0.01)
            found = [record for record in caplog.records if record.name == name]
    await asyncio.to_thread(join_exporters)
    found = [record for record in caplog.records if record.name == name]
    assert len(found) == 1 and found[0].levelno == logging.ERROR


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"not installed: pip install 'mlxrun\[telemetry\]'"):
        make_app(traced("http://127.0.0.1:4318"))


def test_nothing_is_imported_while_it_is_off() -> None:
    code = (
        "import sys; from mlxrun.config.settings import Config; from mlxrun.server.app import make_app;"
        "make_app(Config()); sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert run_program([sys.executable, "-c", code]).returncode == 0


def test_variables_name_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "house")
    found = Telemetry("http://127.0.0.1:9")._provider
    assert found.resource.attributes["service.name"] == "house"
    found.shutdown()
