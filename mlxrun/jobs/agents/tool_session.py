"""The tools of one conversation: a process of their own, which calls them one after the other.

A call that takes too long, or ends its process, is a result that says so; the next call gets a new process.
Tools that keep more than the state are called again in it, so that it knows what the last one knew.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from mlxrun.core.errors import RequestError
from mlxrun.core.limited_json import load_json
from mlxrun.core.workers import Lane, end_by
from mlxrun.jobs.agents.agent_settings import AgentLoop, LineAgent
from mlxrun.jobs.agents.tool_process import ToolPlace, compute_digest
from mlxrun.jobs.agents.tool_sandbox import build_sandbox
from mlxrun.jobs.scoring.scorer_process import (
    NO_REPLY,
    ScorerEnded,
    ScorerLimits,
    ScorerNotStarted,
    ScorerPool,
    end_scorers_by,
)

Json = dict[str, Any]
P = ParamSpec("P")
T = TypeVar("T")
MOST_FILES = 1000  # of `agent.files`
MEMORY = 8_000_000_000  # bytes of the process of the tools
TOOLS = Lane("tools", 32)  # calls that wait at the same time
_MODULE = "mlxrun.jobs.agents.tool_process"


class ToolsDiffer(Exception):
    """A call that was made again has another result than before."""


class ToolSession:
    """The tools of a line. `folder`: of the job. RequestError if they cannot be used."""

    def __init__(self, agent: LineAgent, folder: Path) -> None:
        loop, place = agent.loop, (folder / agent.folder).resolve()
        self._place = asdict(ToolPlace(list(loop.tools), loop.mcp, str(place), dict(agent.digests)))
        files = [*list_tool_files(agent, place), *loop.files]
        prefix = build_sandbox(place, files, loop.sandbox) if loop.sandbox else ()
        setup = f"{_MODULE}:describe_tools", self._place
        self._pool = ScorerPool(ScorerLimits(loop.call_seconds, MEMORY), prefix, setup)
        self._repeats = loop.repeats_calls
        self._earlier: list[tuple[Json, Json, Json]] = []  # calls that the process does not know

    def describe(self) -> list[Json]:
        """Return the tools as a chat request offers them. This blocks."""
        tools: list[Json] = self._ask("describe_tools")["tools"]
        return tools

    def list_modules(self) -> list[str]:
        """List the files beside the tools that they import. This blocks."""
        modules: list[str] = self._ask("describe_tools")["modules"]
        return modules

    def note(self, call: Json, state: Json, step: Json) -> None:
        """Note an earlier call and its result. `state`: the state before it."""
        if step.get("ended"):
            self._earlier.clear()
        elif self._repeats:
            self._earlier.append((call, state, step))

    def call(self, call: Json, tools: Mapping[str, Json], state: Json) -> Json:
        """Call the tool that a message calls, and return the `content` of the result and the new `state`;
        `ended` if that has ended the process. `tools`: schemas of the arguments, by name. This blocks."""
        name, text = call["name"], call["arguments"]
        if name not in tools:
            names = ", ".join(tools)
            return {"content": f"error: there is no tool {name!r}; there are {names}", "state": state}
        try:
            arguments = load_json(text or "{}")
        except ValueError as error:
            return {"content": f"error: the arguments are not JSON: {error}", "state": state}
        if not isinstance(arguments, dict):
            return {"content": "error: the arguments are no JSON object", "state": state}
        while self._earlier:
            self._repeat(tools)
        try:
            found = self._ask("call_tool", tools[name], name, arguments, state)
            if not (isinstance(found.get("content"), str) and isinstance(found.get("state"), dict)):
                raise ScorerEnded(NO_REPLY)
            return found
        except ScorerEnded as error:
            self._pool.close()  # a process that sent no result is not used again
            return {"content": f"error: the tool was ended: {error}", "state": state, "ended": True}

    def _repeat(self, tools: Mapping[str, Json]) -> None:
        """Make the first of the earlier calls again. ToolsDiffer if the result is another one."""
        earlier, self._earlier = self._earlier, []
        call, state, step = earlier[0]
        found = self.call(call, tools, state)
        if found != {key: step[key] for key in found if key in step}:
            raise ToolsDiffer(f"{call['name']} returned {found['content'][:100]!r}")
        self._earlier = earlier[1:]

    def _ask(self, function: str, *arguments: Any) -> Json:
        try:
            found: Json = self._pool.call(f"{_MODULE}:{function}", self._place, *arguments)
        except ScorerNotStarted as error:
            found = {"failure": f"the process of its tools cannot be used: {error}"}
        if not isinstance(found, dict):
            raise ScorerEnded(NO_REPLY)
        if "failure" in found:
            raise RequestError(f"agent: {found['failure']}", param="agent", code="unusable_tools")
        return found

    def close(self) -> None:
        """End the process. This blocks."""
        self._pool.close()


def list_tool_files(agent: LineAgent, folder: Path) -> list[str]:
    """List the files in `folder` that the tools name: those of functions, words of the server's command, and
    those with a digest."""
    loop = agent.loop
    places = [each if isinstance(each, str) else str(each["function"]) for each in loop.tools]
    names = [each.rpartition(":")[0] for each in places] + (loop.mcp or "").split() + [*agent.digests]
    return [name for name in dict.fromkeys(names) if name and (folder / name).is_file()]


def list_tool_paths(agent: LineAgent, folder: Path) -> list[Path]:
    """List the paths of these files, and of those in `agent.files`. `folder`: of the job. RequestError as
    `_list_named_files`."""
    place = Path(os.path.normpath(folder / agent.folder))
    names = [*list_tool_files(agent, place), *_list_named_files(agent.loop, place)]
    return [place / name for name in dict.fromkeys(names)]


def _list_named_files(loop: AgentLoop, folder: Path) -> Iterator[str]:
    """The files of `agent.files`, in folders too. RequestError for one that is missing or cannot travel, or
    for too many."""
    count = 0
    for name in loop.files:
        path = Path(os.path.normpath(folder / name))
        if os.path.isabs(name) or folder.is_relative_to(path):
            why = "an absolute path" if os.path.isabs(name) else "the folder of the suite, or one above it"
            raise RequestError(f"agent.files: {name!r} is {why}; name what the tools read", param="agent")
        inside = sorted(each for each in path.rglob("*") if "__pycache__" not in each.parts)
        found = [each for each in ([path] if path.is_file() else inside) if each.is_file()]
        count += len(found)
        if not found or count > MOST_FILES:
            text = "there is no such file" if not found else f"there are more than {MOST_FILES:,} files"
            raise RequestError(f"agent.files: {path}: {text}", param="agent")
        yield from (os.path.relpath(each, folder) for each in found)


def describe_tools(loop: AgentLoop, folder: Path) -> tuple[list[Json], dict[str, str]]:
    """Return the tools of a loop, as a chat request offers them, and digests of their files in `folder`.
    RequestError if they cannot be used. This blocks."""
    if not loop.has_tools:
        return [], {}
    agent = LineAgent(loop)
    named = list(_list_named_files(loop, folder))
    with closing(ToolSession(agent, folder)) as session:
        tools, modules = session.describe(), session.list_modules()
    names = dict.fromkeys([*list_tool_files(agent, folder), *modules, *named])
    return tools, {name: compute_digest(folder / name) for name in names}


async def run_tools(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Wait for a process in a thread. If this call is cancelled, the process is killed."""

    def run() -> T:
        with end_scorers_by(end_by):
            return function(*args, **kwargs)

    return await TOOLS.run(run)
