"""pydantic-ai: an agent with tools, over chat/completions, responses and Anthropic's messages."""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic
from common import CHAT, LOOK, QUESTION, STRUCTURED, TOOLS, Server, main, make_forecast_class
from pydantic_ai import Agent, BinaryContent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Chat:
    def __init__(self, server: Server) -> None:
        self.server = server

    def make_model(self) -> Any:
        return OpenAIChatModel("m", provider=OpenAIProvider(base_url=self.server.v1, api_key="none"))

    def make_agent(self, **more: Any) -> Any:
        return Agent(self.make_model(), **more)

    async def chat(self) -> Any:
        return (await self.make_agent().run(CHAT)).output

    async def stream(self) -> Any:
        async with self.make_agent().run_stream(CHAT) as result:
            return [text async for text in result.stream_text(delta=True, debounce_by=None)]

    async def tools(self) -> Any:
        agent = self.make_agent()
        for tool in TOOLS:
            agent.tool_plain(tool)
        return (await agent.run(QUESTION)).output

    async def structured(self) -> Any:
        """As the library does it by default: by a call of a tool that must be called."""
        return (await self.make_agent(output_type=make_forecast_class()).run(STRUCTURED)).output.model_dump()

    async def images(self) -> Any:
        return [await self.look(colour) for colour in ("red", "blue")]

    async def look(self, colour: str) -> Any:
        picture = BinaryContent(data=self.server.get_png(colour), media_type="image/png")
        return (await self.make_agent().run([LOOK, picture])).output


class Responses(Chat):
    def make_model(self) -> Any:
        return OpenAIResponsesModel("m", provider=OpenAIProvider(base_url=self.server.v1, api_key="none"))

    async def structured(self) -> Any:
        """By a response format."""
        agent = self.make_agent(output_type=NativeOutput(make_forecast_class()))
        return (await agent.run(STRUCTURED)).output.model_dump()


class Anthropic(Chat):
    def make_model(self) -> Any:
        client = AsyncAnthropic(base_url=self.server.url, api_key="none")
        return AnthropicModel("claude-m", provider=AnthropicProvider(anthropic_client=client))


main(chat=Chat, responses=Responses, anthropic=Anthropic)
