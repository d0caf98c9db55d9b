"""Anthropic's messages and count_tokens: from a JSON body to Requests, by way of OpenAI's chat body.

There is no second renderer, so a prompt is the one that the same conversation has on the other surface.
`max_tokens` is a ceiling, as clients send the same for every model: what the context does not hold is cut off
it. `effort` is a hint. A refused body is a RequestError with a path such as
`messages.0.content`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrun.api.anthropic.chat_messages import ChatMessagesBuilder
from mlxrun.api.anthropic.error_paths import ErrorPaths, rename
from mlxrun.api.anthropic.fields import (
    CONTEXT,
    EDITS,
    FORMATS,
    METADATA,
    OUTPUT,
    THINKING,
    TOOL_CHOICES,
    TOOLS,
    check_body,
    check_tagged,
    check_fields,
)
from mlxrun.api.context import ApiContext
from mlxrun.api.openai import request
from mlxrun.api.openai.fields import BODIES
from mlxrun.api.prepared import PreparedRequest
from mlxrun.errors import Draining, NotReady, PromptTooLong, RequestError, get_http_status, describe_error
from mlxrun.text.continuation import CONTINUE_FINAL_MESSAGE
from mlxrun.text.field_errors import check_type, quote, reject, reject_unsupported, suggest
from mlxrun.text.model_info import ModelInfo
from mlxrun.text.template import REASONING_SWITCHES, find_template_variables

Json = dict[str, Any]

CHAT = "/v1/chat/completions"
_OVERLOADED = 529
_EFFORTS = {"xhigh": "high", "max": "high"}  # templates know low, medium and high


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A checked body. `chat` is the same for /v1/chat/completions; `trail` leads its errors back."""

    chat: Json
    error_paths: ErrorPaths
    max_tokens: int
    hide_reasoning: bool = False
    reports_edits: bool = False  # whether the response is to say which context edits were applied


@dataclass(frozen=True, slots=True)
class PreparedMessage:
    """A request of /v1/messages: what the engine is asked, and what the response needs besides."""

    prepared: PreparedRequest
    message: MessageRequest

    @property
    def limited_by_context(self) -> bool:
        """Whether the context holds fewer tokens than were asked for."""
        return self.prepared.requests[0].params.max_tokens < self.message.max_tokens


async def prepare_message(body: Any, context: ApiContext, *, interleaved: bool = False) -> PreparedMessage:
    """Checks a body of /v1/messages and makes its prompt. `interleaved`: the client's header says so;
    a budget is then for all thoughts between calls, and may be more than one answer's tokens."""
    asked = await asyncio.to_thread(read_message, body, context)
    _check_budget(body, interleaved)
    sampling = dataclasses.replace(context.config.sampling, max_tokens=None)  # the body's own is always there
    ceiling = dataclasses.replace(context, config=dataclasses.replace(context.config, sampling=sampling))
    try:
        prepared = await request.prepare_request(
            CHAT, asked.chat, ceiling, default_max_tokens=asked.max_tokens, stream=True
        )
    except RequestError as error:
        asked.error_paths.lead_back(error)
        raise
    return PreparedMessage(prepared, asked)


async def count_tokens(body: Any, context: ApiContext) -> Json:
    """The response of count_tokens: the tokens that the engine would prefill, images included. The prompt may
    be longer than the context."""
    asked = await asyncio.to_thread(read_message, body, context, count=True)
    try:
        given = BODIES["chat"].check(asked.chat)
        request.check_model_name(given["model"], context.model_info)
        prompt = await request.prepare_chat_prompt(given, request.read_offered_tools(given), context)
    except RequestError as error:
        asked.error_paths.lead_back(error)
        raise
    return {"input_tokens": len(prompt.ids)}


def read_message(body: Any, side: ApiContext, *, count: bool = False) -> MessageRequest:
    """A checked body, as one of chat/completions."""
    try:
        return _ask(check_body(body, count), side, count)
    except RequestError as error:
        rename(error, error.param or "body")
        raise


