"""Writes answers in Ollama's format: the objects of a stream, whole answers, embeddings, and errors.

One writer makes both, so that a stream and an answer have the same text. A tool call is written once it is
complete. Durations are in nanoseconds. `load_duration` is 0, since the model is loaded before requests are
served.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxrun.api.anthropic.response import format_time
from mlxrun.api.choice import Choice, ToolCall, parse_arguments
from mlxrun.api.openai.response import build_chat_logprobs
from mlxrun.api.openai.stream import join_deltas
from mlxrun.api.parsers.delta import Delta
from mlxrun.core.errors import describe_error

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerTimes:
    """Seconds: of the whole request, of computing its prompt, and of generating its answer."""

    total: float
    prefill: float
    decode: float


class OllamaWriter:
    """Writes one answer. `model`: the name in it. `is_chat`: whether it is a message, as of /api/chat."""

    def __init__(self, model: str, prompt_tokens: int, *, is_chat: bool, has_logprobs: bool = False) -> None:
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._is_chat = is_chat
        self._has_logprobs = has_logprobs
        self._calls_begun = 0
        self._calls_written = 0
        self._logprobs_written = 0  # tokens

    def feed(self, choice: Choice, deltas: Sequence[Delta]) -> list[Json]:
        """Return the objects of these deltas. `write_last` returns the one after the answer's end."""
        lines: list[Json] = []
        for delta in join_deltas(deltas):
            if delta.kind != "call":
                lines += self._write_calls(choice.calls)
                lines.append(self._write_text(delta.kind, delta.text))
            elif delta.index == self._calls_begun:
                lines += self._write_calls(choice.calls)
                self._calls_begun += 1
        if choice.ended:
            lines += self._write_calls(choice.calls)
        if lines:
            lines[-1] |= self._take_logprobs(choice)
        return lines

    def write_ping(self) -> Json:
        """Return an object without text, for a client that waits for the prompt to be computed."""
        return self._write_text("content", "")

    def write_last(self, choice: Choice, times: AnswerTimes) -> Json:
        """Return the last object of a stream: why the answer ended, counts and durations."""
        return self._write_text("content", "") | self._take_logprobs(choice) | self._finish(choice, times)

    def build_answer(self, choice: Choice, times: AnswerTimes) -> Json:
        """Build the whole answer, as one object."""
        message = {"content": choice.content} | ({"thinking": choice.reasoning} if choice.reasoning else {})
        calls = [_describe_call(i, call) for i, call in enumerate(choice.calls)]
        found = self._write(message | ({"tool_calls": calls} if calls else {}))
        return found | self._take_logprobs(choice) | self._finish(choice, times)

    def write_load(self) -> Json:
        """Return the answer to a request without a prompt: the model is loaded."""
        return self._write({"content": ""}) | {"done": True, "done_reason": "load"}

    def _write_text(self, kind: str, text: str) -> Json:
        return self._write({"content": text} if kind == "content" else {"content": "", "thinking": text})

    def _write_calls(self, calls: Sequence[ToolCall]) -> list[Json]:
        """An object for each call that has begun, and so is complete, and was not written yet."""
        numbers = range(self._calls_written, self._calls_begun)
        self._calls_written = self._calls_begun
        return [self._write({"content": "", "tool_calls": [_describe_call(i, calls[i])]}) for i in numbers]

    def _write(self, message: Json) -> Json:
        head: Json = {"model": self._model, "created_at": format_time(time.time())}
        if self._is_chat:
            return {**head, "message": {"role": "assistant", **message}, "done": False}
        return {**head, "response": message.pop("content"), **message, "done": False}

    def _take_logprobs(self, choice: Choice) -> Json:
        """The field with the logprobs of tokens that are certain by now and were not written yet."""
        if not self._has_logprobs:
            return {}
        tokens = choice.get_tokens_with_logprobs(self._logprobs_written)
        self._logprobs_written += len(tokens)
        return {"logprobs": build_chat_logprobs(tokens)["content"]} if tokens else {}

    def _finish(self, choice: Choice, times: AnswerTimes) -> Json:
        return {
            "done": True,
            "done_reason": "length" if choice.finish_reason == "length" else "stop",
            "total_duration": count_nanoseconds(times.total),
            "load_duration": 0,
            "prompt_eval_count": self._prompt_tokens,
            "prompt_eval_duration": count_nanoseconds(times.prefill),
            "eval_count": choice.completion_tokens,
            "eval_duration": count_nanoseconds(times.decode),
        }


def _describe_call(index: int, call: ToolCall) -> Json:
    arguments = parse_arguments(call.arguments)
    return {"id": call.id, "function": {"index": index, "name": call.name, "arguments": arguments}}


def count_nanoseconds(seconds: float) -> int:
    """Return a duration in nanoseconds, at least 1: clients divide by it."""
    return max(1, round(seconds * 1e9))


def build_embeddings(model: str, vectors: Sequence[Sequence[float]], tokens: int, seconds: float) -> Json:
    """Build the response of /api/embed. Each vector gets the length 1, as in Ollama, unless all its
    numbers are 0."""
    return {
        "model": model,
        "embeddings": [_normalize(vector) for vector in vectors],
        "total_duration": count_nanoseconds(seconds),
        "load_duration": 0,
        "prompt_eval_count": tokens,
    }


def _normalize(vector: Sequence[float]) -> list[float]:
    numbers = np.asarray(vector, np.float64)
    found: list[float] = (numbers / max(float(np.linalg.norm(numbers)), 1e-12)).astype(np.float32).tolist()
    return found


def build_error(error: BaseException) -> Json:
    """Build Ollama's error object, which is also the last line of a stream that fails."""
    return {"error": describe_error(error)}
