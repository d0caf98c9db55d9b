"""The package `llm`: a model that extra-openai-models.yaml names."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from common import CHAT, LOOK, QUESTION, STRUCTURED, TOOLS, Server, main, make_forecast_class

os.environ["LLM_USER_PATH"] = tempfile.mkdtemp()

import llm  # noqa: E402

MODELS = """
- model_id: local
  model_name: embedded
  api_base: {url}
  supports_schema: true
  supports_tools: true
  vision: true
"""


class Chat:
    def __init__(self, server: Server) -> None:
        self.server = server
        Path(os.environ["LLM_USER_PATH"], "extra-openai-models.yaml").write_text(MODELS.format(url=server.v1))
        self.model = llm.get_model("local")

    def chat(self) -> Any:
        return self.model.prompt(CHAT, stream=False).text()

    def stream(self) -> Any:
        return [text for text in self.model.prompt(CHAT) if text]

    def tools(self) -> Any:
        return self.model.chain(QUESTION, tools=list(TOOLS)).text()

    def structured(self) -> Any:
        forecast = make_forecast_class()
        text = self.model.prompt(STRUCTURED, schema=forecast).text()
        return forecast.model_validate_json(text).model_dump()

    def images(self) -> Any:
        return [self.look(colour) for colour in ("red", "blue")]

    def look(self, colour: str) -> Any:
        picture = llm.Attachment(content=self.server.get_png(colour), type="image/png")
        return self.model.prompt(LOOK, attachments=[picture], stream=False).text()


main(chat=Chat)
