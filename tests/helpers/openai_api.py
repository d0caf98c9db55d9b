"""Short ways to prepare, refuse and answer bodies of OpenAI's chat completions and completions."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mlxrun.api.choice import Choice
from mlxrun.api.openai.request import prepare_request
from mlxrun.api.parsers.delta import Delta
from mlxrun.api.prepared import ApiContext, PreparedRequest
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.config.settings import (
    Config,
)
from mlxrun.core.errors import RequestError
from mlxrun.core.request import FinishReason, TokenEvent, TokenLogprob
from tests.helpers.tokenizers import (
    FakeModelInfo,
    ids_of,
)

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


HI = [{"role": "user", "content": "hi"}]


TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}


MODEL_INFO = FakeModelInfo()


def make(
    url: str,
    body: Any,
    model_info: FakeModelInfo = MODEL_INFO,
    config: Config | None = None,
    base: Path | None = None,
    **options: Any,
) -> PreparedRequest:
    config = config or Config()

    async def run() -> PreparedRequest:
        return await prepare_request(
            url, body, ApiContext(model_info, config, MediaLoader(config.media, base)), **options
        )

    return asyncio.run(run())


def chat(
    model_info: FakeModelInfo = MODEL_INFO, config: Config | None = None, **fields: Any
) -> PreparedRequest:
    return make(CHAT, {"messages": HI, **fields}, model_info, config)


def complete(
    model_info: FakeModelInfo = MODEL_INFO, config: Config | None = None, **fields: Any
) -> PreparedRequest:
    return make(COMPLETION, {"prompt": "hi", **fields}, model_info, config)


def refused(
    url: str, body: Any, model_info: FakeModelInfo = MODEL_INFO, config: Config | None = None, **options: Any
) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make(url, body, model_info, config, **options)
    return caught.value


def join(deltas: Sequence[Delta]) -> str:
    """The text of deltas that are all text."""
    assert all(delta.kind == "content" for delta in deltas)
    return "".join(delta.text for delta in deltas)


def answer(prepared: PreparedRequest, *texts: str, finish: FinishReason = FinishReason.STOP) -> list[Choice]:
    """A Choice for each request, all tokens of a text in one event."""
    choices = []
    for index, text in enumerate(texts):
        choice = Choice(prepared, index, MODEL_INFO)
        choice.feed(TokenEvent("r", ids_of(text), finish=finish))
        choices.append(choice)
    return choices


def image_part(colour: str) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2), colour).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def logged(text: str) -> tuple[TokenLogprob, ...]:
    ids = ids_of(text)
    return tuple(TokenLogprob(-0.5 - i, ((t, -0.5 - i), (228, float("-inf")))) for i, t in enumerate(ids))
