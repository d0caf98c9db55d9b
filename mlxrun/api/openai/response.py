"""Builds OpenAI's response objects from collected choices, and its error object from an exception.

Everything but `id` and `created`, which the caller passes, follows from the request and the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxrun.api.choice import AnswerToken, Choice, ToolCall
from mlxrun.api.openai.logprobs import (
    build_chat_logprobs,
    build_completion_logprobs,
    build_echoed_logprobs,
    build_prompt_logprobs,
    join_logprobs,
)
from mlxrun.api.prepared import PreparedRequest
from mlxrun.core.errors import MlxrunError, RequestError, describe_error, get_http_status

Json = dict[str, Any]


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
    of_prompt: Json = {}  # that a chat has beside its choices
    if chat and prepared.returns_token_ids:
        of_prompt["prompt_token_ids"] = list(prepared.requests[0].prompt)
    if chat and prepared.prompt_logprobs is not None:
        of_prompt["prompt_logprobs"] = build_prompt_logprobs(prepared, choices[0])
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": created,
        "model": prepared.model,
        "system_fingerprint": fingerprint,
        "choices": [_build_choice(prepared, choice) for choice in choices],
        "usage": build_usage(prepared, choices),
        **of_prompt,
        "mlxrun": {"seed": prepared.seed},
    }


def build_usage(prepared: PreparedRequest, choices: Sequence[Choice]) -> Json:
    """Token counts. A prompt counts once, and of its cached tokens only those of its first choice."""
    return _build_counts(prepared, prepared.prompt_tokens, choices)


def build_choice_usage(prepared: PreparedRequest, choice: Choice) -> Json:
    """Token counts of one choice so far, with its own prompt."""
    return _build_counts(prepared, len(prepared.requests[choice.index].prompt), [choice])


def _build_counts(prepared: PreparedRequest, prompt: int, choices: Sequence[Choice]) -> Json:
    completion = sum(choice.completion_tokens for choice in choices)
    reasoning = sum(choice.reasoning_tokens for choice in choices)
    firsts = [choice for choice in choices if choice.index % prepared.n == 0]
    left_out = sum(choice.left_out_tokens for choice in firsts)
    marks = {"left_out_tokens": left_out} if left_out else {}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in firsts), **marks},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def _build_choice(prepared: PreparedRequest, choice: Choice) -> Json:
    if prepared.kind == "chat":
        answer: Json = {"message": _build_message(choice)}
    else:
        prompts = prepared.echoed_prompts
        answer = {"text": (prompts[choice.index // prepared.n] if prompts else "") + choice.text}
    tokens = choice.get_tokens_with_logprobs()
    logprobs = build_logprobs(prepared, choice.index, tokens) if prepared.has_logprobs else None
    if prepared.echoed_offsets:
        logprobs = join_logprobs(build_echoed_logprobs(prepared, choice), logprobs)
    if prepared.prompt_logprobs is not None and prepared.kind == "completion":
        answer["prompt_logprobs"] = build_prompt_logprobs(prepared, choice)
    if prepared.returns_token_ids:
        answer |= build_prompt_ids(prepared, choice.index) | {"token_ids": list(choice.token_ids)}
    return {"index": choice.index, **answer, "logprobs": logprobs, "finish_reason": choice.finish_reason}


def build_prompt_ids(prepared: PreparedRequest, index: int) -> Json:
    """The field of a completion's choice with the ids of its prompt; a chat has them beside its choices."""
    if prepared.kind == "chat":
        return {}
    return {"prompt_token_ids": list(prepared.requests[index].prompt)}


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


def build_logprobs(prepared: PreparedRequest, index: int, tokens: Sequence[AnswerToken]) -> Json:
    """The `logprobs` of tokens of the answer with this index."""
    as_ids = prepared.writes_tokens_as_ids
    if prepared.kind == "chat":
        return build_chat_logprobs(tokens, as_ids=as_ids)
    start = len(prepared.echoed_prompts[index // prepared.n]) if prepared.echoed_prompts else 0
    return build_completion_logprobs(tokens, start, as_ids=as_ids)


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
