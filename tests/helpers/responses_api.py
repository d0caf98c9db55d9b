"""Short ways to read, refuse and answer bodies of the Responses API."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st

from mlxrun.api.choice import Choice
from mlxrun.api.openai.request import prepare_request
from mlxrun.api.parsers.answer_parser import ModelFormats
from mlxrun.api.parsers.delta import Delta, Parser
from mlxrun.api.prepared import ApiContext, PreparedRequest
from mlxrun.api.responses.fields import HARMLESS, HONOURED
from mlxrun.api.responses.request import (
    ResponseLookup,
    ResponseRequest,
    prepare_response,
    read_response_request,
)
from mlxrun.api.responses.stream import ResponseWriter, build_response
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.config.settings import Config
from mlxrun.core.errors import RequestError
from mlxrun.core.request import FinishReason, TokenEvent
from tests.helpers.tokenizers import TOOLS, FakeModelInfo, ids_of

CHAT = "/v1/chat/completions"


MODEL_INFO = FakeModelInfo()


TOOL_MODEL_INFO = FakeModelInfo(chat_template=TOOLS)


ADD = {"type": "function", "name": "add", "description": "adds", "parameters": {"type": "object"}}


PNG = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1Pe"
    "AAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)


def read(
    model_info: FakeModelInfo = MODEL_INFO, lookup: ResponseLookup | None = None, **body: Any
) -> ResponseRequest:
    return read_response_request({"input": "hi", **body}, model_info, lookup or ResponseLookup(), "t")


def chat(model_info: FakeModelInfo = MODEL_INFO, **body: Any) -> dict[str, Any]:
    return read(model_info, **body).chat


def messages(model_info: FakeModelInfo = MODEL_INFO, **body: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = chat(model_info, **body)["messages"]
    return found


def run(
    body: Mapping[str, Any], model_info: FakeModelInfo = MODEL_INFO, config: Config | None = None
) -> tuple[ResponseRequest, PreparedRequest]:
    """All the way to the prompt; errors name the sender's fields."""
    config = config or Config()
    context = ApiContext(model_info, config, MediaLoader(config.media, None), ModelFormats())
    return asyncio.run(prepare_response(body, context, ResponseLookup(), "t", stream=True))


def refused(model_info: FakeModelInfo = MODEL_INFO, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        run({"input": "hi", **body}, model_info)
    message = str(caught.value)
    assert not re.search(r"messages\[|max_completion_tokens|response_format", message), "the sender's words"
    return caught.value


def user(*content: Any) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": list(content)}


def text(value: str, of: str = "input_text") -> dict[str, Any]:
    return {"type": of, "text": value}


def make_deltas(*pairs: tuple[str, str]) -> list[Delta]:
    """`("content", "a")`, `("reasoning", "b")`, `("call:0:add", '{"a"')`."""
    found: list[Delta] = []
    for kind, value in pairs:
        name, _, rest = kind.partition(":")
        index, _, tool = rest.partition(":")
        found.append(ScriptedDelta(name, value, int(index or 0), f"call_{index}" if tool else "", tool))
    return found


class ScriptedDelta:
    def __init__(self, kind: Any, value: str, index: int, name: str, tool: str) -> None:
        self.kind, self.text, self.index, self.id, self.name = kind, value, index, name, tool


@dataclass(frozen=True)
class ScriptedFormats(ModelFormats):
    """Formats whose parser returns the same deltas whatever the model writes."""

    deltas: Sequence[Delta] = ()

    def make_parser(self, tools: Any, prompt: str, name: str, held_calls: int = 0) -> Parser:
        return ScriptedParser(self.deltas)


class ScriptedParser:
    markers: frozenset[str] = frozenset()

    def __init__(self, deltas: Sequence[Delta]) -> None:
        self.deltas = deltas

    def feed(self, text: str) -> Sequence[Delta]:
        return []

    def finish(self, stopped: bool = False) -> Sequence[Delta]:
        return self.deltas


def write_events(
    deltas: Sequence[Delta], finish: FinishReason = FinishReason.STOP, **body: Any
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """All events of an answer of these deltas, each fed alone, and the response."""
    what = read_response_request({"input": "hi", **body}, TOOL_MODEL_INFO, ResponseLookup(), "t")
    config = Config()
    context = ApiContext(
        TOOL_MODEL_INFO, config, MediaLoader(config.media, None), ScriptedFormats(deltas=deltas)
    )
    prepared = asyncio.run(prepare_request(CHAT, what.chat, context))
    choice = Choice(prepared, 0, TOOL_MODEL_INFO)
    writer = ResponseWriter(build_response("resp_t", 5, what, prepared), what, prepared)
    writer.choice = choice
    events = writer.start()
    for delta in choice.feed(TokenEvent("r", ids_of("ab"), finish=finish)):
        events += writer.feed([delta])
    events += writer.end(7)
    return events, writer.response


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.text(max_size=4)
    | st.sampled_from(["user", "auto"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


PART = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["input_text", "output_text", "input_image", "refusal", "x"]) | JSON,
        "text": st.text(max_size=5) | JSON,
        "image_url": st.just(PNG) | JSON,
    },
)


ITEM = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output"]) | JSON,
        "role": st.sampled_from(["user", "assistant", "system", "developer"]) | JSON,
        "content": st.text(max_size=5) | st.lists(PART, max_size=3) | JSON,
        "call_id": st.text(max_size=3) | JSON,
        "name": st.text(max_size=3) | JSON,
        "arguments": st.sampled_from(["{}", '{"a": 1}', "[", "1"]) | JSON,
        "output": st.text(max_size=3) | st.lists(PART, max_size=2) | JSON,
        "summary": st.lists(PART, max_size=2) | JSON,
        "id": st.text(max_size=3) | JSON,
    },
)


TOOL = st.fixed_dictionaries(
    {"type": st.sampled_from(["function", "custom", "namespace", "web_search", "mcp"]) | JSON},
    optional={"name": st.text(max_size=3) | JSON, "parameters": JSON, "tools": JSON, "format": JSON},
)


BODIES = st.fixed_dictionaries(
    {"input": st.text(max_size=5) | st.lists(ITEM, max_size=4) | JSON},
    optional={name: JSON for name in (*HONOURED, *HARMLESS, "bogus") if name not in ("input", "tools")}
    | {"tools": st.lists(TOOL, max_size=3) | JSON},
)
