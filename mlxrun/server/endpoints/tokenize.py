"""vLLM's tokenize, detokenize and tokenizer_info.

They return the token ids that the engine would get for a prompt, and the text of token ids. Clients that
write prompts themselves get the special tokens and the chat template.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from mlxrun.api.openai.fields import DETOKENIZE, TOKENIZE
from mlxrun.api.openai.reasoning import resolve_reasoning_fields
from mlxrun.api.openai.request import prepare_chat_prompt
from mlxrun.api.text.continuation import ADD_GENERATION_PROMPT, CONTINUE_FINAL_MESSAGE
from mlxrun.api.text.model_info import ModelInfo, choose_adapter
from mlxrun.api.text.prompt import check_text
from mlxrun.api.text.templates.template import ImageMarkers
from mlxrun.api.text.tokens.tokens import tokenize
from mlxrun.api.text.tools import read_offered_tools
from mlxrun.core.field_errors import check_given, check_type, reject
from mlxrun.core.workers import run_on_text
from mlxrun.server.batches.queue_access import read_body_with_files
from mlxrun.server.engine_state import ENGINE
from mlxrun.server.http.json_bodies import json_response, read_json
from mlxrun.server.http.surface import Endpoint, Surface

_CHAT_ONLY = (
    *("tools", "tool_choice", "chat_template_kwargs"),
    *("reasoning_effort", "reasoning", "thinking", "enable_thinking"),
)
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")  # tokens that tokenizer_info names


async def tokenize_prompt(request: web.Request) -> web.Response:
    """Answer `{"prompt"}` or `{"messages"}` with `{"count", "max_model_len", "tokens"}`, images included."""
    engine = request.app[ENGINE]
    strict = engine.context.config.server.strict_fields
    body = await read_body_with_files(request)
    given = TOKENIZE.check(body, strict=strict)
    choose_adapter(given.get("model"), engine.model)
    if ("prompt" in given) == ("messages" in given):
        reject("prompt", "give either prompt or messages", code="missing_field")
    if "messages" in given:
        if given.get("add_special_tokens"):
            reject("add_special_tokens", "the chat template writes them into messages; leave it out")
        given = resolve_reasoning_fields(given, engine.context)
        ids = (await prepare_chat_prompt(given, read_offered_tools(given), engine.context)).ids
    else:
        ids = await run_on_text(len(given["prompt"]), _tokenize_text, given, engine.model)
    found: dict[str, Any] = {"count": len(ids), "max_model_len": engine.model.context_length, "tokens": ids}
    if given.get("return_token_strs"):
        found["token_strs"] = await asyncio.to_thread(engine.model.tokenizer.convert_ids_to_tokens, list(ids))
    return json_response(found)


def _tokenize_text(given: Mapping[str, Any], model_info: ModelInfo) -> tuple[int, ...]:
    for name in _CHAT_ONLY:
        if name in given:
            reject(name, "goes with messages, not with prompt")
    for name, harmless in ((ADD_GENERATION_PROMPT, True), (CONTINUE_FINAL_MESSAGE, False)):
        if given.get(name, harmless) is not harmless:
            reject(name, "goes with messages, not with prompt")
    check_text(given["prompt"], "prompt", ImageMarkers())
    return tokenize(model_info, given["prompt"], add_special_tokens=given.get("add_special_tokens", True)).ids


async def detokenize_ids(request: web.Request) -> web.Response:
    """Answer `{"tokens"}` with `{"prompt"}`, special tokens included."""
    model = request.app[ENGINE].model
    given = DETOKENIZE.check(await read_json(request))
    choose_adapter(given.get("model"), model)
    check_given(given, "tokens")
    return json_response({"prompt": await asyncio.to_thread(_decode, given["tokens"], model)})


def _decode(ids: list[int], model: ModelInfo) -> str:
    size = len(model.tokenizer)
    for i, token in enumerate(ids):
        if not 0 <= check_type(token, int, f"tokens[{i}]") < size:
            reject(f"tokens[{i}]", f"{token} is not a token id; the vocabulary has {size}")
    text = model.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text)


async def get_tokenizer_info(request: web.Request) -> web.Response:
    """Return fields of tokenizer_config.json as the server uses them: special tokens and chat template."""
    model = request.app[ENGINE].model
    body = {"tokenizer_class": type(model.tokenizer).__name__, "model_max_length": model.context_length}
    special = {
        name: str(token) for name, token in model.tokenizer.special_tokens_map.items() if name in _SPECIAL
    }
    template = {} if model.chat_template is None else {"chat_template": model.chat_template}
    return json_response(body | special | template)


SURFACE = Surface(
    "tokenize",
    tuple(
        Endpoint("GET", f"{prefix}/tokenizer_info", get_tokenizer_info, "Describe the tokenizer")
        for prefix in ("", "/v1")
    )
    + tuple(
        Endpoint("POST", f"{prefix}/{name}", handler, summary, body.schema)
        for prefix in ("", "/v1")
        for name, handler, summary, body in (
            ("tokenize", tokenize_prompt, "Count a prompt's tokens", TOKENIZE),
            ("detokenize", detokenize_ids, "The text of token ids", DETOKENIZE),
        )
    ),
)
