"""Inspect: a model of an OpenAI-compatible or Anthropic's API, its loop of tools, and an evaluation."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from common import CHAT, LOOK, QUESTION, STRUCTURED, TOOLS, Server, main, make_forecast_class

os.environ["INSPECT_LOG_DIR"] = tempfile.mkdtemp()

from inspect_ai import Task, eval  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.model import (  # noqa: E402
    ChatMessageUser,
    ContentImage,
    ContentText,
    GenerateConfig,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import includes  # noqa: E402
from inspect_ai.solver import generate, use_tools  # noqa: E402
from inspect_ai.tool import tool  # noqa: E402
from inspect_ai.util import JSONSchema  # noqa: E402

DAY = JSONSchema(
    type="object",
    properties={"sky": JSONSchema(enum=["sunny"]), "warm": JSONSchema(enum=[True])},
    required=["sky", "warm"],
    additionalProperties=False,
)
FORECAST_SCHEMA = JSONSchema(
    type="object",
    properties={"city": JSONSchema(enum=["Dublin"]), "day": DAY},
    required=["city", "day"],
    additionalProperties=False,
)


def make_tool(function: Any) -> Any:
    """A tool of Inspect is asynchronous, and takes its description from the function."""
    names = ", ".join(
        f"{name}: {kind.__name__ if isinstance(kind, type) else kind}" for name, kind in kinds(function)
    )
    passed = ", ".join(name for name, _ in kinds(function))
    scope: dict[str, Any] = {"function": function}
    exec(f"async def execute({names}) -> str:\n    return function({passed})\n", scope)
    scope["execute"].__doc__ = function.__doc__
    return tool(lambda: scope["execute"], name=function.__name__)()


def kinds(function: Any) -> list[tuple[str, Any]]:
    return [(name, kind) for name, kind in function.__annotations__.items() if name != "return"]


class Chat:
    def __init__(self, server: Server) -> None:
        self.server = server

    def make_model(self, **more: Any) -> Any:
        return get_model("openai-api/local/m", base_url=self.server.v1, api_key="none", memoize=False, **more)

    def chat(self) -> Any:
        """By an evaluation, so that its log and score are there as well."""
        task = Task(dataset=[Sample(input=CHAT, target="42")], solver=generate(), scorer=includes())
        (log,) = eval(task, model=self.make_model(), display="none")
        assert log.status == "success" and log.results and log.samples, log.error
        assert log.results.scores[0].metrics["accuracy"].value == 1
        return log.samples[0].output.completion

    def tools(self) -> Any:
        solver = [use_tools(*(make_tool(one) for one in TOOLS)), generate()]
        task = Task(dataset=[Sample(input=QUESTION)], solver=solver)
        (log,) = eval(task, model=self.make_model(), display="none")
        assert log.status == "success" and log.samples, log.error
        return log.samples[0].output.completion

    async def structured(self) -> Any:
        forecast = make_forecast_class()
        schema = ResponseSchema(name="forecast", json_schema=FORECAST_SCHEMA, strict=True)
        made = await self.make_model().generate(STRUCTURED, config=GenerateConfig(response_schema=schema))
        return forecast.model_validate_json(made.completion).model_dump()

    async def stream(self) -> Any:
        """Inspect shows no deltas; it puts the stream together by itself."""
        return [(await self.make_model(stream=True).generate(CHAT)).completion]

    async def images(self) -> Any:
        return [await self.look(colour) for colour in ("red", "blue")]

    async def look(self, colour: str) -> Any:
        content: Any = [ContentText(text=LOOK), ContentImage(image=self.server.pictures[colour])]
        return (await self.make_model().generate([ChatMessageUser(content=content)])).completion


class Anthropic(Chat):
    def make_model(self, stream: bool = False) -> Any:
        settings = {"api_key": "none", "memoize": False, "streaming": stream or "auto"}
        return get_model("anthropic/claude-m", base_url=self.server.url, **settings)


main(chat=Chat, anthropic=Anthropic)
