"""The beginning of a prompt that other requests of the same client share: its system prompt and its tools.

A client's whole body is read as its endpoint reads it. The prefix ends at the first cache position of the
prompt, where a prompt with another question diverges (api/text/prompt.py). So it is a true prefix of both,
whatever template and tokenizer do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlxrun.api.anthropic.fields import MESSAGES
from mlxrun.api.anthropic.request import prepare_message
from mlxrun.api.openai.fields import CHAT_URL
from mlxrun.api.openai.request import prepare_request
from mlxrun.api.prepared import ApiContext, PreparedRequest
from mlxrun.api.responses.request import ResponseLookup, prepare_response
from mlxrun.api.text.prompt import MIN_TOKENS
from mlxrun.core.errors import RequestError
from mlxrun.core.field_errors import reject_choice
from mlxrun.core.request import Request

RESPONSES_URL = "/v1/responses"
PREFIX_URLS = (CHAT_URL, RESPONSES_URL, MESSAGES)


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """`prepared`: a request without an answer, whose prompt has one token more than the prefix. `tokens`: of
    the prefix."""

    prepared: PreparedRequest
    tokens: int

    @property
    def request(self) -> Request:
        return self.prepared.requests[0]


def guess_url(body: Mapping[str, Any]) -> str:
    """Guess the endpoint of a body: of Responses by `input`, of Anthropic's by its forms of system prompt and
    tools."""
    if "input" in body:
        return RESPONSES_URL
    tools = body.get("tools")
    first = tools[0] if isinstance(tools, list) and tools else None
    is_message = "system" in body or (isinstance(first, dict) and "input_schema" in first)
    return MESSAGES if is_message else CHAT_URL


async def prepare_prefix(url: str, body: Any, context: ApiContext, token: str) -> PromptPrefix:
    """Build the request that computes the prefix of a body. `token`: makes new ids. RequestError if the body
    is refused, or has nothing that another question would share."""
    prepared = await _prepare_body(url, body, context, token)
    request = prepared.requests[0]
    if not request.cache_positions:
        raise RequestError(
            f"a prompt with another question would share less than {MIN_TOKENS} tokens with this one: there "
            "are no system prompt and no tools, or the chat template writes them behind the question"
        )
    tokens = request.cache_positions[0]
    if any(start < tokens for start, _ in request.image_spans):
        raise RequestError(
            "the prompt has an image before its first question, which cannot be prefilled ahead"
        )
    alone = replace(
        request,
        prompt=request.prompt[: tokens + 1],
        params=replace(request.params, max_tokens=0, prompt_logprobs=None, logprobs=None),
        image_spans=(),
        media=None,
        image_digests=(),
        cache_positions=(),
        grammar=None,
        sparse=False,
    )
    return PromptPrefix(replace(prepared, requests=(alone,), n=1, stream=False), tokens)


async def _prepare_body(url: str, body: Any, context: ApiContext, token: str) -> PreparedRequest:
    if url == CHAT_URL:
        return await prepare_request(url, body, context, stream=True)
    if url == MESSAGES:
        return (await prepare_message(body, context, interleaved=True)).prepared
    if url == RESPONSES_URL:
        return (await prepare_response(body, context, ResponseLookup(), token, stream=True))[1]
    reject_choice("url", url, PREFIX_URLS)
