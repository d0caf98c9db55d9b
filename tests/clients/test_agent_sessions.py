"""Sessions of agents, ten requests or two each, with tools: every body is accepted, every answer is read as
the agent reads it, and at least nine tenths of each prompt come from the prefix cache."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import Any

import pytest

from mlxrun.config.settings import Config, ModelSettings
from tests.clients.agents.ai_sdk import Cline, OpenCode
from tests.clients.agents.claude_code import ClaudeCode
from tests.clients.agents.codex import Codex
from tests.clients.agents.continue_dev import Continue
from tests.clients.agents.open_webui import OpenWebUi
from tests.clients.agents.session import TURNS, Agent, Answer, UserTurn
from tests.clients.agents.zed import Zed
from tests.helpers.scripted_model import run_scripted_server
from tests.helpers.served_model import ModelServer

# A whole session of Claude Code; of the others the last turn, and all of it in the sweep.
AGENTS = (ClaudeCode,)
SHORTER = (Codex, OpenCode, Continue, Cline, Zed, OpenWebUi)
SESSIONS = [
    *(pytest.param(make, TURNS, id=make.__name__) for make in AGENTS),
    *(pytest.param(make, TURNS[-1:], id=f"{make.__name__} briefly") for make in SHORTER),
    *(pytest.param(make, TURNS, marks=pytest.mark.sweep, id=make.__name__) for make in SHORTER),
]
# Agents ask for up to 32,000 tokens of answer.
CONFIG = Config(model=ModelSettings(context_length=65536))
FINISH_CALLS = ("tool_calls", "tool_use", "completed")
FINISH_TEXT = ("stop", "end_turn", "completed")


class Scripted:
    """A server whose model gives the answers of a queue, and by itself when there is none; and its
    prompts."""

    def __init__(self) -> None:
        self.answers: deque[str] = deque()
        self.prompts: list[str] = []
        self.served: ModelServer

    def answer(self, prompt: str) -> str | None:
        self.prompts.append(prompt)
        return self.answers.popleft() if self.answers else None

    def count_shared(self, before: str, prompt: str) -> int:
        """How many tokens two prompts have in common at their beginning."""
        tokenizer = self.served.state.context.model_info.tokenizer
        pairs = zip(
            *(tokenizer.encode(text, add_special_tokens=False) for text in (before, prompt)), strict=False
        )
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def post(self, agent: Agent, body: dict[str, Any], path: str = "") -> str:
        """The text of a response, which must be one."""
        headers = {**agent.headers, "content-type": "application/json"}
        data = json.dumps(body, ensure_ascii=False).encode()
        url = self.served.url + (path or agent.path)
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=120) as response:
                text: str = response.read().decode()
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{error.code}: {error.read().decode()}") from error
        return text

    def run(self, agent: Agent, turns: Sequence[UserTurn] = TURNS) -> list[Answer]:
        """All answers of a session; each must be what the model was made to say."""
        self.answers.clear()
        self.prompts.clear()
        found = []
        for turn in turns:
            agent.ask(turn.text)
            for step in turn.steps:
                self.answers.append(agent.write_answer(step))
                answer = agent.read_stream(self.post(agent, agent.make_body()))
                assert (answer.text.strip(), answer.reasoning.strip()) == (step.text, step.reasoning)
                calls = [agent.names[kind] for kind, _ in step.calls[: agent.max_calls]]
                assert [call.name for call in answer.calls] == calls
                assert answer.finish in (FINISH_CALLS if calls else FINISH_TEXT)
                found.append(answer)
                agent.take(answer)
        assert not self.answers and len(self.prompts) == len(found)
        return found


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    made = Scripted()
    with run_scripted_server(made.answer, CONFIG) as made.served:
        yield made


@pytest.mark.parametrize(("make", "turns"), SESSIONS)
def test_a_session(scripted: Scripted, make: type[Agent], turns: Sequence[UserTurn]) -> None:
    """No request is refused; from the second on, nine tenths of the prompt are found in the cache."""
    found = scripted.run(make(), turns)
    assert len(found) == (10 if turns is TURNS else 2)
    assert found[0].prompt_tokens > 1500, "prompts in proportion to those of agents"
    assert all(later.prompt_tokens > before.prompt_tokens for before, later in pairwise(found))
    shares = [answer.cached_tokens / answer.prompt_tokens for answer in found[1:]]
    assert min(shares) >= 0.9, [round(share, 3) for share in shares]


def test_what_two_prompts_share_is_found(scripted: Scripted) -> None:
    """Reasoning in every answer: the template drops it when the user speaks again, and what follows the first
    that is dropped has to be computed again. All before it is found."""
    steps = [replace(step, reasoning="I have to think.") for step in TURNS[0].steps[-2:]]
    turns = [UserTurn(f"Another task. {turn.text}", tuple(steps)) for turn in TURNS[:2]]
    found = scripted.run(Zed(), turns)
    shared = [scripted.count_shared(*prompts) for prompts in pairwise(scripted.prompts)]
    cached = [answer.cached_tokens for answer in found[1:]]
    assert all(have >= may - 16 for have, may in zip(cached, shared, strict=True)), (cached, shared)
    lost = [before.prompt_tokens - may for before, may in zip(found, shared, strict=False)]
    assert max(lost) == lost[1] > 50, "the template drops the reasoning of the first turn"


def test_a_line_that_changes_costs_the_whole_prompt(scripted: Scripted) -> None:
    """The twin: a system prompt whose first line counts the messages."""

    class Wordy(Continue):
        def make_body(self) -> dict[str, Any]:
            body = super().make_body()
            first, *others = body["messages"]
            now = {**first, "content": f"Request {len(others)}.\n{first['content']}"}
            return {**body, "messages": [now, *others]}

    first, second = scripted.run(Wordy(), [UserTurn("Count.", TURNS[2].steps)])
    assert second.cached_tokens < 0.1 * second.prompt_tokens


def test_what_agents_ask_beside_the_conversation(scripted: Scripted) -> None:
    """Titles, tags and probes, each accepted as it is; Claude Code also counts tokens."""
    scripted.answers.clear()
    claude, opencode, webui = ClaudeCode(), OpenCode(), OpenWebUi()
    for agent in (claude, opencode):
        agent.ask(TURNS[0].text)
    load_check, title = (scripted.post(claude, body) for body in claude.make_side_bodies())
    assert json.loads(load_check)["stop_reason"] == "max_tokens"
    answer = claude.read_stream(title)
    assert answer.finish == "max_tokens" or list(json.loads(answer.text)) == ["title"]
    body = claude.make_body()
    counted = {key: body[key] for key in ("model", "messages", "system", "tools", "thinking")}
    count = json.loads(scripted.post(claude, counted, "/v1/messages/count_tokens?beta=true"))
    scripted.answers.append("Yes.")
    assert claude.read_stream(scripted.post(claude, body)).prompt_tokens == count["input_tokens"]
    assert opencode.read_stream(scripted.post(opencode, opencode.make_title_body())).finish
    for task in webui.make_task_bodies():
        assert json.loads(scripted.post(webui, task))["choices"][0]["finish_reason"]
