"""LangChain: its chat models for OpenAI's APIs and for Anthropic's."""

from __future__ import annotations

from typing import Any

from common import CHAT, LOOK, QUESTION, RUN, STRUCTURED, TOOLS, Server, main, make_forecast_class
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


class Openai:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.model = self.make_model()

    def make_model(self) -> Any:
        return ChatOpenAI(base_url=self.server.v1, api_key="none", model="m")

    def chat(self) -> Any:
        return self.model.invoke(CHAT).text

    def stream(self) -> Any:
        return [chunk.text for chunk in self.model.stream(CHAT) if chunk.text]

    def tools(self) -> Any:
        bound = self.model.bind_tools([tool(one) for one in TOOLS])
        messages: list[Any] = [HumanMessage(QUESTION)]
        while True:
            answer = bound.invoke(messages)
            if not answer.tool_calls:
                return answer.text
            messages.append(answer)
            for call in answer.tool_calls:
                messages.append(ToolMessage(RUN[call["name"]](**call["args"]), tool_call_id=call["id"]))

    def structured(self) -> Any:
        return self.model.with_structured_output(make_forecast_class()).invoke(STRUCTURED).model_dump()

    def images(self) -> Any:
        return [self.look(colour) for colour in ("red", "blue")]

    def look(self, colour: str) -> Any:
        image = {"type": "image", "base64": self.server.get_base64(colour), "mime_type": "image/png"}
        return self.model.invoke([HumanMessage([{"type": "text", "text": LOOK}, image])]).text


class Responses(Openai):
    def make_model(self) -> Any:
        return ChatOpenAI(base_url=self.server.v1, api_key="none", model="m", use_responses_api=True)


class Anthropic(Openai):
    def make_model(self) -> Any:
        return ChatAnthropic(base_url=self.server.url, api_key="none", model="claude-m", max_tokens=200)


main(openai=Openai, responses=Responses, anthropic=Anthropic)
