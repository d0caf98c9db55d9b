"""Runs Inspect tasks and single requests with a model over HTTP and with the same model in this process."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from inspect_ai import Epochs, Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessageUser,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Model,
    ModelOutput,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import choice, includes, match
from inspect_ai.solver import generate, multiple_choice, system_message, use_tools
from inspect_ai.tool import Tool, tool
from inspect_ai.util import JSONSchema

from mlxrun.evals.harnesses import inspect_provider

SUM = "What is 12 + 30?"
COUNT = "1 2 3"  # which the embedded model has no certain answer to
SETTINGS = {"engine.reproducible": True, "model.context_length": 2048}


@tool
def fetch_weather() -> Tool:
    async def execute(place: str) -> str:
        """Get the weather in a city.

        Args:
            place: The name of the city.
        """
        return f"It is sunny in {place}."

    return execute


def make_tasks(picture: str) -> dict[str, Task]:
    look = [ContentImage(image=picture), ContentText(text="What colour is the circle?")]
    sums = [Sample(id=f"{a}", input=f"What is {a} + 30?", target="42") for a in (12, 25)]
    epochs = Epochs(3, ["mean", "at_least_2"])
    return {
        "sums": Task(
            sums, solver=[system_message("You are helpful."), generate()], scorer=match("any"), epochs=epochs
        ),
        "agent": Task(
            [Sample(input="How is the weather in Dublin?", target="Dublin")],
            solver=[use_tools(fetch_weather()), generate()],
            scorer=includes(),
            message_limit=8,
        ),
        "choices": Task(
            [Sample(input=SUM, choices=["40", "42"], target="B")], solver=multiple_choice(), scorer=choice()
        ),
        "images": Task([Sample(input=[ChatMessageUser(content=look)], target="red")], scorer=includes()),
    }


def run_task(task: Task, model: Model) -> Any:
    (log,) = eval(task, model=model, display="none", max_tokens=60, temperature=0.0)
    assert log.status == "success" and log.samples and log.results, log.error
    samples = sorted(log.samples, key=lambda sample: (str(sample.id), sample.epoch))
    return {
        "metrics": {score.name: score.metrics["accuracy"].value for score in log.results.scores},
        "samples": [
            {
                "messages": [describe_message(message) for message in sample.messages],
                "scores": [score.value for score in (sample.scores or {}).values()],
                "output": describe_output(sample.output),
            }
            for sample in samples
        ],
    }


def describe_message(message: Any) -> Any:
    calls = [
        (call.function, call.arguments, call.parse_error) for call in message.__dict__.get("tool_calls") or []
    ]
    reasoning = [part.reasoning for part in message.content if isinstance(part, ContentReasoning)]
    return [message.role, message.text, reasoning, calls]


def describe_output(output: ModelOutput) -> Any:
    assert output.usage is not None
    return {
        "choices": [
            [
                describe_message(one.message),
                one.stop_reason,
                one.logprobs and one.logprobs.model_dump(),
                one.prompt_logprobs and one.prompt_logprobs.model_dump(),
            ]
            for one in output.choices
        ],
        "usage": [output.usage.output_tokens, output.usage.total_tokens, output.usage.reasoning_tokens],
    }


SKY = JSONSchema(
    type="object",
    properties={"sky": JSONSchema(enum=["sunny"])},
    required=["sky"],
    additionalProperties=False,
)
WILD: dict[str, Any] = {"temperature": 2.0, "seed": 7, "max_tokens": 8}
THINKING: dict[str, Any] = {
    "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    "temperature": 0.0,
}
PENALTIES = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "top_p": 0.9}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "n": (COUNT, WILD | {"num_choices": 3}),
    "logprobs": (SUM, {"logprobs": True, "top_logprobs": 2, "temperature": 0.0}),
    "stop": (SUM, {"stop_seqs": ["2"], "temperature": 0.0}),
    "seed": (COUNT, WILD),
    "max_tokens": (SUM, {"temperature": 0.0, "max_tokens": 1}),
    "bias": (SUM, {"logit_bias": {19: -100}, "temperature": 0.0, "max_tokens": 8}),
    "penalties": (
        "Repeat: a a a a",
        WILD | PENALTIES,
    ),
    "reasoning": ("What is 12 + 30 + 5?", THINKING),
    "prompt_logprobs": (SUM, {"prompt_logprobs": 2, "temperature": 0.0, "max_tokens": 1}),
    "schema": (SUM, {"response_schema": ResponseSchema(name="sky", json_schema=SKY, strict=True)}),
    "too_long": ("word " * 3000, {}),
    "refused": (SUM, {"extra_body": {"top_k": -7}}),
}


async def run_requests(model: Model, names: list[str]) -> Any:
    found = {}
    for name in names:
        text, settings = REQUESTS[name]
        try:
            output = await model.generate(text, config=GenerateConfig(**settings))
            usage = output.usage is not None
            found[name] = describe_output(output) if usage else [output.stop_reason, output.completion]
        except Exception as error:
            found[name] = [type(error).__name__, "top_k" in str(error)]
    return found


async def run_own(model: Model) -> Any:
    """What only the provider in this process can do."""
    config = GenerateConfig(temperature=2.0, max_tokens=8)
    wild = [(await model.generate(COUNT, config=config)).completion for _ in range(2)]
    other = get_model("mlxrun/embedded", memoize=False, **SETTINGS)
    again = [(await other.generate(COUNT, config=config)).completion for _ in range(2)]
    refused = []
    for settings in ({"effort": "low"}, {"modalities": ["image"]}):
        try:
            await model.generate(SUM, config=GenerateConfig(**settings))
        except Exception as error:
            refused.append(str(error))
    tokens = await model.api.tokenize(SUM)
    return {
        "wild": wild,
        "again": again,
        "refused": refused,
        "tokens": len(tokens),
        "count": await model.api.count_text_tokens(SUM),
    }


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    models = {
        "http": get_model("openai-api/mlxrun/embedded", base_url=given["url"], api_key="none"),
        "local": get_model("mlxrun/embedded", **SETTINGS),
    }
    results: dict[str, Any] = {
        name: {
            "tasks": {key: run_task(task, model) for key, task in make_tasks(given["picture"]).items()},
            "requests": asyncio.run(run_requests(model, list(REQUESTS))),
        }
        for name, model in models.items()
    }
    results["own"] = asyncio.run(run_own(models["local"]))
    build = inspect_provider.build_chat_body
    inspect_provider.build_chat_body = lambda *rest: build(*rest) | {"stop": []}
    results["broken"] = asyncio.run(run_requests(models["local"], ["stop"]))
    print(json.dumps(results), flush=True)


main()
