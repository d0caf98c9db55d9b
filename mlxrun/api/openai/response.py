"""Builds OpenAI's response objects from collected choices, and its error object from an exception.

Everything but `id` and `created`, which the caller passes, follows from the request and the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxrun.api.choice import AnswerToken, Choice, ToolCall
from mlxrun.api.prepared import PreparedRequest
from mlxrun.errors import MlxrunError, RequestError, describe_error, get_http_status

Json = dict[str, Any]

_LOWEST = -9999.0  # OpenAI's value for a probability of zero, whose logarithm is not JSON


def build_response(
    prepared: PreparedRequest,
    choices: Sequence[Choice],
    request_id: str,
    created: int,
    fingerprint: str | None = None,
) -> Json:
    """The response of a finished request: a chat.completion or a text_completion. `fingerprint` identifies
    the server's config; jobs have a manifest instead."""
    chat = prepared.kind == "chat"
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": prepared.model,
        "system_fingerprint": fingerprint,
        "choices": [_build_choice(prepared, choice) for choice in choices],
        "usage": build_usage(prepared, choices),
        "mlxrun": {"seed": prepared.seed},
    }


def build_usage(prepared: PreparedRequest, choices: Sequence[Choice]) -> Json:
    """Token counts. A prompt counts once, and of its cached tokens only those of its first choice."""
    prompt = prepared.prompt_tokens
    completion = sum(choice.completion_tokens for choice in choices)
    reasoning = sum(choice.reasoning_tokens for choice in choices)
    cached = sum(choice.cached_tokens for choice in choices if choice.index % prepared.n == 0)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def _build_choice(prepared: PreparedRequest, choice: Choice) -> Json:
    if prepared.kind == "chat":
        answer: Json = {"message": _build_message(choice)}
    else:
        prompts = prepared.echoed_prompts
        answer = {"text": (prompts[choice.index // prepared.n] if prompts else "") + choice.text}
    tokens = choice.get_tokens_with_logprobs()
    logprobs = build_logprobs(prepared, tokens) if prepared.has_logprobs else None
    return {"index": choice.index, **answer, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def _build_message(choice: Choice) -> Json:
    """OpenAI's message; reasoning is in `reasoning_content`, as in vLLM."""
    message: Json = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [build_tool_call(call) for call in choice.calls]
    return message


def build_tool_call(call: ToolCall) -> Json:
    """A tool call of a message."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def build_logprobs(prepared: PreparedRequest, tokens: Sequence[AnswerToken]) -> Json:
    """The `logprobs` of a choice."""
    return build_chat_logprobs(tokens) if prepared.kind == "chat" else _build_completion_logprobs(tokens)


def build_chat_logprobs(tokens: Sequence[AnswerToken]) -> Json:
    content = []
    for token in tokens:
        top = [_build_chat_token(text, logprob) for text, logprob in token.top]
        content.append(_build_chat_token(token.text, token.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _build_chat_token(text: bytes, logprob: float) -> Json:
    return {"token": _format_bytes(text, mark=""), "logprob": max(logprob, _LOWEST), "bytes": list(text)}


def _build_completion_logprobs(tokens: Sequence[AnswerToken]) -> Json:
    return {
        "tokens": [_format_bytes(token.text) for token in tokens],
        "token_logprobs": [max(token.logprob, _LOWEST) for token in tokens],
        "top_logprobs": [{_format_bytes(text): max(p, _LOWEST) for text, p in token.top} for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _format_bytes(text: bytes, mark: str = "bytes:") -> str:
    r"""A token as text; part of a character as OpenAI writes it: `\xe4\xbd`, after `mark`."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in text)


def build_error(error: BaseException) -> Json:
    """OpenAI's error object. Errors that are not meant for users are named by their class only."""
    status = get_http_status(error)
    kinds = {403: "permission_error", 429: "rate_limit_error"}
    usual = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {
        "error": {
            "message": describe_error(error),
            "type": kinds.get(status, usual),
            "param": error.param if isinstance(error, RequestError) else None,
            "code": error.code if isinstance(error, MlxrunError) else "internal_error",
        }
    }
