"""Writes the events of a response from the deltas of its answer, numbered and with all fields of their type.

Consecutive deltas of one kind (reasoning, content, call) are one output item. The last event has the whole
response; the same object is sent without a stream, and stored. Ids follow from the response's id. The
response has all fields that OpenAI documents, with the values that were used. A field is null if its value
was not applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxrun.api.choice import AnswerToken, Choice
from mlxrun.api.opaque_reasoning import encode_reasoning
from mlxrun.api.openai.response import build_chat_logprobs
from mlxrun.api.parsers.delta import Delta
from mlxrun.api.prepared import PreparedRequest
from mlxrun.api.responses.request import ResponseRequest
from mlxrun.api.responses.tools import ToolName, build_call_item, extract_free_text
from mlxrun.core.errors import MlxrunError, Overloaded, RequestError, describe_error

# By kind of item: the prefix of its id, the name of its events, and their field with the whole text.
_KINDS = {
    "content": ("msg", "output_text", "text"),
    "reasoning": ("rs", "reasoning_text", "text"),
    "function": ("fc", "function_call_arguments", "arguments"),
    "custom": ("ctc", "custom_tool_call_input", "input"),
}


@dataclass(slots=True)
class _OpenItem:
    """The item that is being written."""

    kind: str  # a key of _KINDS
    id: str
    call: int = -1
    name: str = ""
    call_id: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def content_index(self) -> Json:
        """A field of the events of items with content, which has one part."""
        return {"content_index": 0} if self.kind in ("content", "reasoning") else {}

    def build_part(self) -> Json:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        logprobs = list(self.logprobs)
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": logprobs}


class ResponseWriter:
    """Writes the events of one response. `response`: its current body. `choice`: must be set before `feed`.
    The method that is called first also returns the first events."""

    def __init__(self, response: Json, request: ResponseRequest, prepared: PreparedRequest) -> None:
        self.response = response
        self.choice: Choice | None = None
        self._request = request
        self._prepared = prepared
        self._started = False
        self._token = response["id"].removeprefix("resp_")
        self._output: list[Json] = []
        self._open: _OpenItem | None = None
        self._next_number = 0  # of events
        self._num_logprobs = 0  # tokens with logprobs that were taken from the choice
        self._pending: list[AnswerToken] = []  # of these, the tokens that no delta came of yet
        self._num_texts = 0  # increments of the text that were taken from the choice
        self._num_deltas = 0  # that were written
        self._position = 0  # the end of the last delta in the text
        self._unread = ""  # the text behind it

    def queue(self) -> list[Json]:
        """Return the first events of a response that waits in the background."""
        self.response = {**self.response, "status": "queued"}
        return [self._write_response("created"), self._write_response("queued")]

    def start(self) -> list[Json]:
        """Return the events before the first delta; none at a second call."""
        if self._started:
            return []
        self._started = True
        self.response = {**self.response, "status": "in_progress"}
        created = [] if self._next_number else [self._write_response("created")]
        return [*created, self._write_response("in_progress")]

    def feed(self, deltas: Sequence[Delta]) -> list[Json]:
        """Return the events of these deltas."""
        events = self.start()
        for delta in deltas:
            if self._begins_item(delta):
                events += self._close_item("completed")
                events += self._open_item(delta)
            if delta.text:
                events += self._extend_item(delta.text)
            self._num_deltas += 1
        return events

    def end(self, now: int) -> list[Json]:
        """Return the events after the last delta. `now`: seconds since 1970."""
        assert self.choice is not None
        if self.choice.finish_reason == "abort":
            return self.cancel()
        events = self.start()
        if self.choice.finish_reason == "length":
            reason = {"reason": "max_output_tokens"}
            return events + self._finish("incomplete", "incomplete", incomplete_details=reason)
        if self._open is None and not self._output:
            events += self._open_item(Delta("content"))  # an empty answer has a message too
        return events + self._finish("completed", "completed", completed_at=now)

    def cancel(self) -> list[Json]:
        """Return the events of a response that is cancelled."""
        return self.start() + self._finish("cancelled", "incomplete")

    def fail(self, error: BaseException) -> list[Json]:
        """Return the events of a response that fails."""
        return self.start() + self._finish("failed", "incomplete", error=build_error(error))

    def _finish(self, status: str, item_status: str, **fields: Any) -> list[Json]:
        events = self._close_item(item_status)
        usage = None if self.choice is None else build_usage(self._prepared, self.choice)
        self.response = {**self.response, "status": status, "output": self._output, "usage": usage, **fields}
        return [*events, self._write_response(status)]

    # Events.

    def _write_event(self, name: str, **fields: Any) -> Json:
        number, self._next_number = self._next_number, self._next_number + 1
        return {"type": f"response.{name}", "sequence_number": number, **fields}

    def _write_response(self, name: str) -> Json:
        return self._write_event(name, response=self.response)

    def _write_item_event(self, name: str, **fields: Any) -> Json:
        """An event about the open item."""
        assert self._open is not None
        return self._write_event(name, item_id=self._open.id, output_index=len(self._output), **fields)

    # Items.

    def _begins_item(self, delta: Delta) -> bool:
        item = self._open
        if delta.kind == "call":
            return item is None or item.call != delta.index
        return bool(delta.text) and (item is None or item.kind != delta.kind)

    def _open_item(self, delta: Delta) -> list[Json]:
        kind: str = delta.kind
        if delta.kind == "call":
            kind = self._request.tools.by_name.get(delta.name, ToolName("function", delta.name)).kind
        item_id = f"{_KINDS[kind][0]}_{self._token}{len(self._output):02d}"
        call = delta.index if delta.kind == "call" else -1
        item = self._open = _OpenItem(kind, item_id, call, delta.name, delta.id)
        added = self._build_item(item, "in_progress")
        events = [self._write_event("output_item.added", output_index=len(self._output), item=added)]
        if item.content_index:
            part = item.build_part()
            events.append(self._write_item_event("content_part.added", content_index=0, part=part))
        return events

    def _extend_item(self, text: str) -> list[Json]:
        item = self._open
        assert item is not None
        item.texts.append(text)
        if item.kind == "custom":
            return []  # its input is known once the JSON is complete
        fields: Json = {**item.content_index, "delta": text}
        if item.kind == "content":
            fields["logprobs"] = self._take_logprobs(text) if self._request.logprobs else []
            item.logprobs += fields["logprobs"]
        return [self._write_item_event(f"{_KINDS[item.kind][1]}.delta", **fields)]

    def _close_item(self, status: str) -> list[Json]:
        item = self._open
        if item is None:
            return []
        events = []
        _, name, text_field = _KINDS[item.kind]
        text = item.text
        if item.kind == "custom":
            text = extract_free_text(text)
            events.append(self._write_item_event(f"{name}.delta", delta=text))
        fields = {**item.content_index, text_field: text}
        if item.kind == "content":
            fields["logprobs"] = item.logprobs
        events.append(self._write_item_event(f"{name}.done", **fields))
        if item.content_index:
            part = item.build_part()
            events.append(self._write_item_event("content_part.done", content_index=0, part=part))
        done = self._build_item(item, status)
        events.append(self._write_event("output_item.done", output_index=len(self._output), item=done))
        self._output.append(done)
        self._open = None
        return events

    def _build_item(self, item: _OpenItem, status: str) -> Json:
        head = {"id": item.id, "status": status}
        begun = status == "in_progress"
        content = [] if begun else [item.build_part()]
        if item.kind == "content":
            return head | {"type": "message", "role": "assistant", "content": content}
        if item.kind == "reasoning":
            reasoning: Json = head | {"type": "reasoning", "summary": [], "content": content}
            if self._request.encrypted:
                reasoning["encrypted_content"] = None if begun else encode_reasoning(item.text)
            return reasoning
        return head | build_call_item(item.name, item.call_id, item.text, self._request.tools)

    def _take_logprobs(self, text: str) -> list[Json]:
        """The logprobs of a delta's tokens, found by its position in what the model wrote since the delta
        before. One that begins an item is at the end, as only markers precede it, unless another delta came
        with it. Searching the whole answer for every delta would be quadratic."""
        assert self.choice is not None and self._open is not None
        tokens = self.choice.get_tokens_with_logprobs(self._num_logprobs)
        self._num_logprobs += len(tokens)
        self._pending += tokens
        texts = self.choice.get_text_deltas(self._num_texts)
        self._num_texts += len(texts)
        self._unread += "".join(texts)
        end, *later = self.choice.delta_ends[self._num_deltas : self._num_deltas + 2]
        find = str.rfind if len(self._open.texts) == 1 and end not in later else str.find
        at = find(self._unread, text, 0, end - self._position)
        if at < 0:
            return []
        start, end = self._position + at, self._position + at + len(text)
        self._position, self._unread = end, self._unread[at + len(text) :]
        found = [token for token in self._pending if start <= token.offset < end]
        self._pending = [token for token in self._pending if token.offset >= end]
        logprobs: list[Json] = build_chat_logprobs(found)["content"]
        return logprobs


Json = dict[str, Any]


def build_response(
    response_id: str, created: int, request: ResponseRequest, prepared: PreparedRequest
) -> Json:
    """Build the response when its answer begins. `created`: seconds since 1970. Its field
    `mlxrun.dropped_items` says how many items the prompt lost by `truncation: auto`."""
    dropped = {"dropped_items": request.num_dropped} if request.truncates else {}
    given, params = request.given, prepared.requests[0].params
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": request.background,
        "completed_at": None,
        "conversation": None if request.conversation is None else {"id": request.conversation},
        "error": None,
        "incomplete_details": None,
        "instructions": given.get("instructions"),
        "max_output_tokens": given.get("max_output_tokens"),
        "max_tool_calls": given.get("max_tool_calls"),
        "model": prepared.model,
        "output": [],
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "previous_response_id": given.get("previous_response_id"),
        "prompt_cache_key": given.get("prompt_cache_key"),
        "reasoning": {"effort": request.effort, "summary": None},
        "safety_identifier": given.get("safety_identifier"),
        "service_tier": "default",
        "store": request.stored,
        "temperature": params.temperature,
        "text": {
            "format": (given.get("text") or {}).get("format") or {"type": "text"},
            "verbosity": "medium",
        },
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": request.tools.echo,
        "top_logprobs": given.get("top_logprobs", 0),
        "top_p": params.top_p,
        "truncation": given.get("truncation", "disabled"),
        "usage": None,
        "user": given.get("user"),
        "metadata": given.get("metadata", {}),
        "mlxrun": {"seed": prepared.seed} | dropped,
    }


def build_usage(prepared: PreparedRequest, choice: Choice) -> Json:
    """Build the `usage`, in tokens. `cache_write_tokens` is 0, as writes to the prefix cache cost nothing."""
    prompt, details = prepared.prompt_tokens, {"cached_tokens": choice.cached_tokens, "cache_write_tokens": 0}
    if choice.left_out_tokens:
        details["left_out_tokens"] = choice.left_out_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": details,
        "output_tokens": choice.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
        "total_tokens": prompt + choice.completion_tokens,
    }


def build_error(error: BaseException) -> Json:
    """Build a response's `error`. Its code is one of OpenAI's, or one that OpenAI's clients look for."""
    code = "server_error"
    if isinstance(error, Overloaded):
        code = "rate_limit_exceeded"
    elif isinstance(error, RequestError):
        code = error.code if error.code != MlxrunError.code else "invalid_prompt"
    return {"code": code, "message": describe_error(error)}
