"""vLLM's tokenize and detokenize: what the engine would get of a prompt, and the text of token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlxrun.api.openai.fields import DETOKENIZE, TOKENIZE
from mlxrun.api.openai.request import chat_prompt_of, check_model, offered
from mlxrun.server.request_body import json_reply, read_json
from mlxrun.server.surface import Endpoint, Surface
from mlxrun.text.continuation import BEGIN, CONTINUE
from mlxrun.text.field_errors import bad, need
from mlxrun.text.prompt import check_text
from mlxrun.text.template import Places
from mlxrun.text.tokens import tokenise

if TYPE_CHECKING:
    from aiohttp import web

    from mlxrun.server.state import Server
    from mlxrun.text.model_info import ModelInfo


async def tokenize(request: web.Request, server: Server) -> web.Response:
    """`{"prompt"}` or `{"messages"}` to `{"count", "max_model_len", "tokens"}`; images count as they will."""
    given = TOKENIZE.check(await read_json(request, server))
    check_model(given.get("model"), server.host)
    if ("prompt" in given) == ("messages" in given):
        raise bad("prompt", "give either prompt or messages", code="missing_field")
    if "messages" in given:
        if given.get("add_special_tokens"):
            raise bad("add_special_tokens", "the chat template writes them into messages; leave it out")
        ids = (await chat_prompt_of(given, offered(given), server.side)).ids
    else:
        ids = await asyncio.to_thread(_raw, given, server.host)
    body: dict[str, Any] = {"count": len(ids), "max_model_len": server.host.context_length, "tokens": ids}
    if given.get("return_token_strs"):
        body["token_strs"] = await asyncio.to_thread(server.host.tokenizer.convert_ids_to_tokens, list(ids))
    return json_reply(body)


def _raw(given: Mapping[str, Any], host: ModelInfo) -> tuple[int, ...]:
    for name in ("tools", "tool_choice", "reasoning_effort", "chat_template_kwargs"):
        if name in given:
            raise bad(name, "goes with messages, not with prompt")
    for name, harmless in ((BEGIN, True), (CONTINUE, False)):
        if given.get(name, harmless) is not harmless:
            raise bad(name, "goes with messages, not with prompt")
    check_text(given["prompt"], "prompt", Places())
    return tokenise(host, given["prompt"], special=given.get("add_special_tokens", True)).ids


async def detokenize(request: web.Request, server: Server) -> web.Response:
    """`{"tokens"}` to `{"prompt"}`, special tokens included."""
    given = DETOKENIZE.check(await read_json(request, server))
    check_model(given.get("model"), server.host)
    if "tokens" not in given:
        raise bad("tokens", "missing", code="missing_field")
    return json_reply({"prompt": await asyncio.to_thread(_text, given["tokens"], server.host)})


def _text(ids: list[int], host: ModelInfo) -> str:
    size = len(host.tokenizer)
    for i, token in enumerate(ids):
        if not 0 <= need(token, int, f"tokens[{i}]") < size:
            raise bad(f"tokens[{i}]", f"{token} is not a token id; the vocabulary has {size}")
    text = host.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text)


SURFACE = Surface(
    "tokenize",
    tuple(
        Endpoint("POST", f"{prefix}/{name}", handler, summary, body.schema)
        for prefix in ("", "/v1")
        for name, handler, summary, body in (
            ("tokenize", tokenize, "Count a prompt's tokens", TOKENIZE),
            ("detokenize", detokenize, "The text of token ids", DETOKENIZE),
        )
    ),
)
