"""instructor: answers that match a class, by tools, by a response format, and streamed in parts."""

from __future__ import annotations

from typing import Any

import instructor
from anthropic import Anthropic as AnthropicClient
from common import CHAT, LOOK, STRUCTURED, Server, main, make_forecast_class
from openai import OpenAI


class Tools:
    mode = instructor.Mode.TOOLS

    def __init__(self, server: Server) -> None:
        self.server = server
        client = OpenAI(base_url=server.v1, api_key="none", max_retries=0)
        self.client: Any = instructor.from_openai(client, mode=self.mode)

    def make_fields(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": STRUCTURED}]
        return {"model": "m", "messages": messages, "response_model": make_forecast_class(), "max_retries": 1}

    def chat(self) -> Any:
        """Without a class the client is the plain one."""
        fields = {
            **self.make_fields(),
            "messages": [{"role": "user", "content": CHAT}],
            "response_model": None,
        }
        return self.read_text(self.client.chat.completions.create(**fields))

    def read_text(self, answer: Any) -> Any:
        return answer.choices[0].message.content

    def structured(self) -> Any:
        return self.client.chat.completions.create(**self.make_fields()).model_dump()

    def stream(self) -> Any:
        """The last of the objects that grow; each delta of this case is one of them, as text."""
        fields = self.make_fields()
        parts = list(self.client.chat.completions.create_partial(**fields))
        return [part.model_dump() for part in parts][-1:]

    def images(self) -> Any:
        """By the library's own class for images, without a class for the answer."""
        return [self.look(colour) for colour in ("red", "blue")]

    def look(self, colour: str) -> Any:
        picture = instructor.Image.from_base64(self.server.pictures[colour])
        fields = {**self.make_fields(), "response_model": None}
        fields["messages"] = [{"role": "user", "content": [LOOK, picture]}]
        return self.read_text(self.client.chat.completions.create(**fields))


class JsonSchema(Tools):
    mode = instructor.Mode.JSON_SCHEMA


class Anthropic(Tools):
    def __init__(self, server: Server) -> None:
        self.server = server
        client = AnthropicClient(base_url=server.url, api_key="none", max_retries=0)
        self.client = instructor.from_anthropic(client)

    def make_fields(self) -> dict[str, Any]:
        return {**super().make_fields(), "max_tokens": 200}

    def read_text(self, answer: Any) -> Any:
        return answer.content[0].text


main(tools=Tools, json_schema=JsonSchema, anthropic=Anthropic)
