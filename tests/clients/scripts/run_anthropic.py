"""Anthropic's own package: messages, and its runner of tools."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic, AsyncAnthropic, beta_tool
from common import CHAT, LOOK, QUESTION, STRUCTURED, TOOLS, Server, main, make_forecast_class


class Messages:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.client = Anthropic(base_url=server.url, api_key="none", max_retries=0)
        self.later = AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0)

    def ask(self, content: Any) -> Any:
        messages: Any = [{"role": "user", "content": content}]
        return self.client.messages.create(model="m", max_tokens=200, messages=messages)

    def chat(self) -> Any:
        return self.ask(CHAT).content[0].text

    async def stream(self) -> Any:
        messages: Any = [{"role": "user", "content": CHAT}]
        async with self.later.messages.stream(model="m", max_tokens=200, messages=messages) as stream:
            return [text async for text in stream.text_stream]

    def tools(self) -> Any:
        runner = self.client.beta.messages.tool_runner(
            model="m",
            max_tokens=2048,
            thinking={"type": "enabled", "budget_tokens": 1024},
            tools=[beta_tool(tool) for tool in TOOLS],
            messages=[{"role": "user", "content": QUESTION}],
        )
        return runner.until_done().content[-1].text

    def structured(self) -> Any:
        found = self.client.messages.parse(
            model="m",
            max_tokens=200,
            messages=[{"role": "user", "content": STRUCTURED}],
            output_format=make_forecast_class(),
        )
        return found.parsed_output.model_dump()

    def images(self) -> Any:
        return [self.look(colour) for colour in ("red", "blue")]

    def look(self, colour: str) -> Any:
        source = {"type": "base64", "media_type": "image/png", "data": self.server.get_base64(colour)}
        return self.ask([{"type": "image", "source": source}, {"type": "text", "text": LOOK}]).content[0].text


main(messages=Messages)
