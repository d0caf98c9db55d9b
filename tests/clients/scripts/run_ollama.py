"""Ollama's own package, with Python functions as tools."""

from __future__ import annotations

import json
from typing import Any

from common import CHAT, LOOK, QUESTION, RUN, STRUCTURED, TOOLS, Server, main, make_forecast_class
from ollama import AsyncClient, Client, ResponseError


class Chat:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.client = Client(server.url)
        self.later = AsyncClient(server.url)

    def ask(self, content: str, **fields: Any) -> Any:
        return self.client.chat("m", messages=[{"role": "user", "content": content}], **fields).message

    def chat(self) -> Any:
        """By the name of the list; what the other lists say can be read too."""
        (listed,) = self.client.list().models
        (loaded,) = self.client.ps().models
        shown = self.client.show(listed.model)
        assert loaded.model == listed.model and loaded.size_vram == listed.size > 1e6, loaded
        assert {"completion", "tools", "vision", "thinking"} <= set(shown.capabilities), shown
        assert self.client.generate(listed.model).done_reason == "load"
        try:
            self.client.pull(listed.model)
        except ResponseError as error:
            assert error.status_code == 404 and "not supported" in str(error), error
        else:
            raise AssertionError("a model was pulled")
        return self.ask(CHAT, options={"num_predict": 200, "num_ctx": 4096}, keep_alive="5m").content

    async def stream(self) -> Any:
        messages = [{"role": "user", "content": CHAT}]
        parts = [part async for part in await self.later.chat("m", messages=messages, stream=True)]
        assert parts[-1].done and parts[-1].eval_count and parts[-1].eval_duration, parts[-1]
        return [part.message.content for part in parts if part.message.content]

    def tools(self) -> Any:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            answer = self.client.chat("m", messages=messages, tools=TOOLS, think=True).message
            messages.append(answer)
            if not answer.tool_calls:
                return answer.content
            assert answer.thinking, answer
            for call in answer.tool_calls:
                name = call.function.name
                result = RUN[name](**call.function.arguments)
                messages.append({"role": "tool", "content": result, "tool_name": name})

    def structured(self) -> Any:
        schema = make_forecast_class().model_json_schema()
        return json.loads(self.ask(STRUCTURED, format=schema, think=False).content)

    def images(self) -> Any:
        return [self.look(colour) for colour in ("red", "blue")]

    def look(self, colour: str) -> Any:
        image = self.server.get_png(colour)
        messages = [{"role": "user", "content": LOOK, "images": [image]}]
        return self.client.chat("m", messages=messages).message.content


main(chat=Chat)