def _ask(given: Json, side: ApiContext, count: bool) -> MessageRequest:
    trail = ErrorPaths()
    strip = side.config.server.strip_billing_header
    messages = ChatMessagesBuilder(trail, strip_billing=strip, whole=not count)
    if "system" in given:
        messages.system(given["system"], "system")
    messages.add(given["messages"])
    chat: Json = {"model": given["model"], "messages": messages.messages}
    chat |= {name: given[name] for name in ("temperature", "top_p", "top_k", "stream") if name in given}
    if "stop_sequences" in given:
        chat["stop"] = given["stop_sequences"]
        trail.paths["stop"] = "stop_sequences"
    chat |= _user(given, trail) | _tools(given, trail) | _thinking(given, side, trail)
    chat |= _output(given, side.model_info, trail)
    if messages.begun and _may_begin(given, count):
        chat[CONTINUE_FINAL_MESSAGE] = True
    return MessageRequest(
        chat,
        trail,
        given.get("max_tokens", 1),
        hide_reasoning=given.get("thinking", {}).get("display") == "omitted",
        reports_edits=_context(given),
    )


def _may_begin(given: Json, count: bool) -> bool:
    """Whether the answer may begin with the last message's text: not where something else has to come first.
    That is an error, unless tokens are only counted."""
    found = {
        "thinking": given.get("thinking", {}).get("type", "disabled") != "disabled",
        "tool_choice": given.get("tool_choice", {}).get("type") in ("any", "tool"),
        "output_config.format": bool(given.get("output_config", {}).get("format")),
        **{f"tools[{i}].strict": tool.get("strict") for i, tool in enumerate(given.get("tools", []))},
    }
    against = next((name for name, asked in found.items() if asked), None)
    if against is not None and not count:
        reject(against, "not together with a last message of the assistant, which begins the answer")
    return against is None


def _user(given: Json, trail: ErrorPaths) -> Json:
    metadata = check_fields(given.get("metadata", {}), "metadata", METADATA)
    trail.paths["user"] = "metadata.user_id"
    return {"user": metadata["user_id"]} if "user_id" in metadata else {}


def _tools(given: Json, trail: ErrorPaths) -> Json:
    """Tools as functions, and which may be called."""
    tools = []
    for i, value in enumerate(given.get("tools", [])):
        tools.append(_tool(value, f"tools[{i}]"))
        function = f"tools[{i}].function"
        trail.paths.update({function: f"tools[{i}]", f"{function}.parameters": f"tools[{i}].input_schema"})
    made: Json = {"tools": tools} if tools else {}
    if "tool_choice" not in given:
        return made
    of, choice = check_tagged(given["tool_choice"], "tool_choice", TOOL_CHOICES)
    names = [tool["function"]["name"] for tool in tools]
    if of in ("any", "tool") and not tools:
        reject("tool_choice", f"{of!r} needs `tools`")
    if of == "tool" and choice["name"] not in names:
        text = f"{quote(choice['name'])} is not among the tools{suggest(choice['name'], names)}"
        reject("tool_choice.name", text)
    made["tool_choice"] = {
        "auto": "auto",
        "none": "none",
        "any": "required",
        "tool": {"type": "function", "function": {"name": choice.get("name")}},
    }[of]
    if choice.get("disable_parallel_tool_use"):
        made["parallel_tool_calls"] = False
        trail.paths["parallel_tool_calls"] = "tool_choice.disable_parallel_tool_use"
    return made


