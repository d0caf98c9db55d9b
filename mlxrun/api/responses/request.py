"""Prepares bodies of OpenAI's /v1/responses, by translating them to chat bodies.

Errors about a chat body are translated back to the client's fields. With `truncation: auto`, a prompt that
does not fit loses items; see chat_messages.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxrun.api.openai.fields import CHAT_URL
from mlxrun.api.openai.reasoning import translate_effort
from mlxrun.api.openai.request import prepare_request
from mlxrun.api.prepared import ApiContext, PreparedRequest, check_prompt_lengths
from mlxrun.api.responses.chat_messages import ChatMessagesTranslator, list_cuts, list_kept
from mlxrun.api.responses.fields import BODY, ENCRYPTED, LOGPROBS, SAME
from mlxrun.api.responses.input_items import InputItem, Item, check_item_ids, read_input_items
from mlxrun.api.responses.tools import ResponseTools, read_tools, warn_once
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.templates.template import REASONING_SWITCHES
from mlxrun.core.errors import PromptTooLong
from mlxrun.core.field_errors import (
    check_keys,
    check_type,
    find_source,
    get_required,
    quote,
    reject,
    reject_choice,
    rename_fields,
)

_CHAT_ONLY = re.compile(r"(?<=\.image_url)\.url$|^\.function(?=\.|$)")  # levels that only chat bodies have
_SOURCES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "logprobs": "include",
} | {f"chat_template_kwargs.{name}": "reasoning.effort" for name in ("reasoning_effort", *REASONING_SWITCHES)}


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A checked Responses body. `chat`: its translation. `inputs`: all items of the conversation.
    `num_dropped`: how many of them the prompt lacks. `sources`: the path in the body of each path in
    `chat`."""

    given: dict[str, Any]
    chat: dict[str, Any]
    inputs: tuple[InputItem, ...]
    tools: ResponseTools
    effort: str | None
    sources: Mapping[str, str]
    num_dropped: int = 0

    @property
    def context(self) -> tuple[Item, ...]:
        """The items of the conversation."""
        return tuple(each.item for each in self.inputs)

    @property
    def stored(self) -> bool:
        return bool(self.given.get("store", True))

    @property
    def background(self) -> bool:
        return bool(self.given.get("background"))

    @property
    def conversation(self) -> str | None:
        """The id of the conversation that the request belongs to."""
        return find_conversation_id(self.given)

    @property
    def truncates(self) -> bool:
        """Whether a prompt that does not fit may lose items."""
        return self.given.get("truncation") == "auto"

    @property
    def encrypted(self) -> bool:
        """Whether reasoning is also returned as `encrypted_content`: see opaque_reasoning.py."""
        return ENCRYPTED in self.given.get("include", ())

    @property
    def logprobs(self) -> bool:
        return bool(self.chat.get("logprobs"))

    def keep(self, indices: Sequence[int]) -> ResponseRequest:
        """Return the same request with a prompt of only these items."""
        messages, sources = _translate_items(self.given, [self.inputs[i] for i in indices])
        dropped = len(self.inputs) - len(indices)
        return replace(self, chat=self.chat | {"messages": messages}, sources=sources, num_dropped=dropped)

    def find_field(self, param: str) -> str:
        """Find the client's field of one of the chat body."""
        paths = {f"tools[{i}]": path for i, path in enumerate(self.tools.paths)}
        source, rest = find_source(param, {**_SOURCES, **paths, **self.sources})
        return source + _CHAT_ONLY.sub("", rest) if source else rest


@dataclass(slots=True)
class ResponseLookup:
    """Finds stored things by id; None if there is none. `history`: the items of a response and of all before
    it; `item`: one item; `conversation`: the items of a conversation."""

    history: Callable[[str], Sequence[Item] | None] = lambda _: None
    item: Callable[[str], Item | None] = lambda _: None
    conversation: Callable[[str], Sequence[Item] | None] = lambda _: None


async def prepare_response(
    body: Any,
    context: ApiContext,
    lookup: ResponseLookup,
    token: str,
    *,
    stream: bool = False,
    default_max_tokens: int | None = None,
) -> tuple[ResponseRequest, PreparedRequest]:
    """Check a body and build its prompt. `token`: makes new ids. `stream`: whether the caller can stream.
    `default_max_tokens`: the limit of an answer that has none. RequestError if the body is refused."""
    strict = context.config.server.strict_fields
    wanted = await asyncio.to_thread(
        read_response_request, body, context.model_info, lookup, token, strict=strict
    )

    async def prepare(request: ResponseRequest) -> PreparedRequest:
        found = await prepare_request(
            CHAT_URL, request.chat, context, stream=stream, default_max_tokens=default_max_tokens
        )
        if request.truncates:
            check_prompt_lengths(found, context.config.server.max_prompt_tokens)
        return found

    with rename_fields(wanted.find_field):
        return await _find_fitting(wanted, prepare) if wanted.truncates else (wanted, await prepare(wanted))


