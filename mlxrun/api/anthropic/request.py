"""Prepares bodies of Anthropic's messages and count_tokens, by translating them to OpenAI's chat body.

So a conversation has the same prompt on all surfaces. Clients send one `max_tokens` for every model, so it is
lowered to what fits into the context. `effort` is a hint. A refused body is a RequestError with a path such
as `messages.0.content`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mlxrun.api.anthropic.chat_messages import ChatMessagesBuilder
from mlxrun.api.anthropic.fields import CUSTOM_TOOL, EDIT, check_body
from mlxrun.api.anthropic.tagged_schema import EXTRA, check_fields, check_tagged
from mlxrun.api.anthropic.typed_tools import read_typed_tool
from mlxrun.api.body_schema import LIST, object_of
from mlxrun.api.openai.fields import CHAT_URL
from mlxrun.api.openai.request import check_body as check_chat_body
from mlxrun.api.openai.request import prepare_chat_prompt, prepare_request
from mlxrun.api.prepared import ApiContext, PreparedRequest
from mlxrun.api.text.continuation import CONTINUE_FINAL_MESSAGE
from mlxrun.api.text.ignored_fields import log_ignored
from mlxrun.api.text.model_info import ModelInfo, choose_adapter
from mlxrun.api.text.templates.template import find_reasoning_switch, find_template_variables
from mlxrun.api.text.tools import read_offered_tools
from mlxrun.core.errors import RequestError
from mlxrun.core.field_errors import (
    UNKNOWN,
    check_type,
    find_source,
    quote,
    reject,
    reject_unsupported,
    rename_field,
    suggest,
)

Json = dict[str, Any]

_EFFORTS = {"xhigh": "high", "max": "high"}  # templates know low, medium and high
_NO_VARIABLE = "the model's chat template has no variable for it"
_INDEX = re.compile(r"\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A checked body. `chat`: its translation. `sources`: the path in the body of each path in `chat`."""

    chat: Json
    sources: Mapping[str, str]
    max_tokens: int
    hide_reasoning: bool = False
    reports_edits: bool = False  # whether the response lists the context edits that were applied


@dataclass(frozen=True, slots=True)
class PreparedMessage:
    """A request of /v1/messages: the prepared chat request and the checked body."""

    prepared: PreparedRequest
    message: MessageRequest

    @property
    def limited_by_context(self) -> bool:
        """Whether fewer tokens fit into the context than were requested."""
        return self.prepared.requests[0].params.max_tokens < self.message.max_tokens


async def prepare_message(body: Any, context: ApiContext, *, interleaved: bool = False) -> PreparedMessage:
    """Check a body of /v1/messages and build its prompt. `interleaved`: the client's `anthropic-beta` header
    asks for interleaved thinking. Then several answers share the thinking budget, so it may exceed
    `max_tokens`. RequestError if the body is refused."""
    message = await asyncio.to_thread(read_message, body, context)
    _check_budget(body, interleaved)
    limited = context.without_max_tokens()  # the body's is always given
    with _rename_fields(message.sources):
        prepared = await prepare_request(
            CHAT_URL, message.chat, limited, default_max_tokens=message.max_tokens, stream=True
        )
    return PreparedMessage(prepared, message)


async def count_tokens(body: Any, context: ApiContext) -> Json:
    """Build the response of count_tokens: the number of the prompt's tokens, with those of images. The prompt
    may be longer than the context."""
    message = await asyncio.to_thread(read_message, body, context, count=True)
    with _rename_fields(message.sources):
        given = check_chat_body("chat", message.chat, context)
        choose_adapter(given["model"], context.model_info)
        prompt = await prepare_chat_prompt(given, read_offered_tools(given), context)
    return {"input_tokens": len(prompt.ids)}


