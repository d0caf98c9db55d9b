"""Writes answers in Anthropic's format, and builds its errors, lists of models and message batches.

One writer makes the events of a stream, in their exact order, and whole messages. So both have the same
blocks. An event is a name and its data. The requests of a batch are checked when they run, since their errors
are results too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from mlxrun.api.anthropic.fields import THREAD_UNSUPPORTED
from mlxrun.api.anthropic.request import PreparedMessage
from mlxrun.api.anthropic.tagged_schema import check_fields
from mlxrun.api.anthropic.tool_use_ids import encode_call_id
from mlxrun.api.body_schema import OBJECT, STRING, object_of
from mlxrun.api.choice import Choice, parse_arguments
from mlxrun.api.opaque_reasoning import encode_reasoning
from mlxrun.api.parsers.delta import Delta
from mlxrun.core.errors import (
    Draining,
    NotReady,
    PromptTooLong,
    RequestError,
    describe_error,
    get_http_status,
)
from mlxrun.core.field_errors import quote, reject

Json = dict[str, Any]
Event = tuple[str, Json]


class MessageWriter:
    """Writes one answer. `message_id`: the id that clients see."""

    def __init__(self, request: PreparedMessage, message_id: str) -> None:
        self._started = False
        self._request = request
        self._options = request.message
        self._id = message_id
        self._blocks: list[Json] = []
        self._calls: list[str] = []  # arguments of the calls, as JSON text
        self._kind = ""  # of the open block

    def feed(self, choice: Choice, deltas: Sequence[Delta]) -> list[Event]:
        """Return the events of these deltas. Once the answer has ended, they end the stream."""
        events = self._start(choice.cached_tokens)
        for delta in deltas:
            if delta.kind != self._kind or (delta.kind == "call" and delta.index == len(self._calls)):
                if delta.kind != "call" and not delta.text:
                    continue
                events += [*self._close_block(), *self._open_block(delta)]
            events += self._extend_block(delta)
        return events + self._end(choice) if choice.ended else events

    def write_ping(self, cached: int) -> Event:
        """Return a keep-alive event, or the first event if none was sent yet. `cached`: the number of the
        prompt's tokens that the prefix cache had."""
        return next(iter(self._start(cached)), _event("ping"))

    def build_message(self, choice: Choice) -> Json:
        """Build the whole message of an answer that has ended and was fed."""
        usage = {**self._build_final_usage(choice), "service_tier": "standard"}
        return self._build_message(self._blocks, *self._get_stop_reason(choice), usage)

    def _start(self, cached: int) -> list[Event]:
        if self._started:
            return []
        self._started = True
        usage = {**self._build_usage(cached, 0), "service_tier": "standard"}
        return [_event("message_start", message=self._build_message([], None, None, usage))]

    def _end(self, choice: Choice) -> list[Event]:
        events = self._close_block()
        reason, sequence = self._get_stop_reason(choice)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        more: Json = {"context_management": {"applied_edits": []}} if self._options.reports_edits else {}
        events.append(_event("message_delta", delta=delta, usage=self._build_final_usage(choice), **more))
        return [*events, _event("message_stop")]

    # -- blocks -------------------------------------------------------------------------------------

    def _open_block(self, delta: Delta) -> list[Event]:
        self._kind = delta.kind
        if delta.kind == "content":
            block: Json = {"type": "text", "text": ""}
        elif delta.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "tool_use", "id": encode_call_id(delta.id), "name": delta.name, "input": {}}
            self._calls.append("")
        self._blocks.append(dict(block))
        events = [_event("content_block_start", index=len(self._blocks) - 1, content_block=block)]
        return [*events, _event("ping")] if len(self._blocks) == 1 else events

    def _extend_block(self, delta: Delta) -> list[Event]:
        block, text = self._blocks[-1], delta.text
        if not text:
            return []
        if delta.kind == "content":
            block["text"] += text
            return [self._write_delta({"type": "text_delta", "text": text})]
        if delta.kind == "call":
            self._calls[-1] += text
            return [self._write_delta({"type": "input_json_delta", "partial_json": text})]
        block["thinking"] += text
        if self._options.hide_reasoning:
            return []
        return [self._write_delta({"type": "thinking_delta", "thinking": text})]

    def _close_block(self) -> list[Event]:
        if not self._kind:
            return []
        block, events = self._blocks[-1], []
        if self._kind == "reasoning":
            hidden = self._options.hide_reasoning
            block["signature"] = encode_reasoning(block["thinking"] if hidden else "")
            block["thinking"] = "" if hidden else block["thinking"]
            events = [self._write_delta({"type": "signature_delta", "signature": block["signature"]})]
        elif self._kind == "call":
            block["input"] = parse_arguments(self._calls[-1])
        events.append(_event("content_block_stop", index=len(self._blocks) - 1))
        self._kind = ""
        return events

    def _write_delta(self, delta: Json) -> Event:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    # -- the message --------------------------------------------------------------------------------

    def _build_message(
        self, blocks: list[Json], reason: str | None, sequence: str | None, usage: Json
    ) -> Json:
        message: Json = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._request.prepared.model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }
        if self._options.reports_edits:
            message["context_management"] = {"applied_edits": []}
        return message

    def _get_stop_reason(self, choice: Choice) -> tuple[str, str | None]:
        """Why the answer ended, and by which stop sequence."""
        if choice.stop is not None:
            return "stop_sequence", choice.stop
        if choice.finish_reason == "length":
            return (
                "model_context_window_exceeded" if self._request.limited_by_context else "max_tokens"
            ), None
        return ("tool_use" if choice.calls else "end_turn"), None

    def _build_final_usage(self, choice: Choice) -> Json:
        usage = self._build_usage(choice.cached_tokens, choice.completion_tokens)
        if choice.left_out_tokens:
            usage["left_out_tokens"] = choice.left_out_tokens
        return {**usage, "output_tokens_details": {"thinking_tokens": choice.reasoning_tokens}}

    def _build_usage(self, cached: int, output: int) -> Json:
        """Token counts. The three kinds of input tokens add up to the whole prompt."""
        return {
            "input_tokens": self._request.prepared.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output,
        }


