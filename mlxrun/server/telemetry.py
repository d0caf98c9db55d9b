"""Traces: a span for each request that asks the model for something, sent to an OTLP receiver.

The spans have the attributes of OpenTelemetry's conventions for generative AI, and no text of prompts or
answers. They are made when a request has ended. A thread of the library sends them, so nobody waits for a
receiver. OpenTelemetry is imported only if `telemetry.otlp` is set.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from mlxrun import __version__
from mlxrun.core.errors import ConfigError, get_http_status
from mlxrun.server.http.access import key_name, request_id
from mlxrun.server.http.request_log import RequestEnd
from mlxrun.server.http.surface import Endpoint
from mlxrun.server.live_requests import LIVE, LiveRequest

OPERATIONS = {
    **dict.fromkeys(("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"), "chat"),
    **dict.fromkeys(("/v1/completions", "/api/generate"), "text_completion"),
    **dict.fromkeys(("/v1/embeddings", "/api/embed", "/api/embeddings"), "embeddings"),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score"), "rerank"),
    "/v1/audio/transcriptions": "transcription",
}  # by the path of the endpoint
_PHASES = ("queue", "prefill", "decode")
_FLUSH_SECONDS = 3.0  # that the last spans have when the server stops
_QUIET_SECONDS = 60.0  # from one log line about the receiver to the next
_SPANS_PATH = "/v1/traces"


class Telemetry:
    """Makes spans and sends them to the receiver at `url`. ConfigError if OpenTelemetry is not installed."""

    def __init__(self, url: str) -> None:
        try:
            sdk: Any = importlib.import_module("opentelemetry.sdk.trace")
            export: Any = importlib.import_module("opentelemetry.sdk.trace.export")
            resources: Any = importlib.import_module("opentelemetry.sdk.resources")
            otlp: Any = importlib.import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
            w3c: Any = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
            self._trace: Any = importlib.import_module("opentelemetry.trace")
        except ImportError as error:
            text = (
                "telemetry.otlp needs OpenTelemetry, which is not installed: pip install 'mlxrun[telemetry]'"
            )
            raise ConfigError(f"{text} ({error})") from error
        self._log = logging.getLogger(otlp.__name__)
        self._limit = _LogLimit()
        self._log.addFilter(self._limit)
        own = resources.Resource({"service.name": "mlxrun", "service.version": __version__})
        resource = own.merge(resources.OTELResourceDetector().detect())  # OTEL_SERVICE_NAME and others win
        self._provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
        endpoint = url.rstrip("/").removesuffix(_SPANS_PATH) + _SPANS_PATH
        self._provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("mlxrun", __version__)
        self._propagator = w3c.TraceContextTextMapPropagator()

    def record(
        self,
        operation: str,
        seconds: float,
        headers: Mapping[str, str],
        attributes: Mapping[str, Any],
        live: LiveRequest | None,
        error: str,
        status: int,
    ) -> None:
        """Record a request that has ended now. `seconds`: since it came; `headers`: its `traceparent` is
        honoured; `live`: what the engine has of it; `error`: the code of what ended it, or empty; `status`:
        the HTTP status that it counts with."""
        end = time.time_ns()
        attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "mlxrun", **attributes}
        if error:
            attributes["error.type"] = error
        name = operation
        if live is not None:
            attributes |= _describe_work(live)
            name = f"{operation} {live.prepared.model}"
        parent = self._propagator.extract(headers)
        span = self._tracer.start_span(
            name, parent, self._trace.SpanKind.SERVER, attributes, start_time=end - _to_ns(seconds)
        )
        if live is not None:
            self._add_phases(self._trace.set_span_in_context(span, parent), end - _to_ns(live.age), live)
        if status >= 500:
            span.set_status(self._trace.StatusCode.ERROR, error)
        span.end(end)

    def _add_phases(self, context: Any, start: int, live: LiveRequest) -> None:
        """Add a child span for each phase that has begun. `start`: when the request was opened, in
        nanoseconds."""
        for name, seconds in zip(_PHASES, live.measure_phases(), strict=True):
            if seconds is not None:
                end = start + _to_ns(seconds)
                self._tracer.start_span(name, context, start_time=start).end(end)
                start = end

    async def close(self, app: web.Application) -> None:
        """Send what is left, for at most _FLUSH_SECONDS. A handler of aiohttp's on_cleanup."""
        thread = threading.Thread(target=self._provider.shutdown, name="mlxrun-telemetry", daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, _FLUSH_SECONDS)
        self._log.removeFilter(self._limit)


TELEMETRY = web.AppKey("telemetry", Telemetry)
RECORDED_ELSEWHERE = web.RequestKey("recorded_elsewhere", bool)  # by the process that answers it


def start_telemetry(app: web.Application, url: str) -> None:
    """Record the requests of an application that is being made, until it ends. ConfigError as in
    `Telemetry`."""
    app[TELEMETRY] = telemetry = Telemetry(url)
    app.on_cleanup.append(telemetry.close)


def record_request(request: web.Request, endpoint: Endpoint | None, end: RequestEnd, took: float) -> None:
    """Record a request that has been answered, if it asked the model for something. `took`: seconds."""
    telemetry = request.app.get(TELEMETRY)
    operation = None if endpoint is None else OPERATIONS.get(endpoint.path)
    if telemetry is None or endpoint is None or operation is None or request.get(RECORDED_ELSEWHERE):
        return
    attributes = {
        "http.request.method": request.method,
        "http.route": endpoint.path,
        "http.response.status_code": end.sent,
        **_name(request_id(request), key_name(request)),
    }
    error = end.error or end.how.replace(" ", "_")
    telemetry.record(operation, took, request.headers, attributes, request.get(LIVE), error, end.counted)


def record_background(app: web.Application, live: LiveRequest, headers: Mapping[str, str]) -> None:
    """Record a response in the background that has ended. `headers`: of the request that created it."""
    if TELEMETRY in app:
        error = live.aborted_by or live.error
        code, status = ("", 200) if error is None else (error.code, get_http_status(error))
        app[TELEMETRY].record("chat", live.age, headers, _name(live.id, live.key_name), live, code, status)


def _name(rid: str, key: str) -> dict[str, str]:
    return {"mlxrun.request_id": rid, **({"mlxrun.key": key} if key else {})}


def _describe_work(live: LiveRequest) -> dict[str, Any]:
    prepared, params = live.prepared, live.prepared.requests[0].params
    found: dict[str, Any] = {
        "gen_ai.request.model": prepared.model,
        "gen_ai.response.model": prepared.model,
        "gen_ai.usage.input_tokens": live.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": live.cached_tokens,
    }
    if prepared.kind in ("pooled", "transcription"):
        return found
    found |= {
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.stream": prepared.stream,
        "gen_ai.usage.output_tokens": live.output_tokens,
        "gen_ai.response.finish_reasons": live.finish_reasons,
    }
    if prepared.n > 1:
        found["gen_ai.request.choice.count"] = prepared.n
    if live.ttft is not None:
        found["gen_ai.response.time_to_first_chunk"] = live.ttft
    return found


def _to_ns(seconds: float) -> int:
    return round(max(seconds, 0.0) * 1e9)


class _LogLimit(logging.Filter):
    """For the exporter's log, which has several lines for each batch that cannot be sent."""

    _next = 0.0  # the earliest time of the next line

    def filter(self, record: logging.LogRecord) -> bool:
        """Pass errors only, and one in _QUIET_SECONDS."""
        now = time.monotonic()
        if record.levelno < logging.ERROR or now < self._next:
            return False
        self._next = now + _QUIET_SECONDS
        return True
