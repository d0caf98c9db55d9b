"""OpenAI's response objects, made of collected choices; and its error object, made of an exception.

Everything but `id` and `created`, which the caller gives, follows from the request and the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxrun.api.choice import Choice, AnswerToken, ToolCall
from mlxrun.api.prepared import PreparedRequest
from mlxrun.errors import MlxrunError, RequestError, get_http_status, describe_error

Json = dict[str, Any]

_LOWEST = -9999.0  # OpenAI's stand-in for a probability of zero, whose logarithm is not JSON


def build_response(
    prepared: PreparedRequest,
    choices: Sequence[Choice],
    request_id: str,
    created: int,
    fingerprint: str | None = None,
) -> Json:
    """The whole response of a finished request: a chat.completion or a text_completion. `fingerprint` names
    the server's config; a job has its manifest for that."""
    chat = prepared.kind == "chat"
    render = _chat_choice if chat else _completion_choice
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": prepared.model,
        "system_fingerprint": fingerprint,
        "choices": [render(prepared, choice) for choice in choices],
        "usage": build_usage(prepared, choices),
        "mlxrun": {"seed": prepared.seed},
    }


def build_usage(prepared: PreparedRequest, choices: Sequence[Choice]) -> Json:
    """Token counts; a prompt counts once, and as cached only what its first choice found in the cache."""
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


def _chat_choice(prepared: PreparedRequest, choice: Choice) -> Json:
    wanted = prepared.requests[choice.index].params.logprobs is not None
    return {
        "index": choice.index,
        "message": _message(choice),
        "logprobs": build_chat_logprobs(choice.get_tokens_with_logprobs()) if wanted else None,
        "finish_reason": choice.finish_reason,
    }


def _message(choice: Choice) -> Json:
    """OpenAI's message; a thought is under `reasoning_content`, as its open-weight peers have it."""
    message: Json = {"role": "assistant", "content": choice.content, "refusal": None}
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [build_tool_call(call) for call in choice.calls]
    return message


def build_tool_call(call: ToolCall) -> Json:
    """A tool call as messages have it."""
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _completion_choice(prepared: PreparedRequest, choice: Choice) -> Json:
    wanted = prepared.requests[choice.index].params.logprobs is not None
    echo = prepared.echoed_prompts[choice.index // prepared.n] if prepared.echoed_prompts else ""
    return {
        "index": choice.index,
        "text": echo + choice.text,
        "logprobs": build_completion_logprobs(choice.get_tokens_with_logprobs()) if wanted else None,
        "finish_reason": choice.finish_reason,
    }


def build_chat_logprobs(tokens: Sequence[AnswerToken]) -> Json:
    """The `logprobs` of a chat choice."""
    content = [
        _chat_token(t.text, t.logprob) | {"top_logprobs": [_chat_token(text, p) for text, p in t.top]}
        for t in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(text: bytes, logprob: float) -> Json:
    return {"token": _readable(text, ""), "logprob": max(logprob, _LOWEST), "bytes": list(text)}


def build_completion_logprobs(tokens: Sequence[AnswerToken]) -> Json:
    """The `logprobs` of a completion choice."""
    return {
        "tokens": [_readable(t.text, "bytes:") for t in tokens],
        "token_logprobs": [max(t.logprob, _LOWEST) for t in tokens],
        "top_logprobs": [{_readable(text, "bytes:"): max(p, _LOWEST) for text, p in t.top} for t in tokens],
        "text_offset": [t.offset for t in tokens],
    }


def _readable(text: bytes, mark: str) -> str:
    r"""A token as text, or as OpenAI writes part of a character: `\xe4\xbd`, after `mark`."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{byte:02x}" for byte in text)


def build_error(error: BaseException) -> Json:
    """OpenAI's error object. What is not meant for the user is named by its class only."""
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
