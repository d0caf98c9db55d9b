"""From a Responses body to the chat body that says the same, and errors about that back to the sender's.

There is one way from messages to tokens, that of api/openai/request.py; here is only translation. Items of one
assistant turn (thought, text, calls) become one message. Texts of a message are joined without separators.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlxrun.api.responses.fields import BODY, ENCRYPTED, LOGPROBS, SAME
from mlxrun.api.responses.input_items import Item, InputItem, read_input_items
from mlxrun.api.responses.tools import ResponseTools, read_tools, make_visible_name, warn_once
from mlxrun.errors import RequestError
from mlxrun.text.field_errors import check_type, quote, reject, reject_unsupported
from mlxrun.text.model_info import ModelInfo
from mlxrun.text.template import REASONING_SWITCHES, find_template_variables

_DEEPEST = 100  # of nested JSON: well below what encoders, templates and schemas take
_INNER = re.compile(r"(?<=\.image_url)\.url$|^\.function(?=\.|$)")  # levels that only the chat form has
_RENAMED = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "logprobs": "include",
} | {f"chat_template_kwargs.{switch}": "reasoning.effort" for switch in REASONING_SWITCHES}


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A checked Responses body. `chat` is the body to prepare; `items` are the new input items, `history`
    those of the responses before; `paths` lead from fields of `chat` to those of the sender."""

    given: dict[str, Any]
    chat: dict[str, Any]
    items: tuple[Item, ...]
    history: tuple[Item, ...]
    tools: ResponseTools
    effort: str | None
    paths: Mapping[str, str]

    @property
    def stored(self) -> bool:
        return bool(self.given.get("store", True))

    @property
    def encrypted(self) -> bool:
        """Whether thoughts are to come in a form that clients send back unread."""
        return ENCRYPTED in self.given.get("include", ())

    @property
    def logprobs(self) -> bool:
        return bool(self.chat.get("logprobs"))


@dataclass(slots=True)
class ResponseLookup:
    """What was stored: the items of a response with all before it, and single items, by id; None if there is
    no such thing."""

    history: Callable[[str], Sequence[Item] | None] = lambda _: None
    item: Callable[[str], Item | None] = lambda _: None


def read_response_request(body: Any, host: ModelInfo, memory: ResponseLookup, token: str) -> ResponseRequest:
    """Checks a body and translates it. `token` is what new ids are made of."""
    _check_depth(body)
    given = BODY.check(body)
    if "stream_options" in given and not given.get("stream"):
        reject("stream_options", 'needs "stream": true')
    tools = read_tools(given)
    if not any(name in given for name in ("input", "instructions", "previous_response_id")):
        reject("input", "missing", code="missing_field")
    history = _history(given, memory)
    placed = read_input_items(given.get("input", []), token, memory.item)
    before = [InputItem(item, "previous_response_id") for item in history]
    turns = _turns([*before, *placed], given.get("instructions"))
    chat = {name: given[name] for name in SAME if name in given}
    chat["messages"] = turns.messages
    paths = _RENAMED | turns.paths | {f"tools[{i}]": path for i, path in enumerate(tools.paths)}
    if tools.chat:
        chat["tools"] = tools.chat
    if "tool_choice" in given:
        chat["tool_choice"] = tools.choice
    if "max_output_tokens" in given:
        chat["max_completion_tokens"] = given["max_output_tokens"]
    if LOGPROBS in given.get("include", ()) or given.get("top_logprobs"):
        chat |= {"logprobs": True, "top_logprobs": given.get("top_logprobs", 0)}
    chat |= _format(given.get("text", {}))
    effort = _effort(given, chat, host)
    return ResponseRequest(given, chat, tuple(p.item for p in placed), tuple(history), tools, effort, paths)


def _check_depth(body: Any) -> None:
    level, stack = 0, [body]
    while stack:
        level += 1
        if level > _DEEPEST:
            reject("body", f"is nested too deeply: more than {_DEEPEST} levels")
        values = [list(v.values()) if isinstance(v, dict) else v for v in stack if isinstance(v, dict | list)]
        stack = [each for value in values for each in value]


def _history(given: Mapping[str, Any], memory: ResponseLookup) -> Sequence[Item]:
    name = given.get("previous_response_id")
    if name is None:
        return ()
    found = memory.history(name)
    if found is None:
        text = (
            f"there is no stored response {quote(name)}; it was not stored, deleted, or made room for others"
        )
        reject("previous_response_id", text, code="previous_response_not_found")
    return found


def _format(text: Mapping[str, Any]) -> dict[str, Any]:
    """The chat body's response_format."""
    form = text.get("format")
    if form is None:
        return {}
    of = check_type(form.get("type"), str, "text.format.type")
    if of not in ("json_schema", "json_object", "text"):
        reject("text.format.type", f"{quote(of)} is not one of text, json_schema, json_object")
    if of != "json_schema":
        return {"response_format": {"type": of}}
    return {"response_format": {"type": of, of: {key: form[key] for key in form if key != "type"}}}


