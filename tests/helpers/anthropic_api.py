"""Short ways to prepare, count and refuse bodies of Anthropic's messages, and bodies that clients send."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from typing import Any

import pytest
from PIL import Image

from mlxrun.api.anthropic.request import PreparedMessage, count_tokens, prepare_message
from mlxrun.api.openai.request import prepare_request
from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.config.settings import Config
from mlxrun.core.errors import RequestError
from tests.helpers.tokenizers import TOOLS, FakeModelInfo

Json = dict[str, Any]


MODEL_INFO = FakeModelInfo()


TOOL_MODEL_INFO = FakeModelInfo(chat_template=TOOLS)


# As TOOLS, with parts and reasoning.
REASONING = TOOLS.replace("m.content }}", "(m.reasoning_content or '') + m.content }}")


EYES = FakeModelInfo(vision=True)


USER = {"role": "user", "content": "hi"}


ADD = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {"a": {}}}}


ADD_CHAT = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": ADD["input_schema"]},
}


CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": [True, None, "x"]}}


CALL_CHAT = {
    "id": "toolu_1",
    "type": "function",
    "function": {"name": "add", "arguments": json.dumps(CALL["input"])},
}


RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}


CALLED = [USER, {"role": "assistant", "content": [CALL]}]


def user(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


def png(colour: str = "red") -> str:
    data = io.BytesIO()
    Image.new("RGB", (4, 4), colour).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


RED = png()


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED}}


IMAGE_CHAT = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{RED}"}}


def context(model_info: FakeModelInfo = MODEL_INFO, config: Config | None = None) -> ApiContext:
    config = config or Config()
    return ApiContext(model_info, config, MediaLoader(config.media, None))


def text(value: str, **more: Any) -> Json:
    return {"type": "text", "text": value, **more}


def body(messages: Any = None, **fields: Any) -> Json:
    return {"model": "m", "max_tokens": 9, "messages": [USER] if messages is None else messages, **fields}


def make(given: Any, model_info: FakeModelInfo = MODEL_INFO, config: Config | None = None) -> PreparedMessage:
    async def run() -> PreparedMessage:
        return await prepare_message(given, context(model_info, config))

    return asyncio.run(run())


def count(given: Json, model_info: FakeModelInfo = MODEL_INFO, config: Config | None = None) -> int:
    async def run() -> Json:
        return await count_tokens(given, context(model_info, config))

    found = asyncio.run(run())
    assert found.keys() == {"input_tokens"}
    return found["input_tokens"]


def prompt(given: Json, model_info: FakeModelInfo = MODEL_INFO, config: Config | None = None) -> str:
    return make(given, model_info, config).prepared.prompts[0]


def chat_prompt(given: Json, model_info: FakeModelInfo = MODEL_INFO) -> str:
    async def run() -> str:
        return (await prepare_request("/v1/chat/completions", given, context(model_info))).prompts[0]

    return asyncio.run(run())


def refused(given: Any, model_info: FakeModelInfo = MODEL_INFO, config: Config | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make(given, model_info, config)
    return caught.value


EPHEMERAL = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
