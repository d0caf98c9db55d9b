"""Answers in Anthropic's form: the events of a stream in their exact order, and the message of them all.

One writer makes both, so that a stream and a message hold the same blocks. An event is its name and its data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from mlxrun.api.anthropic.request import PreparedMessage
from mlxrun.api.choice import Choice
from mlxrun.api.opaque_reasoning import encode_reasoning
from mlxrun.parsers.delta import Delta

Json = dict[str, Any]
Event = tuple[str, Json]

_LONGEST_INT = 4000  # digits; Python reads no longer ones


class MessageWriter:
    """Writes one answer. `message_id` is the request's, which clients see."""

    def __init__(self, message: PreparedMessage, message_id: str) -> None:
        self._started = False
        self._of = message
        self._id = message_id
        self._blocks: list[Json] = []
        self._calls: list[str] = []  # arguments of the calls, as JSON text
        self._kind = ""  # of the open block

    def feed(self, choice: Choice, pieces: Sequence[Delta]) -> list[Event]:
        """The events of some pieces; with the answer's last ones, those that end the stream."""
        events = self._start(choice.cached_tokens)
        for piece in pieces:
            if piece.kind != self._kind or (piece.kind == "call" and piece.index == len(self._calls)):
                if piece.kind != "call" and not piece.text:
                    continue
                events += [*self._close(), *self._open(piece)]
            events += self._more(piece)
        return events + self._end(choice) if choice.ended else events

    def write_ping(self, cached: int) -> Event:
        """What says that the server is there; the first event if nothing was sent yet. `cached`: tokens of
        the prompt that were found, as far as is known."""
        return next(iter(self._start(cached)), _event("ping"))

    def build_message(self, choice: Choice) -> Json:
        """The whole message of an answer that has ended."""
        usage = {**self._final_usage(choice), "service_tier": "standard"}
        return self._message(self._blocks, *self._stop(choice), usage)

    def _start(self, cached: int) -> list[Event]:
        if self._started:
            return []
        self._started = True
        usage = {**self._usage(cached, 0), "service_tier": "standard"}
        return [_event("message_start", message=self._message([], None, None, usage))]

    def _end(self, choice: Choice) -> list[Event]:
        events = self._close()
        reason, sequence = self._stop(choice)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        more: Json = {"context_management": {"applied_edits": []}} if self._of.message.reports_edits else {}
        events.append(_event("message_delta", delta=delta, usage=self._final_usage(choice), **more))
        return [*events, _event("message_stop")]

    # -- blocks -------------------------------------------------------------------------------------

    def _open(self, piece: Delta) -> list[Event]:
        self._kind = piece.kind
        if piece.kind == "content":
            shown: Json = {"type": "text", "text": ""}
        elif piece.kind == "reasoning":
            shown = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            # As its calls are named there: some clients take no other ids.
            call = f"toolu_{piece.id.removeprefix('call_')}"
            shown = {"type": "tool_use", "id": call, "name": piece.name, "input": {}}
            self._calls.append("")
        self._blocks.append(dict(shown))
        events = [_event("content_block_start", index=len(self._blocks) - 1, content_block=shown)]
        return [*events, _event("ping")] if len(self._blocks) == 1 else events

    def _more(self, piece: Delta) -> list[Event]:
        block = self._blocks[-1]
        if not piece.text:
            return []
        if piece.kind == "content":
            block["text"] += piece.text
            return [self._delta({"type": "text_delta", "text": piece.text})]
        if piece.kind == "call":
            self._calls[-1] += piece.text
            return [self._delta({"type": "input_json_delta", "partial_json": piece.text})]
        block["thinking"] += piece.text
        if self._of.message.hide_reasoning:
            return []
        return [self._delta({"type": "thinking_delta", "thinking": piece.text})]

    def _close(self) -> list[Event]:
        if not self._kind:
            return []
        block, events = self._blocks[-1], []
        if self._kind == "reasoning":
            hidden = self._of.message.hide_reasoning
            block["signature"] = encode_reasoning(block["thinking"] if hidden else "")
            block["thinking"] = "" if hidden else block["thinking"]
            events = [self._delta({"type": "signature_delta", "signature": block["signature"]})]
        elif self._kind == "call":
            block["input"] = parse_arguments(self._calls[-1])
        events.append(_event("content_block_stop", index=len(self._blocks) - 1))
        self._kind = ""
        return events

    def _delta(self, delta: Json) -> Event:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    # -- the message --------------------------------------------------------------------------------

    def _message(self, blocks: list[Json], reason: str | None, sequence: str | None, usage: Json) -> Json:
        message: Json = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._of.prepared.model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        }
        if self._of.message.reports_edits:
            message["context_management"] = {"applied_edits": []}
        return message

    def _stop(self, choice: Choice) -> tuple[str, str | None]:
        """Why the answer ended, and by which stop sequence."""
        if choice.stop is not None:
            return "stop_sequence", choice.stop
        if choice.finish_reason == "length":
            return ("model_context_window_exceeded" if self._of.limited_by_context else "max_tokens"), None
        return ("tool_use" if choice.calls else "end_turn"), None

    def _final_usage(self, choice: Choice) -> Json:
        usage = self._usage(choice.cached_tokens, choice.completion_tokens)
        return {**usage, "output_tokens_details": {"thinking_tokens": choice.reasoning_tokens}}

    def _usage(self, cached: int, output: int) -> Json:
        """The three kinds of input tokens are the whole prompt together; none costs more to keep."""
        return {
            "input_tokens": self._of.prepared.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output,
        }


def parse_arguments(text: str) -> Json:
    """The input of a call. A number that Python or JSON cannot hold stays the text that it was."""
    found = json.loads(text or "{}", parse_int=_int, parse_float=_float)
    assert isinstance(found, dict), "parsers give an object"
    return found


def _int(text: str) -> int | str:
    return int(text) if len(text) <= _LONGEST_INT else text


def _float(text: str) -> float | str:
    value = float(text)
    return value if math.isfinite(value) else text


def _event(name: str, **data: Any) -> Event:
    return name, {"type": name, **data}
