"""LlamaIndex: its class for servers with OpenAI's API, and an agent that calls functions."""

from __future__ import annotations

from typing import Any

from common import CHAT, LOOK, QUESTION, STRUCTURED, TOOLS, Server, main, make_forecast_class
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike


class Chat:
    def __init__(self, server: Server) -> None:
        self.server = server

    def make_model(self, **more: Any) -> Any:
        known = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 32768}
        return OpenAILike(model="m", api_base=self.server.v1, api_key="none", **known, **more)

    def chat(self) -> Any:
        return self.make_model().chat([ChatMessage(role="user", content=CHAT)]).message.content

    def stream(self) -> Any:
        deltas = self.make_model().stream_chat([ChatMessage(role="user", content=CHAT)])
        return [chunk.delta for chunk in deltas if chunk.delta]

    async def tools(self) -> Any:
        agent = FunctionAgent(tools=list(TOOLS), llm=self.make_model())
        return str(await agent.run(user_msg=QUESTION))

    def structured(self) -> Any:
        """By a response format, which this class has to be told that the server has."""
        model = self.make_model(should_use_structured_outputs=True)
        answer = model.as_structured_llm(make_forecast_class()).chat(
            [ChatMessage(role="user", content=STRUCTURED)]
        )
        return answer.raw.model_dump()

    def images(self) -> Any:
        return [self.look(colour) for colour in ("red", "blue")]

    def look(self, colour: str) -> Any:
        blocks = [TextBlock(text=LOOK), ImageBlock(url=self.server.pictures[colour])]
        return self.make_model().chat([ChatMessage(role="user", blocks=blocks)]).message.content


main(chat=Chat)
