"""smolagents: its model class, and an agent that calls tools."""

from __future__ import annotations

import json
from typing import Any

from common import CHAT, LOOK, QUESTION, STRUCTURED, TOOLS, Server, main, make_forecast_class
from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage


class Chat:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.model = OpenAIModel(model_id="m", api_base=server.v1, api_key="none")

    def ask(self, content: Any, **more: Any) -> Any:
        return self.model.generate([ChatMessage(role="user", content=content)], **more).content

    def chat(self) -> Any:
        return self.ask(CHAT)

    def stream(self) -> Any:
        deltas = self.model.generate_stream([ChatMessage(role="user", content=CHAT)])
        return [delta.content for delta in deltas if delta.content]

    def tools(self) -> Any:
        agent = ToolCallingAgent(tools=[tool(one) for one in TOOLS], model=self.model, max_steps=6)
        return agent.run(QUESTION)

    def structured(self) -> Any:
        schema = make_forecast_class().model_json_schema()
        form = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": schema, "strict": True}}
        return json.loads(self.ask(STRUCTURED, response_format=form))

    def images(self) -> Any:
        return [self.look(colour) for colour in ("red", "blue")]

    def look(self, colour: str) -> Any:
        image = {"type": "image_url", "image_url": {"url": self.server.pictures[colour]}}
        return self.ask([{"type": "text", "text": LOOK}, image])


main(chat=Chat)