def _event(name: str, **data: Any) -> Event:
    return name, {"type": name, **data}


BATCHES = "/v1/messages/batches"
MAX_REQUESTS = 100_000
HOURS = 24  # after which a batch expires
REQUEST = object_of({"custom_id": STRING, "params": OBJECT})
BODY = object_of({"requests": {"type": "array", "minItems": 1, "maxItems": MAX_REQUESTS, "items": REQUEST}})
_CUSTOM_ID = re.compile("[a-zA-Z0-9_-]{1,64}")

_OVERLOADED = 529
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}


def get_error_status(error: BaseException) -> int:
    """Return the HTTP status of an error: Anthropic's 529 if the server drains or is not ready."""
    return _OVERLOADED if isinstance(error, (Draining, NotReady)) else get_http_status(error)


def build_error(error: BaseException, request_id: str) -> Json:
    """Build Anthropic's error object. An error that is not meant for users shows only its class."""
    status = get_error_status(error)
    text = describe_error(error)
    if isinstance(error, PromptTooLong):
        text = f"prompt is too long: {text}"  # clients look for these words, and shorten the conversation
    default = "invalid_request_error" if 400 <= status < 500 else "api_error"
    kind = _ERROR_TYPES.get(status, default)
    found: Json = {"type": kind, "message": text}
    if isinstance(error, RequestError) and error.code == THREAD_UNSUPPORTED:
        found["details"] = {"error_code": THREAD_UNSUPPORTED, "unsupported": ["thread"]}
    return {"type": "error", "error": found, "request_id": request_id}


def format_time(seconds: float | None) -> str | None:
    """Format seconds since 1970 as in RFC 3339; None stays None."""
    if seconds is None:
        return None
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def build_models_page(names: Sequence[str]) -> Json:
    """Build Anthropic's response of /v1/models."""
    return {
        "data": [build_model(name) for name in names],
        "has_more": False,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }


def build_model(name: str) -> Json:
    """Build Anthropic's description of a model. Its date is unknown, so it is that of the epoch."""
    return {"type": "model", "id": name, "display_name": name, "created_at": format_time(0)}


def check_request(request: Any, where: str) -> tuple[str, Json]:
    """Return the `custom_id` and the `params` of a batch's request. RequestError if one is wrong."""
    given = check_fields(request, where, REQUEST)
    name, params = given["custom_id"], given["params"]
    if not _CUSTOM_ID.fullmatch(name):
        reject(f"{where}.custom_id", f"{quote(name)} is not 1 to 64 letters, digits, '_' and '-'")
    return name, params


def build_request_counts(total: int, succeeded: int, errored: int, ended: str | None) -> Json:
    """Build the `request_counts` of a batch. All its requests are `processing` until it has ended.

    `ended`: how requests without an answer ended (canceled, expired or errored); None while the batch
    runs."""
    counts = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    if ended is None:
        return counts | {"processing": total}
    counts |= {"succeeded": succeeded, "errored": errored}
    counts[ended] += total - succeeded - errored
    return counts


def build_succeeded(custom_id: str, message: Json) -> Json:
    """Build the result of a request that was answered."""
    return {"custom_id": custom_id, "result": {"type": "succeeded", "message": message}}


def build_errored(custom_id: str, error: Json) -> Json:
    """Build the result of a request that was refused or failed. `error`: as build_error returns it."""
    return {"custom_id": custom_id, "result": {"type": "errored", "error": error}}


def build_unanswered(custom_id: str, ended: str) -> Json:
    """Build the result of a request that did not run. `ended`: as in build_request_counts."""
    if ended == "errored":
        error = {"type": "api_error", "message": "the batch failed before this request was answered"}
        return build_errored(custom_id, {"type": "error", "error": error, "request_id": None})
    return {"custom_id": custom_id, "result": {"type": ended}}
