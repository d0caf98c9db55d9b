"""Writes answers in Anthropic's format: the events of a stream in their exact order, and whole messages.

One writer makes both, so that a stream and a message have the same blocks. An event is a name and its data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxrun.api.anthropic.request import PreparedMessage
from mlxrun.api.choice import Choice, parse_arguments
from mlxrun.api.opaque_reasoning import encode_reasoning
from mlxrun.api.parsers.delta import Delta

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
            # Some clients accept only Anthropic's form of ids.
            call_id = f"toolu_{delta.id.removeprefix('call_')}"
            block = {"type": "tool_use", "id": call_id, "name": delta.name, "input": {}}
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