@contextmanager
def _rename_fields(sources: Mapping[str, str], usual: str = "") -> Iterator[None]:
    """Gives errors of the block a path of the Anthropic body, and Anthropic's words for extra fields.

    `usual`: the path of an error that has none."""
    try:
        yield
    except RequestError as error:
        param = _INDEX.sub(r".\1", "".join(find_source(error.param or usual, sources)))
        if error.param is not None or param:
            rename_field(error, param)
        if error.code == UNKNOWN:
            error.args = (str(error).replace(f"{param}: unknown parameter", f"{param}: {EXTRA}", 1),)
        raise


def read_message(body: Any, context: ApiContext, *, count: bool = False) -> MessageRequest:
    """Check a body and translate it to a chat body. `count`: the body is one of count_tokens."""
    with _rename_fields({}, "body"):
        given = check_body(body, count, strict=context.config.server.strict_fields)
        return _translate(given, context, count)


def _translate(given: Json, context: ApiContext, count: bool) -> MessageRequest:
    sources: dict[str, str] = {}
    server = context.config.server
    builder = ChatMessagesBuilder(sources, complete=not count, strip_billing=server.strip_billing_header)
    if "system" in given:
        builder.add_system(given["system"], "system")
    builder.add_messages(given["messages"])
    chat: Json = {"model": given["model"], "messages": builder.messages}
    chat |= {name: given[name] for name in ("temperature", "top_p", "top_k", "stream") if name in given}
    if "stop_sequences" in given:
        chat["stop"] = given["stop_sequences"]
        sources["stop"] = "stop_sequences"
    if "user_id" in given.get("metadata", {}):
        chat["user"] = given["metadata"]["user_id"]
        sources["user"] = "metadata.user_id"
    chat |= _translate_tools(given, sources) | _translate_tool_choice(given, sources)
    chat |= _translate_thinking(given, context, sources)
    chat |= _translate_output(given, context.model_info, sources)
    if builder.continued and _may_continue(given, count):
        chat[CONTINUE_FINAL_MESSAGE] = True
    return MessageRequest(
        chat,
        sources,
        given.get("max_tokens", 1),
        hide_reasoning=given.get("thinking", {}).get("display") == "omitted",
        reports_edits=_check_edits(given),
    )


def _may_continue(given: Json, count: bool) -> bool:
    """Whether the answer may continue the last message: not if a field requires it to begin otherwise. That
    is an error, unless tokens are only counted."""
    conflicts = {
        "thinking": given.get("thinking", {}).get("type", "disabled") != "disabled",
        "tool_choice": given.get("tool_choice", {}).get("type") in ("any", "tool"),
        **{name: True for name, _ in _list_formats(given)},
        **{f"tools[{i}].strict": tool.get("strict") for i, tool in enumerate(given.get("tools", []))},
    }
    conflict = next((name for name, is_set in conflicts.items() if is_set), None)
    if conflict is not None and not count:
        reject(conflict, "not together with a last message of the assistant, which the answer continues")
    return conflict is None


def _translate_tools(given: Json, sources: dict[str, str]) -> Json:
    tools = []
    for i, value in enumerate(given.get("tools", [])):
        tools.append(_translate_tool(value, f"tools[{i}]"))
        function = f"tools[{i}].function"
        sources |= {function: f"tools[{i}]", f"{function}.parameters": f"tools[{i}].input_schema"}
    return {"tools": tools} if tools else {}


def _translate_tool(value: Any, where: str) -> Json:
    """A tool as a function. Examples of input are added to its description."""
    check_type(value, dict, where)
    kind = value.get("type")
    if isinstance(kind, str) and kind != "custom":
        tool, function = read_typed_tool(value, where)
    else:
        tool = check_tagged({**value, "type": "custom" if kind is None else kind}, where, CUSTOM_TOOL)
        function = {name: tool[name] for name in ("name", "description") if name in tool}
    if tool.get("input_examples"):
        examples = [json.dumps(example, ensure_ascii=False) for example in tool["input_examples"]]
        lines = [function.get("description", ""), "", "Examples of input:", *examples]
        function["description"] = "\n".join(lines).lstrip("\n")
    function.setdefault("parameters", tool.get("input_schema"))
    if tool.get("strict"):
        function["strict"] = True
    return {"type": "function", "function": function}


