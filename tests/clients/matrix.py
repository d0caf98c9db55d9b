"""The client libraries that the server is tried with, and a server whose answers they can be compared
with."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxrun.config.settings import Config, ModelSettings, SamplingSettings, StructuredSettings
from tests.clients.scripts.common import ANSWER, CALLS, FORECAST, QUESTION, RESULTS, STRUCTURED
from tests.helpers.scripted_model import run_scripted_server
from tests.helpers.served_model import ModelServer

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv-clients"
CASES = ("chat", "stream", "tools", "structured", "images")


@dataclass(frozen=True)
class Client:
    """A library and the ways to use it. `script`: in scripts/ or node/. `environment`: one of requirements/,
    or node.

    `missing`: cases that the library has no function for, of all its variants. `limits`: a variant's cases
    that fail through the library's own doing, and how. Both are sentences for the documentation.
    """

    package: str
    script: str
    environment: str
    variants: tuple[str, ...] = ("chat",)
    missing: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[tuple[str, str], str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        """The exact version that is tried."""
        if self.environment == "node":
            versions: dict[str, str] = json.loads((HERE / "node/package.json").read_text())["dependencies"]
            return versions[self.package]
        pins = (HERE / f"requirements/{self.environment}.in").read_text()
        (version,) = re.findall(rf"^{re.escape(self.package)}(?:\[.*\])?==(\S+)$", pins, re.M)
        return str(version)

    @property
    def command(self) -> list[str]:
        if self.environment == "node":
            return ["node", str(HERE / "node" / self.script)]
        return [str(ENVIRONMENTS / self.environment / "bin/python"), str(HERE / "scripts" / self.script)]


CLIENTS = (
    Client("openai", "run_openai.py", "openai3", ("chat", "responses")),
    Client("anthropic", "run_anthropic.py", "openai3", ("messages",)),
    Client(
        "litellm",
        "run_litellm.py",
        "openai2",
        ("openai", "hosted_vllm", "anthropic"),
        limits={
            (
                "anthropic",
                "structured",
            ): "writes references to nested classes as `/$defs/...`, which point nowhere"
        },
    ),
    Client("langchain-openai", "run_langchain.py", "openai2", ("openai", "responses")),
    Client("langchain-anthropic", "run_langchain.py", "openai2", ("anthropic",)),
    Client("llama-index-llms-openai-like", "run_llama_index.py", "openai2"),
    Client(
        "instructor",
        "run_instructor.py",
        "openai2",
        ("tools", "json_schema", "anthropic"),
        missing={"tools": "runs no tools"},
    ),
    Client("pydantic-ai-slim", "run_pydantic_ai.py", "openai3", ("chat", "responses", "anthropic")),
    Client("openai-agents", "run_openai_agents.py", "openai3", ("chat", "responses")),
    Client("llm", "run_llm.py", "openai3"),
    Client("smolagents", "run_smolagents.py", "openai3"),
    Client("dspy", "run_dspy.py", "openai2"),
    Client("inspect-ai", "run_inspect.py", "openai3", ("chat", "anthropic")),
    Client("ollama", "run_ollama.py", "openai3"),
    Client("openai", "openai.mjs", "node", ("chat", "responses")),
    Client("@anthropic-ai/sdk", "anthropic.mjs", "node", ("messages",)),
    Client("ollama", "ollama.mjs", "node"),
    Client("@ai-sdk/openai-compatible", "ai_sdk.mjs", "node", ("openai-compatible",)),
    Client("@ai-sdk/openai", "ai_sdk.mjs", "node", ("openai chat", "openai responses")),
    Client("@ai-sdk/anthropic", "ai_sdk.mjs", "node", ("anthropic",)),
)


def write_table() -> str:
    """The table of docs/clients.md: what is tried with which version, and whose limit the rest is."""
    lines = [f"| package | version | as | {' | '.join(CASES)} |", "|---" * (3 + len(CASES)) + "|"]
    notes: list[str] = []
    for client in CLIENTS:
        index = "npm: " if client.environment == "node" else ""
        for variant in client.variants:
            cells = []
            for case in CASES:
                reason = client.missing.get(case) or client.limits.get((variant, case))
                note = f"{client.package} {reason}" if reason else ""
                if note and note not in notes:
                    notes.append(note)
                cells.append(f"no ({notes.index(note) + 1})" if note else "yes")
            lines.append(
                f"| {index}`{client.package}` | {client.version} | {variant} | {' | '.join(cells)} |"
            )
    return "\n".join(
        [*lines, "", *(f"{i}. `{note.replace(' ', '` ', 1)}." for i, note in enumerate(notes, 1))]
    )


def answer_prompt(prompt: str) -> str | None:
    """The answer that a prompt gets; None: the model's own.

    Libraries put the question among long instructions of their own, for which the embedded model is too
    small.
    """
    if all(line in prompt for line in QUESTION.splitlines()):
        return answer_question(prompt)
    if "[[ ## " not in prompt:
        return None
    if STRUCTURED in prompt:  # DSPy's instructions for JSON
        return json.dumps({"forecast": FORECAST})
    return write_fields(answer="42")


def answer_question(prompt: str) -> str:
    """The next of three calls, each after some reasoning, then the answer."""
    done = sum(RESULTS[name] in prompt for name, _ in CALLS)
    in_fields = "[[ ## next_tool_name ## ]]" in prompt
    if done < len(CALLS):
        name, arguments = CALLS[done]
        if name not in prompt:
            return f"There is no tool {name}."
        return write_step(name, arguments) if in_fields else write_call(name, arguments)
    if in_fields:  # DSPy ends its loop by a tool
        return write_step("finish", {})
    if "[[ ## " in prompt:
        return write_fields(reasoning="All is there.", answer=ANSWER)
    if '"name": "final_answer"' in prompt:  # so does smolagents
        return write_call("final_answer", {"answer": ANSWER})
    return ANSWER


def write_call(name: str, arguments: Any) -> str:
    """A call in the format of the embedded model."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<think>\nI need {name}.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"


def write_step(name: str, arguments: Any) -> str:
    """A call as DSPy's fields."""
    return write_fields(
        next_thought=f"I need {name}.", next_tool_name=name, next_tool_args=json.dumps(arguments)
    )


def write_fields(**fields: str) -> str:
    """An answer in DSPy's format, which is text."""
    written = [f"[[ ## {key} ## ]]\n{value}" for key, value in fields.items()]
    return "\n\n".join([*written, "[[ ## completed ## ]]"])


@contextmanager
def run_matrix_server() -> Iterator[ModelServer]:
    """The embedded model with room for the instructions of all libraries; answers end after 200 tokens."""
    config = Config(
        model=ModelSettings(context_length=32768),
        sampling=SamplingSettings(max_tokens=200),
        structured=StructuredSettings(close_objects=True),
    )
    with run_scripted_server(answer_prompt, config) as served:
        yield served


if __name__ == "__main__":
    print(write_table())
