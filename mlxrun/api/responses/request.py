"""Translates Responses bodies to OpenAI's chat bodies, and errors about those back to the client's fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrun.api.error_paths import find_source, rename_field
from mlxrun.api.responses.chat_messages import ChatMessagesTranslator
from mlxrun.api.responses.fields import BODY, ENCRYPTED, LOGPROBS, SAME
from mlxrun.api.responses.input_items import InputItem, Item, read_input_items
from mlxrun.api.responses.tools import ResponseTools, read_tools, warn_once
from mlxrun.errors import RequestError
from mlxrun.text.field_errors import check_type, quote, reject, reject_choice
from mlxrun.text.model_info import ModelInfo
from mlxrun.text.template import REASONING_SWITCHES, find_template_variables

_MAX_DEPTH = 100  # of nested JSON: well below the limits of encoders, templates and schemas
_CHAT_ONLY = re.compile(r"(?<=\.image_url)\.url$|^\.function(?=\.|$)")  # levels that only chat bodies have
_SOURCES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "logprobs": "include",
} | {f"chat_template_kwargs.{switch}": "reasoning.effort" for switch in REASONING_SWITCHES}


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A checked Responses body. `chat` is its translation; `items` are the new input items, `history` those
    of the previous responses; `sources` are for api/error_paths.py."""

    given: dict[str, Any]
    chat: dict[str, Any]
    items: tuple[Item, ...]
    history: tuple[Item, ...]
    tools: ResponseTools
    effort: str | None
    sources: Mapping[str, str]

    @property
    def stored(self) -> bool:
        return bool(self.given.get("store", True))

    @property
    def encrypted(self) -> bool:
        """Whether reasoning is also returned in the form that clients send back unread."""
        return ENCRYPTED in self.given.get("include", ())

    @property
    def logprobs(self) -> bool:
        return bool(self.chat.get("logprobs"))

    def rename_error(self, error: RequestError) -> None:
        """Makes an error about the chat body one about the client's body."""
        if error.param is not None:
            source, rest = find_source(error.param, self.sources)
            rename_field(error, source + _CHAT_ONLY.sub("", rest) if source else rest)


@dataclass(slots=True)
class ResponseLookup:
    """Looks up what was stored, by id: the items of a response with all before it, and single items; None if
    there is no such thing."""

    history: Callable[[str], Sequence[Item] | None] = lambda _: None
    item: Callable[[str], Item | None] = lambda _: None


def read_response_request(
    body: Any, model_info: ModelInfo, lookup: ResponseLookup, token: str
) -> ResponseRequest:
    """Checks a body and translates it. New ids are made of `token`."""
    _check_depth(body)
    given = BODY.check(body)
    if "stream_options" in given and not given.get("stream"):
        reject("stream_options", 'needs "stream": true')
    tools = read_tools(given)
    if not any(name in given for name in ("input", "instructions", "previous_response_id")):
        reject("input", "missing", code="missing_field")
    history = _get_history(given, lookup)
    items = read_input_items(given.get("input", []), token, lookup.item)
    translator = ChatMessagesTranslator(given.get("instructions"))
    translator.add_items([InputItem(item, "previous_response_id") for item in history])
    translator.add_items(items)
    chat = {name: given[name] for name in SAME if name in given} | {"messages": translator.messages}
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
    sources = _SOURCES | translator.sources | {f"tools[{i}]": path for i, path in enumerate(tools.paths)}
    new = tuple(each.item for each in items)
    return ResponseRequest(given, chat, new, tuple(history), tools, effort, sources)


def _check_depth(body: Any) -> None:
    level, stack = 0, [body]
    while stack:
        level += 1
        if level > _MAX_DEPTH:
            reject("body", f"is nested too deeply: more than {_MAX_DEPTH} levels")
        values = [list(v.values()) if isinstance(v, dict) else v for v in stack if isinstance(v, dict | list)]
        stack = [each for value in values for each in value]


def _get_history(given: Mapping[str, Any], lookup: ResponseLookup) -> Sequence[Item]:
    name = given.get("previous_response_id")
    if name is None:
        return ()
    found = lookup.history(name)
    if found is None:
        text = f"there is no stored response {quote(name)}; it was not stored, or deleted, or evicted"
        reject("previous_response_id", text, code="previous_response_not_found")
    return found


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
    known = find_template_variables(model_info.chat_template or "")
    arguments = chat.get("chat_template_kwargs", {})
    switch = next((name for name in REASONING_SWITCHES if name in known), None)
    if switch is not None and (effort == "none" or "reasoning_effort" not in known):
        chat["chat_template_kwargs"] = {switch: effort != "none", **arguments}
    elif "reasoning_effort" in known and "reasoning_effort" not in arguments:
        chat["reasoning_effort"] = effort
    else:
        warn_once("/v1/responses: the chat template does not support reasoning.effort; it is ignored")
        return None
    return effort
