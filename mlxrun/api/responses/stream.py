"""A response as it grows: pieces of an answer in, typed events out, each numbered and with the fields of its
type alone.

Each run of pieces of one kind (thought, text, call) is one output item, in the order in which the model wrote
them. The last event has the whole response, which is also what is sent without a stream, and stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxrun.api.choice import Choice, AnswerToken
from mlxrun.api.opaque_reasoning import encode_reasoning
from mlxrun.api.prepared import PreparedRequest
from mlxrun.api.responses.request import ResponseRequest
from mlxrun.api.responses.response import Json, build_error, build_logprobs, build_usage
from mlxrun.api.responses.tools import ToolName, build_call_item, extract_free_text
from mlxrun.parsers.delta import Delta

_PREFIX = {"text": "msg", "reasoning": "rs", "function": "fc", "custom": "ctc"}


@dataclass(slots=True)
class _OpenItem:
    """The item that is being written."""

    kind: str  # text, reasoning, function or custom
    id: str
    call: int = -1
    name: str = ""
    call_id: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class ResponseWriter:
    """Makes the events of one response; `response` is its body so far. `choice` is to be set once there is
    one, before its pieces are fed. The first events of all come with those of whatever is called first."""

    def __init__(self, response: Json, asked: ResponseRequest, prepared: PreparedRequest) -> None:
        self.response = response
        self.choice: Choice | None = None
        self._asked = asked
        self._prepared = prepared
        self._started = False
        self._token = response["id"].removeprefix("resp_")
        self._output: list[Json] = []
        self._open: _OpenItem | None = None
        self._number = 0  # of the next event
        self._seen = 0  # tokens with logprobs that were taken from the choice
        self._pending: list[AnswerToken] = []  # of these, no piece has come of yet
        self._parts = 0  # pieces of what the model wrote that were taken from the choice
        self._read = 0  # where the last piece ended in all that the model wrote
        self._rest = ""  # what it wrote behind that

    def start(self) -> list[Json]:
        """The events before the first piece; none if they were given."""
        if self._started:
            return []
        self._started = True
        return [self._whole("response.created"), self._whole("response.in_progress")]

    def feed(self, pieces: Sequence[Delta]) -> list[Json]:
        """The events of these pieces."""
        events = self.start()
        for at, piece in enumerate(pieces, 1):
            if self._begins(piece):
                events += self._close("completed")
                events += self._begin(piece)
            if piece.text:
                events += self._add(piece.text, at == len(pieces))
        return events

    def end(self, now: int) -> list[Json]:
        """The events once the answer has ended. `now` in seconds of Unix time."""
        assert self.choice is not None
        if self.choice.finish_reason == "abort":
            return self.cancel()
        cut = self.choice.finish_reason == "length"
        events = self.start()
        if self._open is None and not self._output and not cut:
            events += self._begin_item(_OpenItem("text", self._id("text")))  # an answer has a message, if empty
        events += self._close("incomplete" if cut else "completed")
        if cut:
            self._finish("incomplete", incomplete_details={"reason": "max_output_tokens"})
            return [*events, self._whole("response.incomplete")]
        self._finish("completed", completed_at=now)
        return [*events, self._whole("response.completed")]

    def cancel(self) -> list[Json]:
        """The events if somebody asked for the end."""
        events = self.start() + self._close("incomplete")
        self._finish("cancelled")
        return [*events, self._whole("response.cancelled")]

    def fail(self, error: BaseException) -> list[Json]:
        """The events if the answer cannot be ended."""
        events = self.start() + self._close("incomplete")
        self._finish("failed", error=build_error(error))
        return [*events, self._whole("response.failed")]

    def _finish(self, status: str, **fields: Any) -> None:
        counts = None if self.choice is None else build_usage(self._prepared, self.choice)
        self.response = {**self.response, "status": status, "output": self._output, "usage": counts, **fields}

    # Events.

    def _event(self, of: str, **fields: Any) -> Json:
        number, self._number = self._number, self._number + 1
        return {"type": of, "sequence_number": number, **fields}

    def _whole(self, of: str) -> Json:
        return self._event(of, response=self.response)

    def _of(self, of: str, **fields: Any) -> Json:
        """An event about the open item."""
        assert self._open is not None
        return self._event(of, item_id=self._open.id, output_index=len(self._output), **fields)

    # Items.

    def _id(self, kind: str) -> str:
        return f"{_PREFIX[kind]}_{self._token}{len(self._output):02d}"

    def _begins(self, piece: Delta) -> bool:
        """Whether a piece is the first of an item."""
        now = self._open
        if piece.kind == "call":
            return now is None or now.call != piece.index
        return bool(piece.text) and (now is None or now.kind != piece.kind)

    def _begin(self, piece: Delta) -> list[Json]:
        if piece.kind != "call":
            return self._begin_item(_OpenItem(piece.kind, self._id(piece.kind)))
        kind = self._asked.tools.by_name.get(piece.name, ToolName("function", piece.name)).kind
        return self._begin_item(_OpenItem(kind, self._id(kind), piece.index, piece.name, piece.id))

    def _begin_item(self, item: _OpenItem) -> list[Json]:
        self._open = item
        added = self._event(
            "response.output_item.added",
            output_index=len(self._output),
            item=self._item(item, "in_progress"),
        )
        if item.kind not in ("content", "reasoning"):
            return [added]
        part = _part(item.kind, "", [])
        return [added, self._of("response.content_part.added", content_index=0, part=part)]

    def _add(self, text: str, last: bool) -> list[Json]:
        item = self._open
        assert item is not None
        item.pieces.append(text)
        match item.kind:
            case "text":
                found = self._logprobs(text, last) if self._asked.logprobs else []
                item.logprobs += found
                return [self._of("response.output_text.delta", content_index=0, delta=text, logprobs=found)]
            case "reasoning":
                return [self._of("response.reasoning_text.delta", content_index=0, delta=text)]
            case "function":
                return [self._of("response.function_call_arguments.delta", delta=text)]
        return []  # a custom tool's input is known once its JSON is whole

    def _close(self, status: str) -> list[Json]:
        item = self._open
        if item is None:
            return []
        found = item.logprobs
        done = self._item(item, status)
        match item.kind:
            case "text":
                events = [
                    self._of("response.output_text.done", content_index=0, text=item.text, logprobs=found)
                ]
            case "reasoning":
                events = [self._of("response.reasoning_text.done", content_index=0, text=item.text)]
            case "function":
                arguments = item.text
                events = [self._of("response.function_call_arguments.done", arguments=arguments)]
            case _:
                given = extract_free_text(item.text)
                events = [self._of("response.custom_tool_call_input.delta", delta=given)]
                events.append(self._of("response.custom_tool_call_input.done", input=given))
        if item.kind in ("content", "reasoning"):
            part = _part(item.kind, item.text, found)
            events.append(self._of("response.content_part.done", content_index=0, part=part))
        events.append(
            self._event("response.output_item.done", output_index=len(self._output), item=done),
        )
        self._output.append(done)
        self._open = None
        return events

    def _item(self, item: _OpenItem, status: str) -> Json:
        head = {"id": item.id, "status": status}
        begun = status == "in_progress"
        if item.kind == "content":
            content = [] if begun else [_part("text", item.text, item.logprobs)]
            return head | {"type": "message", "role": "assistant", "content": content}
        if item.kind == "reasoning":
            content = [] if begun else [_part("reasoning", item.text, [])]
            thought: Json = head | {"type": "reasoning", "summary": [], "content": content}
            if self._asked.encrypted:
                thought["encrypted_content"] = None if begun else encode_reasoning(item.text)
            return thought
        return head | build_call_item(item.name, item.call_id, item.text, self._asked.tools)

    def _logprobs(self, text: str, last: bool) -> list[Json]:
        """Of the tokens of a piece of text. They are found by where it is in what the model wrote since the
        piece before: at the end if it is the last piece so far, as only markers stand before it. Only that
        much is looked at: the whole answer for every piece would be quadratic."""
        assert self.choice is not None
        logged = self.choice.get_tokens_with_logprobs(self._seen)
        self._seen += len(logged)
        self._pending += logged
        parts = self.choice.get_text_deltas(self._parts)
        self._parts += len(parts)
        self._rest += "".join(parts)
        at = self._rest.rfind(text) if last else self._rest.find(text)
        if at < 0:
            return []
        start, end = self._read + at, self._read + at + len(text)
        self._read, self._rest = end, self._rest[at + len(text) :]
        mine = [token for token in self._pending if start <= token.offset < end]
        self._pending = [token for token in self._pending if token.offset >= end]
        return build_logprobs(mine)


def _part(kind: str, text: str, found: list[Json]) -> Json:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": found}
