"""Reads the text to be scored from a response body of any endpoint. Reasoning is never part of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from mlxrun.core.limited_json import load_json

_CALLS = ("function_call", "custom_tool_call", "tool_use")  # items of responses, blocks of messages
_REASONING = ("reasoning", "thinking", "redacted_thinking")  # items of responses, blocks of messages
REASONING_FIELDS = ("reasoning_content", "reasoning")  # of a chat's message
_VECTORS = ("data", "results")  # of embeddings and reranking
_CUT = ("max_tokens", "model_context_window_exceeded")  # Anthropic's reasons


def extract_answer(body: Mapping[str, Any]) -> str:
    """Extract the text to be scored of the first choice of a response body."""
    return extract_answers(body)[0]


def extract_answers(body: Mapping[str, Any]) -> list[str]:
    """Extract the text to be scored of each choice of a response body. A response or a message has one
    choice. The text is the content without reasoning, and each tool call as an object `{"name", "arguments"}`
    on a line. For embeddings and reranking it is their JSON."""
    for name in _VECTORS:
        if name in body:
            return [json.dumps(body[name])]
    if isinstance(body.get("text"), str):  # of a transcript; a response has its format there
        return [body["text"]]
    if "choices" in body:
        return [_extract_choice(choice) for choice in body["choices"]]
    parts = list(_list_parts(body))
    texts = [part["text"] for part in parts if part["type"] in ("text", "output_text")]
    return [_join("".join(texts) if texts else None, [part for part in parts if part["type"] in _CALLS])]


def _extract_choice(choice: Mapping[str, Any]) -> str:
    message = choice.get("message") or {}
    text = message.get("content") if message else choice.get("text")
    return _join(text, [call["function"] for call in message.get("tool_calls") or ()])


def _join(text: Any, calls: Sequence[Mapping[str, Any]]) -> str:
    lines = [json.dumps(_parse_arguments(call), ensure_ascii=False) for call in calls]
    return "\n".join([text, *lines] if isinstance(text, str) else lines)


def strip_reasoning(body: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a response body without reasoning. A choice with reasoning loses its logprobs and token ids too,
    as they include those of the reasoning."""
    if any(name in body for name in _VECTORS) or isinstance(body.get("text"), str):
        return dict(body)
    if "choices" in body:
        return {**body, "choices": [_strip_choice(choice) for choice in body["choices"]]}
    name = "output" if "output" in body else "content"
    return {**body, name: [part for part in body[name] if part["type"] not in _REASONING]}


def _strip_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or {}
    if not any(message.get(name) for name in REASONING_FIELDS):
        return dict(choice)
    kept = {key: value for key, value in choice.items() if key not in ("logprobs", "token_ids")}
    return {**kept, "message": {key: message[key] for key in message if key not in REASONING_FIELDS}}


def _list_parts(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The parts of a Responses body (`output`) or of an Anthropic message (`content`)."""
    for item in body["output"] if "output" in body else body["content"]:
        yield from item["content"] if item["type"] == "message" else [item]


def is_cut(body: Mapping[str, Any]) -> bool:
    """Whether the first choice of a response body was cut by its limit of tokens. A request for no tokens,
    which scores its prompt, has no answer to be cut."""
    if "choices" in body:
        nothing = (body.get("usage") or {}).get("completion_tokens") == 0
        return bool(body["choices"][0].get("finish_reason") == "length") and not nothing
    details = body.get("incomplete_details") or {}
    return body.get("stop_reason") in _CUT or details.get("reason") == "max_output_tokens"


def _parse_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if "input" in call:  # an object, or the text for a custom tool
        return {"name": call["name"], "arguments": call["input"]}
    arguments = call["arguments"]
    with suppress(ValueError):  # the answer ended within the call, or is no JSON that can be read
        arguments = load_json(arguments)
    return {"name": call["name"], "arguments": arguments}
