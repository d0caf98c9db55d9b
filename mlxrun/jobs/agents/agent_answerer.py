"""Answers lines with a tool loop: turn by turn, each an ordinary chat request of the answerer below.

What follows the line's own messages is the `transcript`: assistant messages, results of tools, and messages
of a simulated user. Each step is in the journal of turns before the next one begins (turn_journal.py). A line
that goes on takes the same path over the known steps, so that it ends as it would have without a kill.

The response body is that of the last turn, with the tokens of all turns of the agent in `usage`. It also has
`transcript`, and `agent`: why the conversation `ended`, its `turns`, `calls` and last `state`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxrun.core.errors import PromptTooLong, RequestError
from mlxrun.jobs.agents.agent_settings import LineAgent, SimulatedUser, parse_agent
from mlxrun.jobs.agents.tool_session import ToolsDiffer, ToolSession, run_tools
from mlxrun.jobs.agents.turn_journal import LineSteps, TurnJournal
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.records.output_records import LineTokens
from mlxrun.jobs.run.line_answerer import Answerer
from mlxrun.jobs.run.partial_answers import PartialAnswers

Json = dict[str, Any]
log = logging.getLogger(__name__)
ANSWER, MAX_TURNS, SECONDS, CONTEXT, USER = "answer", "max_turns", "seconds", "context", "user"
GREETING = "Hello, how can I help you?"  # templates want a user's message first, and the agent has that part


@dataclass(slots=True)
class AgentAnswerer:
    """Answers lines with a tool loop, and passes on all others. `below`: answers single requests; `folder`:
    of the job; `user`: answers as the simulated user, if that has a model of its own."""

    below: Answerer
    turns: TurnJournal
    folder: Path
    user: Answerer | None = None

    @property
    def answers(self) -> PartialAnswers:
        return self.below.answers

    @property
    def concurrency(self) -> int:
        return self.below.concurrency

    async def answer(self, line: JobLine, key: str, tokens: LineTokens) -> Json:
        """Return the response body of `line`. RequestError if its tools cannot be used."""
        if line.agent is None:
            return await self.below.answer(line, key, tokens)
        agent, steps = parse_agent(line.agent), self.turns.open_line(key)
        while True:
            tools = ToolSession(agent, self.folder)
            try:
                talk = AgentConversation(self, replace(line, agent=None), key, tokens, agent, steps, tools)
                found = await talk.run()
                self.turns.remove_line(key)
                return found
            except ToolsDiffer as error:
                log.info("line %d: its conversation begins anew: %s", line.number, error)
                steps.restart()
            finally:
                await run_tools(tools.close)


@dataclass(slots=True)
class AgentConversation:
    """One conversation. `line`: as a line without tool loop."""

    answerer: AgentAnswerer
    line: JobLine
    key: str
    tokens: LineTokens
    agent: LineAgent
    steps: LineSteps
    tools: ToolSession
    transcript: list[Json] = field(default_factory=list)
    body: Json = field(default_factory=dict)  # of the newest answer
    usage: Json = field(default_factory=dict)
    state: Json = field(default_factory=dict)
    turns: int = 0
    calls: int = 0
    seconds: float = 0.0

    async def run(self) -> Json:
        """Converse until an end, and return the response body."""
        self.state = self.agent.loop.state
        if self.agent.loop.has_tools and self.line.body.get("tools") is None:
            body = {**self.line.body, "tools": await run_tools(self.tools.describe)}
            self.line = replace(self.line, body=body)
        while (ended := await self._take_turn()) is None:
            pass
        facts = {"ended": ended, "turns": self.turns, "calls": self.calls, "state": self.state}
        return {**self.body, "usage": self.usage, "agent": facts, "transcript": self.transcript}

    async def _take_turn(self) -> str | None:
        """Have the model answer, its calls made and the user reply. Returns why the conversation ended, or
        None."""
        loop = self.agent.loop
        messages = [*self.line.body["messages"], *self.transcript]
        suffix = f"#{self.turns}" if self.turns else ""  # the first answer is that of a line without tools
        body = {**self.line.body, "messages": messages}
        found = await self._generate("answer", self.answerer.below, body, suffix)
        if "ended" in found:
            return str(found["ended"])
        self.body, self.turns = found["body"], self.turns + 1
        self.usage = _add_counts(self.usage, self.body.get("usage") or {})
        message = self.body["choices"][0]["message"]
        self.transcript.append({key: each for key, each in message.items() if each or key == "content"})
        calls = message.get("tool_calls") or ()
        for call in calls:
            await self._call(call)
        if not calls and loop.user is None:
            return ANSWER
        if self.turns >= loop.max_turns:
            return MAX_TURNS
        if self.seconds >= loop.seconds:
            return SECONDS
        return None if calls or loop.user is None else await self._ask_user(loop.user)

    async def _take_step(self, kind: str, compute: Callable[[], Awaitable[Json]]) -> Json:
        """The next step: the known one, or the one that `compute` makes now."""
        step = self.steps.take(kind)
        if step is None:
            clock = asyncio.get_running_loop().time  # which stands still while the process is suspended
            begun = clock()
            found = await compute()
            step = {"kind": kind, **found, "seconds": round(clock() - begun, 3)}
            self.steps.add(step)
        self.seconds += step["seconds"]
        return step

    async def _generate(self, kind: str, answerer: Answerer, body: Json, suffix: str) -> Json:
        """A step with the response `body` of a request, or with why the conversation `ended` before it."""
        line = replace(self.line, body=body, custom_id=self.line.custom_id + suffix)

        async def compute() -> Json:
            limit = self.agent.loop.seconds - self.seconds
            with suppress(TimeoutError):
                async with asyncio.timeout(limit):
                    try:
                        found = await answerer.answer(line, self.key, self.tokens)
                        self.answerer.answers.remove_line(self.key)  # the next answer has other tokens
                        return {"body": found}
                    except PromptTooLong:
                        if not self.turns:
                            raise
                        return {"ended": CONTEXT}
            if not self.turns:
                text = f"agent.seconds: the first answer took more than {self.agent.loop.seconds} s"
                raise RequestError(text, param="agent", code="time_limit")
            return {"ended": SECONDS}

        return await self._take_step(kind, compute)

    async def _call(self, call: Json) -> None:
        """Make one call, and add its result to the transcript."""
        function, state, is_made = call["function"], self.state, False

        async def compute() -> Json:
            nonlocal is_made
            is_made = True
            return await run_tools(self.tools.call, function, dict(_list_schemas(self.line.body)), state)

        step = await self._take_step("tool", compute)
        self.state, self.calls = step["state"], self.calls + 1
        if not is_made:
            self.tools.note(function, state, step)
        message = {"role": "tool", "tool_call_id": call["id"], "name": function["name"]}
        self.transcript.append({**message, "content": step["content"]})

    async def _ask_user(self, user: SimulatedUser) -> str | None:
        """Add the reply of the simulated user. Returns why the conversation ended, or None."""
        messages = [{"role": "system", "content": user.prompt}, {"role": "user", "content": GREETING}]
        messages += _turn_around([*self.line.body["messages"], *self.transcript])
        own = self.answerer.user  # to whom the agent's adapters are unknown
        names = ("model", "seed") if own is None else ("seed",)
        given: Json = {key: self.line.body[key] for key in names if key in self.line.body}
        body = {**given, **user.generation, "messages": messages}
        found = await self._generate("user", own or self.answerer.below, body, f"#user{self.turns}")
        if "ended" in found:
            return str(found["ended"])
        text = found["body"]["choices"][0]["message"].get("content") or ""
        if user.stop in text:
            return USER
        self.transcript.append({"role": "user", "content": text})
        return None


def _list_schemas(body: Mapping[str, Any]) -> Iterator[tuple[str, Json]]:
    """The names of the tools of a request, each with the schema of its arguments."""
    for each in body.get("tools") or ():
        if "function" in each:
            yield each["function"]["name"], each["function"].get("parameters") or {}


def _turn_around(messages: list[Json]) -> Iterator[Json]:
    """The texts of both parts as the simulated user sees them: its own are the assistant's."""
    roles = {"user": "assistant", "assistant": "user"}
    for each in messages:
        text = each.get("content")
        if isinstance(text, list):
            text = "\n".join(part["text"] for part in text if part.get("type") == "text")
        if each["role"] in roles and text:
            yield {"role": roles[each["role"]], "content": text}


def _add_counts(one: Json, other: Mapping[str, Any]) -> Json:
    """The sums of two objects with counts of tokens."""
    found = {**one}
    for key, value in other.items():
        if isinstance(value, Mapping):
            found[key] = _add_counts(found.get(key) or {}, value)
        elif isinstance(value, int):
            found[key] = (found.get(key) or 0) + value
        else:
            found.setdefault(key, value)
    return found
