"""Prepares bodies of Ollama's endpoints, by translating them to bodies of OpenAI's.

So a conversation has the same prompt on all surfaces. `num_predict` is an upper limit, as clients send it
without knowing the prompt's length. Calls and results need no ids. A result belongs to the first call without
one that has its name, or else to the first call without one. A refused body is a RequestError that names
Ollama's field.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlxrun.api.ollama.fields import BODIES, CHAT_PATH, EMBED_PATH, SAME_OPTIONS
from mlxrun.api.openai.fields import CHAT_URL, COMPLETION_URL
from mlxrun.api.openai.pooled import EMBEDDING_URL, PreparedPooling, prepare_pooling
from mlxrun.api.openai.pooled_texts import check_generates, find_pooled_model
from mlxrun.api.openai.request import prepare_request
from mlxrun.api.prepared import ApiContext, PreparedRequest
from mlxrun.api.text.ignored_fields import log_ignored
from mlxrun.api.text.messages import Message
from mlxrun.api.text.model_info import ModelInfo, choose_adapter, list_names
from mlxrun.core.field_errors import (
    check_type,
    find_source,
    quote,
    reject,
    reject_choice,
    reject_unsupported,
    rename_fields,
)

Json = dict[str, Any]

LATEST = ":latest"  # the tag of a name that has none
_DURATION = re.compile(r"(-?)((?:\d+(?:\.\d+)?(?:ms|s|m|h))+|0)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_EFFORTS = {"max": "high"}  # templates know low, medium and high
_SOURCES = {
    **{name: f"options.{option}" for option, name in SAME_OPTIONS.items()},
    **dict.fromkeys(("response_format", "response_format.json_schema"), "format"),
    **dict.fromkeys(("response_format.json_schema.schema", "response_format.type"), "format"),
    **dict.fromkeys(("structured_outputs", "structured_outputs.json"), "format"),
    **dict.fromkeys(("reasoning_effort", "enable_thinking", "chat_template_kwargs"), "think"),
}


class OllamaMessages:
    """The messages of a chat body. `sources`: the path in Ollama's body of each path in the chat body."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.sources: dict[str, str] = {}
        self._waiting: list[tuple[str, Any]] = []  # id and name of the calls that have no result yet
        self._count = 0  # of calls

    def add(self, value: Any, source: str) -> None:
        """Add a message of /api/chat at the path `source`. RequestError if its fields have wrong types."""
        message = dict(check_type(value, dict, source))
        role, images = message.get("role"), message.pop("images", None)
        if isinstance(role, str):
            role = message["role"] = role.lower()
        content = message.get("content")
        text = "" if content is None else check_type(content, str, f"{source}.content")
        name = message.pop("tool_name", None)
        if name is not None:
            message["name"] = check_type(name, str, f"{source}.tool_name")
            self.sources[f"messages[{len(self.messages)}].name"] = f"{source}.tool_name"
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message["tool_calls"] = [self._add_call(call) for call in calls]
        if role == "tool":
            message["tool_call_id"] = self._find_call(message.get("tool_call_id"), message.get("name"))
        self.add_text(message, text, images, source, f"{source}.images")

    def add_text(self, message: Message, text: str, images: Any, source: str, images_source: str) -> None:
        """Add a message with this text, behind its images. The paths of text and images are named."""
        at = f"messages[{len(self.messages)}]"
        self.sources[at] = source
        content: Any = text
        if images:
            content = []
            for i, data in enumerate(check_type(images, list, images_source)):
                where = f"{images_source}[{i}]"
                encoded = check_type(data, str, where)
                for line_break in "\r\n":  # which Ollama accepts
                    encoded = encoded.replace(line_break, "")
                url = f"data:image/png;base64,{encoded}"
                content.append({"type": "image_url", "image_url": {"url": url}})
                for path in ("", ".type", ".image_url", ".image_url.url"):
                    self.sources[f"{at}.content[{i}]{path}"] = where
            if text:
                self.sources[f"{at}.content[{len(content)}].text"] = f"{source}.content"
                content.append({"type": "text", "text": text})
        self.messages.append({**message, "content": content})

    def _add_call(self, call: Any) -> Any:
        """The call with an id. One that is no object is refused where all chat messages are read."""
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return call
        self._count += 1
        # Some chat templates insist on ids of nine letters and digits.
        call_id = call.get("id") or f"call{self._count:05}"
        self._waiting.append((call_id, function.get("name")))
        own = {key: value for key, value in function.items() if key != "index"}
        return {**call, "id": call_id, "function": own}

    def _find_call(self, call_id: Any, name: Any) -> Any:
        """The id of the call that a result is of."""
        if call_id is None:
            named = [each for each in self._waiting if each[1] == name]
            call_id = next((each[0] for each in named or self._waiting), "call00000")
        self._waiting = [each for each in self._waiting if each[0] != call_id]
        return call_id