def _translate_tool_choice(given: Json, sources: dict[str, str]) -> Json:
    if "tool_choice" not in given:
        return {}
    choice, kind = given["tool_choice"], given["tool_choice"]["type"]
    names = [tool["name"] for tool in given.get("tools", [])]
    if kind in ("any", "tool") and not names:
        reject("tool_choice", f"{kind!r} needs `tools`")
    if kind == "tool" and choice["name"] not in names:
        text = f"{quote(choice['name'])} is not among the tools{suggest(choice['name'], names)}"
        reject("tool_choice.name", text)
    function = {"type": "function", "function": {"name": choice.get("name")}}
    chat: Json = {"tool_choice": {"any": "required", "tool": function}.get(kind, kind)}
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
        sources["parallel_tool_calls"] = "tool_choice.disable_parallel_tool_use"
    return chat


def _translate_thinking(given: Json, context: ApiContext, sources: dict[str, str]) -> Json:
    """Sets the template's reasoning switch if it has one, and the budget if the model's reasoning can be
    parsed. `adaptive` leaves the switch to the template and the config."""
    if "thinking" not in given:
        return {}
    thinking, chat = given["thinking"], {}
    if "budget_tokens" in thinking and context.formats.reasoning is not None:
        chat["thinking_budget"] = thinking["budget_tokens"]
        sources["thinking_budget"] = "thinking.budget_tokens"
    switch = find_reasoning_switch(context.model_info)
    if switch is None:
        log_ignored("thinking.type", _NO_VARIABLE)
    elif thinking["type"] != "adaptive":
        chat["chat_template_kwargs"] = {switch: thinking["type"] == "enabled"}
        sources[f"chat_template_kwargs.{switch}"] = "thinking"
    return chat


def _check_budget(body: Json, interleaved: bool) -> None:
    """Checks that the thinking budget of a checked body leaves room for the answer."""
    budget, most = (body.get("thinking") or {}).get("budget_tokens"), body["max_tokens"]
    if budget is not None and budget >= most and not (interleaved and body.get("tools")):
        text = (
            f"`max_tokens` must be greater than `thinking.budget_tokens`: {most} is not greater than {budget}"
        )
        reject("thinking.budget_tokens", text)


def _translate_output(given: Json, model_info: ModelInfo, sources: dict[str, str]) -> Json:
    output: Json = given.get("output_config", {})
    chat: Json = {}
    known = find_template_variables(model_info.chat_template or "")
    if "effort" in output and "reasoning_effort" not in known:
        log_ignored("output_config.effort", _NO_VARIABLE)
    elif "effort" in output:
        chat["reasoning_effort"] = _EFFORTS.get(output["effort"], output["effort"])
        sources["reasoning_effort"] = "output_config.effort"
    formats = _list_formats(given)
    if len(formats) > 1:
        reject("output_format", "not together with output_config.format; give one of them")
    for name, value in formats:
        schema = {"name": "output", "schema": value["schema"], "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        sources["response_format"] = name
        sources["response_format.json_schema.schema"] = f"{name}.schema"
    return chat


def _list_formats(given: Json) -> list[tuple[str, Any]]:
    """The response formats of a body, by the names of their fields."""
    values = {
        "output_config.format": given.get("output_config", {}).get("format"),
        "output_format": given.get("output_format"),
    }
    return [(name, value) for name, value in values.items() if value is not None]


def _check_edits(given: Json) -> bool:
    """Whether the body has context edits. Only an edit that removes nothing is supported."""
    if "context_management" not in given:
        return False
    edits = object_of({}, {"edits": LIST})
    management = check_fields(given["context_management"], "context_management", edits)
    for i, edit in enumerate(management.get("edits", [])):
        where = f"context_management.edits[{i}]"
        check_type(edit, dict, where)
        kind = edit.get("type")
        if isinstance(kind, str) and kind not in EDIT.kinds:
            reject_unsupported(f"{where}.type", f"{quote(kind)}; conversations are used as they are sent")
        check_tagged(edit, where, EDIT)
    return True
