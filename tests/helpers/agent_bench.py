"""Jobs with tool loops on an engine whose answers a test writes, and files of tools."""

from __future__ import annotations

import asyncio
import json
import random
import textwrap
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxrun.api.parsers.registry import detect_formats
from mlxrun.config.setting_fields import hash_config
from mlxrun.config.settings import Config
from mlxrun.core.errors import MlxrunError
from mlxrun.core.request import FinishReason, Request, TokenEvent
from mlxrun.jobs.agents.agent_settings import make_user_config
from mlxrun.jobs.run.job_run import JobSetup
from mlxrun.jobs.run.line_answerer import LinePreparer
from tests.helpers.batch_fakes import Bench, FakeClient, chat, make_config, read
from tests.helpers.suite_bench import SuiteBench
from tests.helpers.tokenizers import TOOLS, FakeModelInfo, byte_tokenizer

# Makes the answer to a rendered prompt.
AnswerScript = Callable[[str], str]
# Its calls are known as Hermes' by the comment.
TEMPLATE = TOOLS + '{# "arguments" #}'
COUNTER = '''
def add(number: int, *, state: dict) -> int:
    """Add a number to the total.

    Args:
        number: What is added.
    """
    with open(__file__ + ".calls", "a") as file:
        file.write(f"{number}\\n")
    state["total"] = state.get("total", 0) + number
    return state["total"]
'''


def call(name: str, **arguments: Any) -> str:
    """A tool call as the model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def answer_in_turn(*answers: str) -> AnswerScript:
    """The script of a model that gives these answers one after the other, in each conversation."""
    return lambda prompt: answers[count_turns(prompt)]


def count_turns(prompt: str) -> int:
    """The number of the model's answers in a prompt."""
    return prompt.count("<|im_start|>assistant\n") - 1


class ScriptedEngine(FakeClient):
    """Answers as `script` says. `prompts`: what it was asked, in order."""

    script: AnswerScript
    prompts: list[str]

    async def answer_body(self, request: Request, text: str) -> AsyncGenerator[TokenEvent, None]:
        prompt = byte_tokenizer().decode(list(request.prompt), skip_special_tokens=False)
        self.prompts.append(prompt)
        ids = byte_tokenizer()(self.script(prompt), add_special_tokens=False)["input_ids"]
        size = len(request.prompt)
        yield TokenEvent(request.id, num_computed_tokens=size)
        for token in ids[len(request.prior_output) :]:
            await asyncio.sleep(random.random() * self.pause)
            while self.waits(prompt):
                await asyncio.sleep(0.001)
            self.output += 1
            yield TokenEvent(request.id, (token,), num_computed_tokens=size)
        stop = min(request.params.stop_ids)
        yield TokenEvent(request.id, num_computed_tokens=size, finish=FinishReason.STOP, stop_id=stop)


@dataclass
class AgentBench(Bench):
    """Runs a job of conversations. `script`: the answers; `waits`: as in FakeClient, of prompts; `prompts`:
    of the last run, in order; `user`: the name of a model that plays the user, and `user_prompts` its own."""

    config: Config = field(default_factory=make_config)
    model_info: FakeModelInfo = field(default_factory=lambda: FakeModelInfo(chat_template=TEMPLATE))
    script: AnswerScript = answer_in_turn("hello")
    waits: Callable[[str], bool] = lambda prompt: False
    prompts: list[str] = field(default_factory=list)
    user: str | None = None
    user_prompts: list[str] = field(default_factory=list)

    def make_setup(self) -> JobSetup:
        self.config = replace(self.config, batch=replace(self.config.batch, user_model=self.user))
        self.client, user = self._make_engine(self.model_info, self.prompts), None
        if (config := make_user_config(self.config)) is not None:
            info = replace(self.model_info, digests={**self.model_info.digests, "model": str(self.user)})
            user = self._build(config, info, self._make_engine(info, self.user_prompts))
        return replace(self._build(self.config, self.model_info, self.client), evals=self.evals, user=user)

    def _make_engine(self, info: FakeModelInfo, prompts: list[str]) -> ScriptedEngine:
        client = ScriptedEngine(info)
        prompts.clear()
        client.script, client.prompts, client.waits = self.script, prompts, self.waits
        client.pause = self.client.pause
        return client

    def _build(self, config: Config, info: FakeModelInfo, client: ScriptedEngine) -> JobSetup:
        formats = detect_formats(TEMPLATE, info.tokenizer, config.parsers)
        preparer = LinePreparer(info, config, self.job.parent, formats=formats)
        return JobSetup(config, hash_config(config), info, preparer, client.start, lambda: self.device)

    def read_record(self) -> dict[str, Any]:
        """The record of the only line, answered or failed."""
        (record,) = read(self.paths.out) + read(self.paths.errors)
        return record


@dataclass
class AgentSuiteBench(SuiteBench):
    """Runs suites with tool loops."""

    script: AnswerScript = answer_in_turn("hello")
    prompts: list[str] = field(default_factory=list)

    model_prompts: dict[str, list[str]] = field(default_factory=dict)  # prompts by model.path, of all starts

    def _load(self, config: Config) -> Any:
        digests = {**FakeModelInfo().digests, "model": config.model.path}
        return FakeModelInfo(chat_template=TEMPLATE, digests=digests)

    async def _start(self, config: Config, info: Any, cache: Path) -> Any:
        client, own = ScriptedEngine(info), self.model_prompts.setdefault(config.model.path, [])
        self.loads[config.model.path] += 1

        def script(prompt: str) -> str:
            own.append(prompt)
            return self.script(prompt)

        client.script, client.prompts = script, self.prompts
        return client


def write_tools(folder: Path, text: str = COUNTER) -> None:
    """Write tools.py beside the job."""
    (folder / "tools.py").write_text(textwrap.dedent(text), encoding="utf-8")


def agent_line(custom_id: str = "a", wanted: Any = None, body: Any = None, **agent: Any) -> dict[str, Any]:
    """A line with a tool loop, by default with `add` of tools.py."""
    found = {"tools": ["tools.py:add"], **agent}
    return {**chat(custom_id, f"Question {custom_id}", wanted, **(body or {})), "agent": found}


def run_agents_in_process(job: Path, answers: Sequence[str], stop_at: int, pause: float = 0.0) -> None:
    """For a process of its own, which may be killed. It gives these answers, and waits before number
    `stop_at`. `pause`: as in FakeClient."""
    bench = AgentBench(job, script=answer_in_turn(*answers))
    bench.client.pause = pause
    bench.waits = lambda prompt: count_turns(prompt) >= stop_at
    try:
        asyncio.run(bench.run())
    except MlxrunError as error:
        raise SystemExit(error.exit_code) from error
