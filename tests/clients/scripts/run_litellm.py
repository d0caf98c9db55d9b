"""LiteLLM, by its three providers that fit: openai, hosted_vllm and anthropic."""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm  # noqa: E402
from common import CHAT, FUNCTIONS, LOOK, QUESTION, RUN, STRUCTURED, Server, main, make_forecast_class  # noqa: E402

litellm.telemetry = False


class Openai:
    provider = "openai"

    def __init__(self, server: Server) -> None:
        self.server = server
        self.base = server.v1

    def ask(self, content: Any, **more: Any) -> Any:
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        model = f"{self.provider}/claude-m"
        return litellm.completion(model=model, api_base=self.base, api_key="none", messages=messages, **more)

    def chat(self) -> Any:
        """The second turn, with the first answer as it came."""
        first = self.ask("Hello").choices[0].message
        messages = [
            {"role": "user", "content": "Hello"},
            first.model_dump(),
            {"role": "user", "content": CHAT},
        ]
        return self.ask(messages).choices[0].message.content

    def stream(self) -> Any:
        deltas = [chunk.choices[0].delta.content for chunk in self.ask(CHAT, stream=True)]
        return [delta for delta in deltas if delta]

    def tools(self) -> Any:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        while True:
            chunks = list(self.ask(messages, tools=FUNCTIONS, stream=True))
            message = litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
            if not message.tool_calls:
                return message.content
            messages.append(message.model_dump())
            for call in message.tool_calls:
                content = RUN[call.function.name](**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    def structured(self) -> Any:
        forecast = make_forecast_class()
        text = self.ask(STRUCTURED, response_format=forecast).choices[0].message.content
        return forecast.model_validate_json(text).model_dump()

    def images(self) -> Any:
        return [self.look(colour) for colour in ("red", "blue")]

    def look(self, colour: str) -> Any:
        image = {"type": "image_url", "image_url": {"url": self.server.pictures[colour]}}
        return (
            self.ask([{"role": "user", "content": [{"type": "text", "text": LOOK}, image]}])
            .choices[0]
            .message.content
        )


class HostedVllm(Openai):
    provider = "hosted_vllm"


class Anthropic(Openai):
    provider = "anthropic"

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.base = server.url


main(openai=Openai, hosted_vllm=HostedVllm, anthropic=Anthropic)