def _tool(value: Any, where: str) -> Json:
    """A tool as a function. Examples are told to the model at the end of the description."""
    check_type(value, dict, where)
    of = value.get("type")
    if isinstance(of, str) and of != "custom":
        reject_unsupported(f"{where}.type", f"{quote(of)} has no schema here; describe it as a custom tool")
    _, tool = check_tagged({**value, "type": "custom" if of is None else of}, where, TOOLS)
    function: Json = {"name": tool["name"]}
    description = tool.get("description", "")
    if tool.get("input_examples"):
        examples = [json.dumps(example, ensure_ascii=False) for example in tool["input_examples"]]
        description = "\n".join([description, "", "Examples of input:", *examples]).lstrip("\n")
    if "description" in tool or description:
        function["description"] = description
    function["parameters"] = tool["input_schema"]
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _thinking(given: Json, side: ApiContext, trail: ErrorPaths) -> Json:
    """The template's switch for thinking, and how long a thought may be where its format is known. `adaptive`
    leaves both to the template and the config; a template without a switch always does the same."""
    if "thinking" not in given:
        return {}
    of, thinking = check_tagged(given["thinking"], "thinking", THINKING)
    made: Json = {}
    if "budget_tokens" in thinking and side.formats.reasoning is not None:
        made["thinking_budget"] = thinking["budget_tokens"]
        trail.paths["thinking_budget"] = "thinking.budget_tokens"
    known = _variables(side.model_info)
    switch = next((name for name in REASONING_SWITCHES if name in known), None)
    if switch is not None and of != "adaptive":
        trail.paths[f"chat_template_kwargs.{switch}"] = "thinking"
        made["chat_template_kwargs"] = {switch: of == "enabled"}
    return made


def _check_budget(body: Json, interleaved: bool) -> None:
    """In a checked body: a thought has to leave room for the answer."""
    budget, most = (body.get("thinking") or {}).get("budget_tokens"), body["max_tokens"]
    if budget is not None and budget >= most and not (interleaved and body.get("tools")):
        text = (
            f"`max_tokens` must be greater than `thinking.budget_tokens`: {most} is not greater than {budget}"
        )
        reject("thinking.budget_tokens", text)


def _output(given: Json, host: ModelInfo, trail: ErrorPaths) -> Json:
    output = check_fields(given.get("output_config", {}), "output_config", OUTPUT)
    made: Json = {}
    if "effort" in output and "reasoning_effort" in _variables(host):
        made["reasoning_effort"] = _EFFORTS.get(output["effort"], output["effort"])
        trail.paths["reasoning_effort"] = "output_config.effort"
    if "format" in output:
        _, wanted = check_tagged(output["format"], "output_config.format", FORMATS)
        form = {"name": "output", "schema": wanted["schema"], "strict": True}
        made["response_format"] = {"type": "json_schema", "json_schema": form}
        trail.paths["response_format"] = "output_config.format"
        trail.paths["response_format.json_schema.schema"] = "output_config.format.schema"
    return made


def _variables(host: ModelInfo) -> frozenset[str]:
    return find_template_variables(host.chat_template) if host.chat_template is not None else frozenset()


def _context(given: Json) -> bool:
    """Whether context edits were asked for: only one that removes nothing is taken."""
    if "context_management" not in given:
        return False
    context = check_fields(given["context_management"], "context_management", CONTEXT)
    for i, edit in enumerate(context.get("edits", [])):
        where = f"context_management.edits[{i}]"
        check_type(edit, dict, where)
        of = edit.get("type")
        if isinstance(of, str) and of not in EDITS:
            reject_unsupported(f"{where}.type", f"{quote(of)}; the conversation is taken as it is sent")
        check_tagged(edit, where, EDITS)
    return True


# Responses that are not answers.


def build_models_page(names: Sequence[str]) -> Json:
    """The response of /v1/models in Anthropic's form."""
    return {
        "data": [_model(name) for name in names],
        "has_more": False,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }


def _model(name: str) -> Json:
    """One model; where the date is unknown the epoch's begin stands."""
    return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def get_error_status(error: BaseException) -> int:
    """The HTTP status of an error: Anthropic's own where a server is too busy for the moment."""
    if isinstance(error, (Draining, NotReady)):
        return _OVERLOADED
    return get_http_status(error)


_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}


def build_error(error: BaseException, request_id: str) -> Json:
    """Anthropic's error object. What is not meant for the user is named by its class only."""
    status = get_error_status(error)
    text = describe_error(error)
    if isinstance(error, PromptTooLong):
        text = f"prompt is too long: {text}"  # clients look for these words, and shorten the conversation
    usual = "invalid_request_error" if 400 <= status < 500 else "api_error"
    of = _TYPES.get(status, usual)
    return {"type": "error", "error": {"type": of, "message": text}, "request_id": request_id}
