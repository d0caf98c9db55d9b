"""Writes answers in Ollama's format, and describes the served model as /api/tags, /api/ps and /api/show do.

One writer makes both, so that a stream and an answer have the same text. A tool call is written once it is
complete. Durations are in nanoseconds. `load_duration` is 0, since the model is loaded before requests are
served. Names have a tag, as in Ollama: `:latest` where there is none. The first call for a model reads its
files.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxrun.api.anthropic.response import format_time
from mlxrun.api.choice import Choice, ToolCall, parse_arguments
from mlxrun.api.ollama.request import LATEST
from mlxrun.api.openai.response import build_chat_logprobs
from mlxrun.api.openai.stream import join_deltas
from mlxrun.api.parsers.delta import Delta
from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.model_info import ModelInfo, list_names
from mlxrun.api.text.raw_prompts import find_infill_format
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


NEVER = "9999-12-31T23:59:59Z"  # when the model is unloaded
# The names that clients look for, behind the architecture, of sizes in a model's config.
_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "vocab_size": "vocab_size",
}


def list_tags(model: ModelInfo) -> Json:
    """Build the response of /api/tags: the names of the model and of its adapters."""
    modified = {"modified_at": format_time(model.summary.modified)}
    return {"models": [_describe(name, model) | modified for name in list_names(model)]}


def list_loaded(model: ModelInfo | None) -> Json:
    """Build the response of /api/ps. None: the model is not loaded yet."""
    if model is None:
        return {"models": []}
    more = {
        "expires_at": NEVER,
        "size_vram": model.summary.weight_bytes,
        "context_length": model.context_length,
    }
    return {"models": [_describe(model.name, model) | more]}


def describe_model(context: ApiContext) -> Json:
    """Build the response of /api/show."""
    model = context.model_info
    summary, architecture = model.summary, model.summary.family or "unknown"
    renamed = {"repetition_penalty": "repeat_penalty"}
    own = {renamed.get(name, name): value for name, value in model.defaults.items()}
    values = {"num_ctx": model.context_length, **own}
    parameters = [f"{name:<30} {value:.10g}" for name, value in values.items()]
    info = {
        "general.architecture": architecture,
        "general.parameter_count": summary.num_parameters,
        f"{architecture}.context_length": model.context_length,
    }
    for name, key in _SIZES.items():
        if name in summary.sizes:
            info[f"{architecture}.{key}"] = summary.sizes[name]
    return {
        "modelfile": "\n".join([f"FROM {model.name}", *(f"PARAMETER {line}" for line in parameters)]),
        "parameters": "\n".join(parameters),
        "template": model.chat_template or "",
        "details": _describe_details(model),
        "model_info": info,
        "capabilities": list_capabilities(context),
        "modified_at": format_time(summary.modified),
    }


def list_capabilities(context: ApiContext) -> list[str]:
    """List what the model can do, in Ollama's words."""
    model = context.model_info
    generates = model.generates
    talks = generates and model.chat_template is not None
    can = {
        "completion": generates,
        "tools": talks,
        "insert": generates and find_infill_format(model) is not None,
        "vision": generates and model.vision,
        "thinking": talks and context.formats.reasoning is not None,
        "embedding": model.pooled is not None and model.pooled.task == "embed",
    }
    return [name for name, is_able in can.items() if is_able]


def _describe(name: str, model: ModelInfo) -> Json:
    has_tag = ":" in name.rpartition("/")[2]
    tagged = name if has_tag else name + LATEST
    return {
        "name": tagged,
        "model": tagged,
        "size": model.summary.weight_bytes,
        "digest": model.digests["model"],
        "details": _describe_details(model),
    }


def _describe_details(model: ModelInfo) -> Json:
    summary = model.summary
    return {
        "parent_model": "",
        "format": summary.format,
        "family": summary.family,
        "families": [summary.family],
        "parameter_size": format_count(summary.num_parameters),
        "quantization_level": summary.quantization,
        "context_length": model.context_length,
    }


def format_count(count: int) -> str:
    """Format a number of parameters as Ollama does: 494.03M, 7.6B."""
    for size, letter, digits in ((10**12, "T", 1), (10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if count >= size:
            return f"{count / size:.{digits}f}{letter}"
    return str(count)