@dataclass(frozen=True, slots=True)
class OllamaRequest:
    """A checked body. `url`, `translated`: the OpenAI body that it became; empty if the client only wants the
    model to be loaded. `max_tokens`: None if the client sets no limit. `sources`: the path in Ollama's body
    of each path in `translated`."""

    url: str
    translated: Json
    sources: Mapping[str, str]
    max_tokens: int | None = None


def read_keep_alive(value: Any) -> float | None:
    """Read `keep_alive`, a number of seconds or a duration such as `1h30m`. Returns the seconds that a model
    stays loaded without requests; None, for a negative value: for ever. RequestError for anything else."""
    if isinstance(value, str):
        found = _DURATION.fullmatch(value)
        if found is None:
            reject("keep_alive", f"{quote(value)} is not a duration such as 5m or 1h30m")
        steps = re.findall(r"([\d.]+)(ms|s|m|h)", found[2])
        value = sum(float(number) * _UNITS[unit] for number, unit in steps) * (-1 if found[1] else 1)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        reject("keep_alive", "is neither a number of seconds nor a duration such as 5m")
    return None if value < 0 else float(value)


async def prepare_answer(path: str, body: Any, context: ApiContext) -> PreparedRequest | None:
    """Check a body of /api/chat or /api/generate and build its prompt. None: it has no prompt, so the client
    only wants the model to be loaded. RequestError if the body is refused."""
    wanted = await asyncio.to_thread(read_ollama_request, path, body, context)
    if not wanted.translated:
        return None
    limited = context if wanted.max_tokens is None else context.without_max_tokens()
    with rename_fields(lambda param: "".join(find_source(param, wanted.sources))):
        return await prepare_request(
            wanted.url, wanted.translated, limited, default_max_tokens=wanted.max_tokens, stream=True
        )


def read_ollama_request(path: str, body: Any, context: ApiContext) -> OllamaRequest:
    """Check a body of /api/chat or /api/generate and translate it. RequestError if a field is wrong."""
    given = BODIES[path].check(body, strict=context.config.server.strict_fields)
    model_info = context.model_info
    name = check_model(given.get("model"), model_info)
    check_generates(model_info)
    chat = OllamaMessages()
    if path == CHAT_PATH:
        for i, message in enumerate(given.get("messages", [])):
            chat.add(message, f"messages[{i}]")
        is_raw = False
    else:
        is_raw = _is_raw(given, model_info)
        if given.get("prompt") and not is_raw:
            _add_prompt(chat, given)
    sources = {**_SOURCES, **chat.sources}
    if not chat.messages and not (is_raw and given.get("prompt")):
        return OllamaRequest(CHAT_URL, {}, sources)
    options: Json = given.get("options", {})
    limit = options.get("num_predict", 0)
    translated = {"model": name, "stream": given.get("stream", True)}
    translated |= _translate_options(options) | _translate_logprobs(given, is_raw)
    translated |= _translate_format(given.get("format"), is_raw)
    if is_raw:
        translated |= {key: given[key] for key in ("prompt", "suffix") if given.get(key)}
        if given.get("think"):
            log_ignored("think", "a prompt without a chat template has no reasoning of its own")
    else:
        translated |= {"messages": chat.messages, **_translate_tools(given), **_translate_think(given)}
    url = COMPLETION_URL if is_raw else CHAT_URL
    return OllamaRequest(url, translated, sources, limit if limit > 0 else None)


def check_model(name: str | None, model_info: ModelInfo) -> str:
    """Return a name of the model as other surfaces have it: without the tag that Ollama adds. RequestError if
    there is no name, NotFound if it is not served."""
    if not name:
        reject("model", "is required", code="missing_field")
    known = (*list_names(model_info), *model_info.aliases)
    found = name if name in known else name.removesuffix(LATEST)
    choose_adapter(found, model_info)
    return found


