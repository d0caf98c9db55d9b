"""openai-agents: an agent with tools, over chat/completions and over responses."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import CHAT, LOOK, QUESTION, STRUCTURED, TOOLS, Server, main, make_forecast_class
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent

set_tracing_disabled(True)


class Chat:
    model_class: Any = OpenAIChatCompletionsModel

    def __init__(self, server: Server) -> None:
        self.server = server

    def make_agent(self, **more: Any) -> Agent[Any]:
        client = AsyncOpenAI(base_url=self.server.v1, api_key="none", max_retries=0)
        return Agent(name="helper", model=self.model_class("m", client), **more)

    async def run(self, what: Any, **more: Any) -> Any:
        return (await Runner.run(self.make_agent(**more), what)).final_output

    async def chat(self) -> Any:
        return await self.run(CHAT)

    async def stream(self) -> Any:
        result = Runner.run_streamed(self.make_agent(), CHAT)
        events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        return [event.delta for event in events if isinstance(event, ResponseTextDeltaEvent)]

    async def tools(self) -> Any:
        return await self.run(QUESTION, tools=[function_tool(tool) for tool in TOOLS])

    async def structured(self) -> Any:
        return (await self.run(STRUCTURED, output_type=make_forecast_class())).model_dump()

    async def images(self) -> Any:
        return [await self.look(colour) for colour in ("red", "blue")]

    async def look(self, colour: str) -> Any:
        image = {"type": "input_image", "image_url": self.server.pictures[colour], "detail": "auto"}
        return await self.run([{"role": "user", "content": [{"type": "input_text", "text": LOOK}, image]}])


class Responses(Chat):
    model_class = OpenAIResponsesModel


main(chat=Chat, responses=Responses)
