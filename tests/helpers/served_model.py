"""The embedded model behind a real server, on a thread of its own, for clients that block; what it is asked,
and how completions are compared."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from aiohttp import web
from PIL import Image, ImageDraw

from mlxrun.api.parsers.registry import detect_formats
from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.config.settings import Config
from mlxrun.engine.client import EngineClient
from mlxrun.model.load.model_info import load_model_info
from mlxrun.server.app import make_app
from mlxrun.server.engine_state import ENGINE, LoadedEngine
from tests.helpers.model_fixtures import choose_once
from tests.helpers.server_fakes import AppView

HELLO = [{"role": "user", "content": "What is 12 + 30?"}]
LONG = [{"role": "user", "content": "Repeat: " + " ".join(f"word{i}" for i in range(40))}]
THINK = [{"role": "user", "content": "What is 12 + 30 + 5?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "fetch_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
DUBLIN = [{"role": "user", "content": "How is the weather in Dublin?"}]


class ModelServer(AppView):
    """A running server: `url` without a path, and what tests look into."""

    def __init__(self, url: str, app: web.Application, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(app)
        self.url = url
        self._loop = loop

    def call(self, what: Any) -> Any:
        """The result of a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(60)


@contextmanager
def run_model_server(
    config: Config, start_client: Callable[..., Awaitable[EngineClient]] = EngineClient.start
) -> Iterator[ModelServer]:
    """A server of `config` on a free port, until the block ends."""
    ready: dict[str, Any] = {}
    started = threading.Event()

    async def run() -> None:
        model_info = load_model_info(config.model, weights=True)
        client = await start_client(config, model_info)
        formats = detect_formats(model_info.chat_template, model_info.tokenizer, config.parsers)
        app = make_app(config)
        context = ApiContext(model_info, config, MediaLoader(config.media, None), formats)
        app[ENGINE].attach(LoadedEngine(client, context, {}))
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        ready["served"] = ModelServer(f"http://127.0.0.1:{runner.addresses[0][1]}", app, loop)
        ready["stop"] = lambda: loop.call_soon_threadsafe(stop.set)
        started.set()
        try:
            await stop.wait()
        finally:
            await runner.cleanup()
            await client.close()

    def thread() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            ready.setdefault("error", error)
        finally:
            started.set()

    running = threading.Thread(target=thread, name="server")
    with mock.patch("mlxrun.model.model_loading.choose_methods", choose_once):
        running.start()
        started.wait(120)
    if "error" in ready:
        raise ready["error"]
    try:
        yield ready["served"]
    finally:
        ready["stop"]()
        running.join(60)
        assert not running.is_alive()
    if "error" in ready:
        raise ready["error"]


def make_image_part(colour: str = "red") -> dict[str, Any]:
    image = Image.new("RGB", (96, 96), "white")
    ImageDraw.Draw(image).ellipse((20, 20, 76, 76), fill=colour)
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def make_image_messages(colour: str = "red") -> list[Any]:
    text = {"type": "text", "text": "What colour is the circle?"}
    return [{"role": "user", "content": [make_image_part(colour), text]}]


def check_same(one: Any, other: Any) -> None:
    """Two completions say the same, but for ids and for what the cache had."""
    for a, b in zip(one.choices, other.choices, strict=True):
        assert (a.index, a.finish_reason) == (b.index, b.finish_reason)
        assert (a.message.content or "") == (b.message.content or "")
        assert getattr(a.message, "reasoning_content", "") == getattr(b.message, "reasoning_content", "")
        assert [(c.function.name, c.function.arguments) for c in a.message.tool_calls or []] == [
            (c.function.name, c.function.arguments) for c in b.message.tool_calls or []
        ]
        assert a.logprobs == b.logprobs or a.logprobs.content == b.logprobs.content
    assert one.model == other.model == "embedded"
    if one.usage and other.usage:
        assert one.usage.completion_tokens == other.usage.completion_tokens
        assert one.usage.completion_tokens_details == other.usage.completion_tokens_details


def summarize(completion: Any) -> Any:
    message = completion.choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return message.content, calls, completion.choices[0].finish_reason