async def _find_fitting(
    request: ResponseRequest, prepare: Callable[[ResponseRequest], Awaitable[PreparedRequest]]
) -> tuple[ResponseRequest, PreparedRequest]:
    """The request with as few items dropped as necessary, prepared; PromptTooLong if nothing more can be."""
    try:
        return request, await prepare(request)
    except PromptTooLong as error:
        too_long = error
    items = request.context
    cuts = list_cuts(items)
    found: tuple[ResponseRequest, PreparedRequest] | None = None
    low, high = 0, len(cuts)
    while low < high:  # the last cut is tried if no earlier one fits, as it is the middle of what is left
        middle = (low + high) // 2
        shorter = request.keep(list_kept(items, cuts[middle]))
        try:
            found = shorter, await prepare(shorter)
            high = middle
        except PromptTooLong:
            low = middle + 1
    if found is None:
        raise too_long
    return found


def read_response_request(
    body: Any, model_info: ModelInfo, lookup: ResponseLookup, token: str, *, strict: bool = False
) -> ResponseRequest:
    """Check a body and translate it. `token`: makes new ids. `strict`: server.strict_fields."""
    given = BODY.check(body, strict=strict)
    _check_combinations(given)
    tools = read_tools(given, strict=strict)
    history = _get_history(given, lookup)
    items = read_input_items(given.get("input", []), token, lookup.item, strict=strict)
    if "conversation" in given:
        check_item_ids(items, (each.item for each in history))
    messages, sources = _translate_items(given, [*history, *items])
    chat = {name: given[name] for name in SAME if name in given} | {"messages": messages}
    if tools.chat:
        chat["tools"] = tools.chat
    if "tool_choice" in given:
        chat["tool_choice"] = tools.choice
    if "max_output_tokens" in given:
        chat["max_completion_tokens"] = given["max_output_tokens"]
    if LOGPROBS in given.get("include", ()) or given.get("top_logprobs"):
        chat |= {"logprobs": True, "top_logprobs": given.get("top_logprobs", 0)}
    chat |= _translate_format(given.get("text", {}))
    effort = _apply_effort(given, chat, model_info)
    return ResponseRequest(given, chat, (*history, *items), tools, effort, sources)


def _check_combinations(given: Mapping[str, Any]) -> None:
    if "stream_options" in given and not given.get("stream"):
        reject("stream_options", 'needs "stream": true')
    if isinstance(given.get("conversation"), dict):
        check_keys(given["conversation"], ("id",), "conversation")
        get_required(given["conversation"], "id", str, "conversation")
    if "conversation" in given and "previous_response_id" in given:
        reject("conversation", "not together with previous_response_id")
    if given.get("background") and given.get("store") is False:
        reject("background", 'not together with "store": false, as nobody could retrieve the response')
    if not any(name in given for name in ("input", "instructions", "previous_response_id", "conversation")):
        reject("input", "missing", code="missing_field")


def _translate_items(
    given: Mapping[str, Any], items: Sequence[InputItem]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The messages of a chat body, and the sources of their fields."""
    translator = ChatMessagesTranslator(given.get("instructions"))
    translator.add_items(items)
    return translator.messages, translator.sources


def find_conversation_id(body: Any) -> str | None:
    """Return the id of the conversation that a body names; None if it names none, or not in a valid way."""
    value = body.get("conversation") if isinstance(body, dict) else None
    found = value.get("id") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None


def _get_history(given: Mapping[str, Any], lookup: ResponseLookup) -> list[InputItem]:
    """The items that the new ones follow."""
    conversation = find_conversation_id(given)
    if conversation is not None:
        param, name, find = "conversation", conversation, lookup.conversation
    elif "previous_response_id" in given:
        param, name, find = "previous_response_id", given["previous_response_id"], lookup.history
    else:
        return []
    found = find(name)
    if found is None:
        kind = "conversation" if conversation is not None else "response"
        code = f"{param.removesuffix('_id')}_not_found"
        text = f"there is no stored {kind} {quote(name)}; it was not stored, or deleted, or evicted"
        reject(param, text, code=code)
    return [InputItem(item, param) for item in found]


def _translate_format(text: Mapping[str, Any]) -> dict[str, Any]:
    wanted = text.get("format")
    if wanted is None:
        return {}
    kind = check_type(wanted.get("type"), str, "text.format.type")
    if kind not in ("text", "json_schema", "json_object"):
        reject_choice("text.format.type", kind, ("text", "json_schema", "json_object"))
    if kind != "json_schema":
        return {"response_format": {"type": kind}}
    return {"response_format": {"type": kind, kind: {key: wanted[key] for key in wanted if key != "type"}}}


def _apply_effort(given: Mapping[str, Any], chat: dict[str, Any], model_info: ModelInfo) -> str | None:
    """Sets the template's variable for `reasoning.effort`; returns the effort, or None if it is not applied.

    Some clients always send this hint, so a template without such a variable causes a warning only.
    """
    effort: str | None = given.get("reasoning", {}).get("effort")
    if effort is None:
        return None
    variables, arguments = translate_effort(effort, model_info), chat.get("chat_template_kwargs", {})
    if not variables or "reasoning_effort" in variables.keys() & arguments.keys():
        warn_once("/v1/responses: the chat template does not support reasoning.effort; it is ignored")
        return None
    chat["chat_template_kwargs"] = {**variables, **arguments}
    return effort