def _is_raw(given: Mapping[str, Any], model_info: ModelInfo) -> bool:
    """Whether the prompt reaches the model as it is: it asks for that, or for what comes before `suffix`, or
    the model has no chat template, as base models."""
    reasons = {"raw": given.get("raw"), "suffix": given.get("suffix")}
    reason = next((name for name, value in reasons.items() if value), None)
    is_plain = model_info.chat_template is None and not given.get("system") and not given.get("images")
    if reason is not None:
        for name in ("system", "images"):
            if given.get(name):
                reject_unsupported(name, f"not together with {reason}, which takes the prompt as it is")
    return reason is not None or is_plain


def _add_prompt(chat: OllamaMessages, given: Mapping[str, Any]) -> None:
    """The messages of a body of /api/generate."""
    if given.get("system"):
        chat.add_text({"role": "system"}, given["system"], None, "system", "system")
        chat.sources["messages[0].content"] = "system"
    at = f"messages[{len(chat.messages)}]"
    chat.add_text({"role": "user"}, given["prompt"], given.get("images"), "prompt", "images")
    texts = len(given.get("images") or ())
    chat.sources |= dict.fromkeys((f"{at}.content", f"{at}.content[{texts}].text", "messages"), "prompt")


def _translate_options(options: Json) -> Json:
    found = {name: options[option] for option, name in SAME_OPTIONS.items() if option in options}
    if found.get("seed") == -1:  # a random one
        del found["seed"]
    return found


def _translate_logprobs(given: Json, is_raw: bool) -> Json:
    top = given.get("top_logprobs", 0)
    if top and not given.get("logprobs"):
        reject("top_logprobs", 'needs "logprobs": true')
    if not given.get("logprobs"):
        return {}
    return {"logprobs": top} if is_raw else {"logprobs": True, "top_logprobs": top}


def _translate_format(wanted: Any, is_raw: bool) -> Json:
    """The fields of a response format: `json`, or a JSON schema."""
    if wanted is None or wanted == "":
        return {}
    if isinstance(wanted, str) and wanted != "json":
        reject_choice("format", wanted, ("json", "a JSON schema"))
    if is_raw:
        return {"structured_outputs": {"json_object": True} if wanted == "json" else {"json": wanted}}
    if wanted == "json":
        return {"response_format": {"type": "json_object"}}
    schema = {"name": "format", "schema": wanted}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _translate_tools(given: Json) -> Json:
    """The tools, whose `type` may be missing."""
    tools = [
        {"type": "function", **{key: item for key, item in tool.items() if item is not None}}
        if isinstance(tool, dict)
        else tool
        for tool in given.get("tools", [])
    ]
    return {"tools": tools} if tools else {}


def _translate_think(given: Json) -> Json:
    wanted = given.get("think")
    if isinstance(wanted, str):
        return {"reasoning_effort": _EFFORTS.get(wanted, wanted)}
    return {} if wanted is None else {"enable_thinking": wanted}


async def prepare_embeddings(path: str, body: Any, context: ApiContext) -> PreparedPooling | None:
    """Check a body of /api/embed or /api/embeddings and tokenize its texts. None: it has no text.
    RequestError if it is refused."""
    given = BODIES[path].check(body, strict=context.config.server.strict_fields)
    name = check_model(given.get("model"), context.model_info)
    find_pooled_model(context.model_info, "embed")
    field = "input" if path == EMBED_PATH else "prompt"
    texts = given.get(field) or []
    if not texts:
        return None
    if isinstance(texts, list):
        for i, text in enumerate(texts):
            check_type(text, str, f"input[{i}]")
    translated: Json = {"model": name, "input": texts}
    if given.get("truncate", path == EMBED_PATH):
        translated["truncate_prompt_tokens"] = -1
    if given.get("dimensions"):
        translated["dimensions"] = given["dimensions"]
    sources = {"input": field, "truncate_prompt_tokens": "truncate"}
    with rename_fields(lambda param: "".join(find_source(param, sources))):
        return await prepare_pooling(EMBEDDING_URL, translated, context)
