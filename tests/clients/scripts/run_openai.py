"""OpenAI's own package: chat/completions and responses."""

from __future__ import annotations

import json
from typing import Any

from common import CHAT, FUNCTIONS, LOOK, QUESTION, RUN, STRUCTURED, Server, main, make_forecast_class
from openai import AsyncOpenAI, OpenAI


class Chat:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.client = OpenAI(base_url=server.v1, api_key="none", max_retries=0)
        self.later = AsyncOpenAI(base_url=server.v1, api_key="none", max_retries=0)

    def ask(self, content: Any, **more: Any) -> Any:
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        return self.client.chat.completions.create(model="m", messages=messages, **more)

    def chat(self) -> Any:
        return self.ask(CHAT).choices[0].message.content

    async def stream(self) -> Any:
        messages: Any = [{"role": "user", "content": CHAT}]
        deltas = []
        async for chunk in await self.later.chat.completions.create(
            model="m", messages=messages, stream=True
        ):
            deltas += [choice.delta.content for choice in chunk.choices if choice.delta.content]
        return deltas

    def tools(self) -> Any:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            message = self.ask(messages, tools=FUNCTIONS).choices[0].message
            if not message.tool_calls:
                return message.content
            messages.append(message)  # as it came, with what the package does not know
            for call in message.tool_calls:
                content = RUN[call.function.name](**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    def structured(self) -> Any:
        messages: Any = [{"role": "user", "content": STRUCTURED}]
        found = self.client.chat.completions.parse(
            model="m", messages=messages, response_format=make_forecast_class()
        )
        return found.choices[0].message.parsed.model_dump()

    def images(self) -> Any:
        return [self.look(colour) for colour in ("red", "blue")]

    def look(self, colour: str) -> Any:
        image = {"type": "image_url", "image_url": {"url": self.server.pictures[colour], "detail": "low"}}
        content = [{"type": "text", "text": LOOK}, image]
        return self.ask([{"role": "user", "content": content}]).choices[0].message.content


class Responses(Chat):
    def ask(self, content: Any, **more: Any) -> Any:
        return self.client.responses.create(model="m", input=content, **more)

    def chat(self) -> Any:
        return self.ask(CHAT).output_text

    async def stream(self) -> Any:
        events = await self.later.responses.create(model="m", input=CHAT, stream=True)
        return [event.delta async for event in events if event.type == "response.output_text.delta"]

    def tools(self) -> Any:
        functions = [{"type": "function", **tool["function"], "strict": True} for tool in FUNCTIONS]
        items: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            response = self.ask(items, tools=functions, store=False, include=["reasoning.encrypted_content"])
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            items += response.output
            for call in calls:
                output = RUN[call.name](**json.loads(call.arguments))
                items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})

    def structured(self) -> Any:
        found = self.client.responses.parse(model="m", input=STRUCTURED, text_format=make_forecast_class())
        return found.output_parsed.model_dump()

    def look(self, colour: str) -> Any:
        image = {"type": "input_image", "image_url": self.server.pictures[colour], "detail": "low"}
        content = [{"type": "input_text", "text": LOOK}, image]
        return self.ask([{"role": "user", "content": content}]).output_text


main(chat=Chat, responses=Responses)
