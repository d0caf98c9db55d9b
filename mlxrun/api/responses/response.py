"""Builds the response object of /v1/responses.

It has all documented fields with the values that were used: what was requested but not applied is null.
"""

from __future__ import annotations

from typing import Any

from mlxrun.api.choice import Choice
from mlxrun.api.prepared import PreparedRequest
from mlxrun.api.responses.request import ResponseRequest
from mlxrun.core.errors import MlxrunError, Overloaded, RequestError, describe_error

Json = dict[str, Any]


def build_response(
    response_id: str, created: int, request: ResponseRequest, prepared: PreparedRequest
) -> Json:
    """The response when its answer begins. `mlxrun.dropped_items`: how many items `truncation: auto` has left
    out of the prompt."""
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
    """Token counts. Tokens that are written to the prefix cache are not counted, as they cost nothing."""
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
    """A response's `error`. The code is one of OpenAI's, or one that its clients look for."""
    code = "server_error"
    if isinstance(error, Overloaded):
        code = "rate_limit_exceeded"
    elif isinstance(error, RequestError):
        code = error.code if error.code != MlxrunError.code else "invalid_prompt"
    return {"code": code, "message": describe_error(error)}
