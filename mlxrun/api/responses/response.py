"""The response object of /v1/responses, in every state it can be in.

All documented fields are there, as they were used: what was asked for and not applied is null. Ids follow
from the response's own, so that the same answer gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxrun.api.choice import Choice, AnswerToken
from mlxrun.api.openai.response import build_chat_logprobs, build_error
from mlxrun.api.prepared import PreparedRequest
from mlxrun.api.responses.request import ResponseRequest
from mlxrun.errors import MlxrunError, Overloaded, RequestError

Json = dict[str, Any]


def build_response(response_id: str, created: int, asked: ResponseRequest, prepared: PreparedRequest) -> Json:
    """The response as it is when its answer begins."""
    given, params = asked.given, prepared.requests[0].params
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
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
        "reasoning": {"effort": asked.effort, "summary": None},
        "safety_identifier": given.get("safety_identifier"),
        "service_tier": "default",
        "store": asked.stored,
        "temperature": params.temperature,
        "text": {
            "format": (given.get("text") or {}).get("format") or {"type": "text"},
            "verbosity": "medium",
        },
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": asked.tools.echo,
        "top_logprobs": given.get("top_logprobs", 0),
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": given.get("user"),
        "metadata": given.get("metadata", {}),
        "mlxrun": {"seed": prepared.seed},
    }


def build_usage(prepared: PreparedRequest, choice: Choice) -> Json:
    """Token counts. What the prefix cache takes in is not counted, as nobody pays for it."""
    prompt = prepared.prompt_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": choice.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": choice.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
        "total_tokens": prompt + choice.completion_tokens,
    }


def build_logprobs(tokens: Sequence[AnswerToken]) -> list[Json]:
    """The `logprobs` of a text."""
    content: list[Json] = build_chat_logprobs(tokens)["content"]
    return content


def build_error(error: BaseException) -> Json:
    """A response's `error`. The code is one of the original's, or what its clients look for."""
    code = "server_error"
    if isinstance(error, Overloaded):
        code = "rate_limit_exceeded"
    elif isinstance(error, RequestError):
        code = error.code if error.code != MlxrunError.code else "invalid_prompt"
    return {"code": code, "message": build_error(error)["error"]["message"]}