def _effort(given: Mapping[str, Any], chat: dict[str, Any], host: ModelInfo) -> str | None:
    """Sets what the model's template has for `reasoning.effort`, and gives the effort that is applied.

    It is a hint that some clients always send, so a template without such a thing is a warning only; the
    response then says null.
    """
    effort: str | None = given.get("reasoning", {}).get("effort")
    if effort is None:
        return None
    known = find_template_variables(host.chat_template or "")
    arguments = chat.get("chat_template_kwargs", {})
    switch = next((name for name in REASONING_SWITCHES if name in known), None)
    if switch is not None and (effort == "none" or "reasoning_effort" not in known):
        chat["chat_template_kwargs"] = {switch: effort != "none", **arguments}
    elif "reasoning_effort" in known and "reasoning_effort" not in arguments:
        chat["reasoning_effort"] = effort
    else:
        warn_once("/v1/responses: the chat template knows no reasoning.effort; it is not applied")
        return None
    return effort


# Messages.


@dataclass(slots=True)
class _Turns:
    messages: list[dict[str, Any]] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)
    open: bool = False  # the last message is the assistant's, and more of its turn may come

    def add(self, message: dict[str, Any], param: str) -> None:
        self.paths[f"messages[{len(self.messages)}]"] = param
        self.messages.append(message)
        self.open = message["role"] == "assistant"

    def assistant(self, key: str, param: str, after: tuple[str, ...] = ()) -> dict[str, Any]:
        """The assistant's message that is to get `key`: the open one, unless it has that or `after`."""
        if not self.open or any(each in self.messages[-1] for each in (key, *after)):
            self.add({"role": "assistant"}, param)
        self.paths[f"messages[{len(self.messages) - 1}].{key}"] = f"{param}.content"
        return self.messages[-1]


def _turns(items: Sequence[InputItem], instructions: str | None) -> _Turns:
    turns = _Turns()
    if instructions:
        turns.add({"role": "system", "content": instructions}, "instructions")
        turns.paths["messages[0].content"] = "instructions"
    for placed in items:
        item, param = placed.item, placed.param
        of = item["type"]
        if of == "reasoning":
            _thought(turns, item, param)
        elif of in ("function_call", "custom_tool_call"):
            _call(turns, item, param)
        elif of == "message" and item["role"] == "assistant":
            text = _plain(item["content"], f"{param}.content")
            turns.assistant("content", param, ("tool_calls",))["content"] = text
        elif of == "message":
            turns.add({"role": item["role"], "content": _content(turns, item["content"], param)}, param)
        else:
            turns.paths[f"messages[{len(turns.messages)}].content"] = f"{param}.output"
            output = item["output"]
            content = output if isinstance(output, str) else _plain(output, f"{param}.output")
            turns.add({"role": "tool", "tool_call_id": item["call_id"], "content": content}, param)
    return turns


def _thought(turns: _Turns, item: Item, param: str) -> None:
    """The thought in full if it is there, else its summary; nothing if there is neither."""
    text = "".join(part["text"] for part in item.get("content") or item.get("summary") or ())
    if text:
        turns.assistant("reasoning_content", param, ("content", "tool_calls"))["reasoning_content"] = text


def _call(turns: _Turns, item: Item, param: str) -> None:
    if not turns.open:
        turns.add({"role": "assistant"}, param)
    calls = turns.messages[-1].setdefault("tool_calls", [])
    where = f"messages[{len(turns.messages) - 1}].tool_calls[{len(calls)}]"
    turns.paths[where] = param
    arguments = item.get("arguments")
    if item["type"] == "custom_tool_call":
        arguments = json.dumps({"input": item["input"]}, ensure_ascii=False)
    function = {"name": make_visible_name(item["name"], item.get("namespace")), "arguments": arguments}
    calls.append({"id": item["call_id"], "type": "function", "function": function})


def _content(turns: _Turns, parts: Sequence[Item], param: str) -> str | list[dict[str, Any]]:
    """One string, unless there are images."""
    if all(part["type"] != "input_image" for part in parts):
        return _plain(parts, f"{param}.content")
    content: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == "input_image":
            image = {"url": part["image_url"], "detail": part["detail"]}
            detail = f"messages[{len(turns.messages)}].content[{len(content)}].image_url.detail"
            turns.paths[detail] = f"{param}.content[{len(content)}].detail"
            content.append({"type": "image_url", "image_url": image})
        else:
            content.append({"type": "text", "text": _words(part)})
    return content


def _plain(parts: Sequence[Item], param: str) -> str:
    for i, part in enumerate(parts):
        if part["type"] == "input_image":
            reject_unsupported(f"{param}[{i}].type", "images are taken in user messages only")
    return "".join(_words(part) for part in parts)


def _words(part: Item) -> str:
    return str(part["refusal"] if part["type"] == "refusal" else part["text"])


# Errors.


def rename_error_field(error: RequestError, paths: Mapping[str, str]) -> RequestError:
    """The same error with the sender's field in place of the chat body's."""
    if error.param is None:
        return error
    param = _path(error.param, paths)
    text = str(error)
    if text.startswith(f"{error.param}:"):
        text = param + text[len(error.param) :]
    return type(error)(text, param=param, code=error.code)


def _path(param: str, paths: Mapping[str, str]) -> str:
    fits = [prefix for prefix in paths if param == prefix or param.startswith((f"{prefix}.", f"{prefix}["))]
    if not fits:
        return param
    longest = max(fits, key=len)
    return paths[longest] + _INNER.sub("", param[len(longest) :])
