"""What runs in the process of a conversation's tools: it imports the functions, or starts the MCP server.

`describe_tools` and `call_tool` are called by `ToolSession` as scorers are (scorer_process.py). What tools
print is not kept. A failure of a call is a result that begins with `error:`, which the model reads.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import shlex
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TextIO

from jsonschema import Draft202012Validator, SchemaError
from jsonschema.validators import validator_for

import mlxrun
from mlxrun.core.errors import JobError
from mlxrun.core.processes import MARK
from mlxrun.jobs.agents.tool_functions import STATE, ToolFunction, load_functions
from mlxrun.jobs.scoring.answer_values import find_schema_problem

Json = dict[str, Any]
MOST_TEXT = 20_000  # characters of a result that the model gets; its middle is left out
MOST_STATE = 1_000_000  # characters of a state as JSON
MOST_PAGES = 100  # of an MCP server's list of tools
INSTALL = "MCP servers need a package that is not installed: pip install 'mlxrun[agents]'"
# Starts a program that ends with this process, even if this process is killed.
_TIED = """\
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execvp(sys.argv[1], sys.argv[1:])
"""


@dataclass(frozen=True, slots=True)
class ToolPlace:
    """Where tools come from, as JSON passes it. `folder`: absolute; `digests`: as in LineAgent."""

    tools: list[Any]
    mcp: str | None
    folder: str
    digests: dict[str, str]


class ToolSource(Protocol):
    """The functions, or the MCP server."""

    def list_schemas(self) -> list[Json]: ...

    def call(self, name: str, arguments: Json, state: Json) -> tuple[str, Json]:
        """Return the result and the new state."""


_opened: list[list[ToolSource] | JobError] = []


def describe_tools(place: Json) -> Json:
    """Return `tools`, as a chat request offers them, and `modules`, the files in the folder that they import;
    or `failure`, why there are none."""
    try:
        tools = [schema for source in _open(place) for schema in source.list_schemas()]
    except JobError as error:
        return {"failure": str(error)}
    names = [each["function"]["name"] for each in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        return {"failure": f"there are two tools with the name {twice!r}"}
    return {"tools": tools, "modules": _list_modules(Path(place["folder"]))}


def _list_modules(folder: Path) -> list[str]:
    """The files in `folder` that were imported, but for those of installed packages."""
    installed = (Path(sys.prefix), Path(sys.base_prefix), Path(mlxrun.__file__).parent)
    places = (vars(each).get("__file__") for each in list(sys.modules.values()) if type(each) is ModuleType)
    paths = {Path(each) for each in places if isinstance(each, str)}
    inside = (each for each in paths if each.is_relative_to(folder))
    own = (each for each in inside if not any(map(each.is_relative_to, installed)))
    return sorted(each.relative_to(folder).as_posix() for each in own)


def call_tool(place: Json, schema: Json, name: str, arguments: Json, state: Json) -> Json:
    """Return the `content` of the result and the new `state`; or `failure`, why no tool can be called.
    `schema`: of the arguments."""
    try:
        sources = _open(place)
        problem = find_schema_problem(schema, arguments)
    except JobError as error:
        return {"failure": str(error)}
    except (ValueError, TimeoutError) as error:
        return {"failure": f"the schema of the tool {name!r} cannot be used: {error}"}
    if problem is not None:
        return {"content": f"error: the arguments do not fit: {problem}"[:MOST_TEXT], "state": state}
    for source in sources:
        if any(each["function"]["name"] == name for each in source.list_schemas()):
            content, state = source.call(name, arguments, state)
            return {"content": _cut(content), "state": state}
    return {"failure": f"there is no tool {name!r} any more"}


def compute_digest(path: Path) -> str:
    """Compute the SHA-256 of a tool's file; empty if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _open(place: Json) -> list[ToolSource]:
    """The tools of a place, of which each process has one. JobError if they cannot be used."""
    if not _opened:
        try:
            _opened.append(_load(ToolPlace(**place)))
        except JobError as error:
            _opened.append(error)
    if isinstance(_opened[0], JobError):
        raise _opened[0]
    return _opened[0]


def _load(place: ToolPlace) -> list[ToolSource]:
    folder = Path(place.folder)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    for name, digest in place.digests.items():
        if compute_digest(folder / name) != digest:
            raise JobError(
                f"{name} has changed since the job was made, or is gone; `mlxrun eval` makes it anew"
            )
    sources: list[ToolSource] = []
    if place.tools:
        sys.path[:0] = [str(folder)]
        sources.append(_FunctionTools(load_functions(place.tools, folder)))
    if place.mcp is not None:
        sources.append(_McpTools(place.mcp, folder))
    for tool in (schema["function"] for source in sources for schema in source.list_schemas()):
        try:
            validator_for(tool["parameters"], default=Draft202012Validator).check_schema(tool["parameters"])
        except SchemaError as error:
            raise JobError(f"the parameters of the tool {tool['name']!r}: {error.message}") from error
    return sources


@dataclass(frozen=True, slots=True)
class _FunctionTools:
    functions: Mapping[str, ToolFunction]

    def list_schemas(self) -> list[Json]:
        return [each.schema for each in self.functions.values()]

    def call(self, name: str, arguments: Json, state: Json) -> tuple[str, Json]:
        tool, changed = self.functions[name], copy.deepcopy(state)
        given = {**arguments, STATE: changed} if tool.takes_state else arguments
        try:
            found = tool.function(**given)
            content = _write_result(found)
            size = len(json.dumps(changed, allow_nan=False))
        except MemoryError:
            raise  # this process cannot go on with what is left
        except (Exception, SystemExit) as error:
            return f"error: {_describe_own(error)}", state
        if size > MOST_STATE:
            return f"error: the state would have more than {MOST_STATE:,} characters", state
        return content, changed


def _write_result(found: Any) -> str:
    """The result of a function as text. A subclass of str becomes a plain one, without its own methods."""
    if isinstance(found, str):
        return "".join(str.__iter__(found))
    return json.dumps(found, ensure_ascii=False, allow_nan=False)


def _describe_own(error: BaseException) -> str:
    """The error of a function, whose own text may fail too."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except MemoryError:
        raise
    except (Exception, SystemExit):
        return name


class _LastLine:
    """The last line that a program writes into `stream`, its standard error. Nothing else is kept."""

    def __init__(self) -> None:
        source, target = os.pipe()
        self._text = ""
        self.stream = os.fdopen(target, "w")
        self._thread = threading.Thread(
            target=self._follow, args=(os.fdopen(source, errors="replace"),), daemon=True
        )
        self._thread.start()

    def _follow(self, lines: TextIO) -> None:
        for line in iter(lambda: lines.readline(500), ""):
            self._text = line.strip() or self._text

    def read(self) -> str:
        """Return the line, once the program has ended or a second later."""
        self.stream.close()
        self._thread.join(1)
        return self._text


class _McpTools:
    """An MCP server, which lives as long as this process."""

    def __init__(self, command: str, folder: Path) -> None:
        try:
            from anyio.from_thread import start_blocking_portal
            from mcp import Client, StdioServerParameters, stdio_client
        except ImportError as error:
            raise JobError(INSTALL) from error
        stack, self._schemas = ExitStack(), list[Json]()
        errors = _LastLine()
        try:
            tied = ["-c", _TIED, *shlex.split(command)]
            place = StdioServerParameters(
                command=sys.executable, args=tied, cwd=folder, env=_list_variables()
            )
            portal = stack.enter_context(start_blocking_portal())
            self._call = portal.call
            client = Client(stdio_client(place, errors.stream))
            self._client: Any = stack.enter_context(portal.wrap_async_context_manager(client))
            self._schemas = self._list_tools()
        except Exception as error:
            line = errors.read()
            why = _describe(error) + (f"; its last line on standard error: {line}" if line else "")
            raise JobError(f"the MCP server {command!r} cannot be used: {why}") from error
        finally:
            errors.stream.close()
        self._stack = stack  # entered until this process ends

    def _list_tools(self) -> list[Json]:
        found, cursor = list[Json](), None
        for _ in range(MOST_PAGES):
            page = self._call(functools.partial(self._client.list_tools, cursor=cursor))
            for tool in page.tools:
                content = {"name": tool.name, "parameters": tool.input_schema}
                content |= {"description": tool.description} if tool.description else {}
                found.append({"type": "function", "function": content})
            cursor = page.next_cursor
            if cursor is None:
                return found
        raise ValueError("its list of tools does not end")

    def list_schemas(self) -> list[Json]:
        return self._schemas

    def call(self, name: str, arguments: Json, state: Json) -> tuple[str, Json]:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            found = self._call(self._client.call_tool, name, arguments)
        except MCPError as error:
            if (error.code, error.message) == (CONNECTION_CLOSED, "Connection closed"):
                os._exit(1)  # the server has ended, and with it what it kept: the next call starts another
            return f"error: {error}", state
        except Exception as error:  # a reply that is none
            return f"error: the MCP server's reply cannot be used: {_describe(error)}", state
        texts = [each.text if each.type == "text" else f"[{each.type}]" for each in found.content]
        return ("error: " if found.is_error else "") + "\n".join(texts), state


def _list_variables() -> dict[str, str]:
    """The environment of a server: without what is secret, but with the programs of this environment, and the
    mark by which it is ended."""
    path = os.pathsep.join([str(Path(sys.prefix, "bin")), os.environ.get("PATH", os.defpath)])
    return {"PATH": path, MARK: os.environ.get(MARK, "")}


def _describe(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def _cut(text: str) -> str:
    """The text without what no answer may have: lone surrogates, and more than MOST_TEXT characters."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= MOST_TEXT:
        return text
    left = len(text) - MOST_TEXT
    return f"{text[: MOST_TEXT // 2]}\n[{left:,} characters left out]\n{text[-MOST_TEXT // 2 :]}"
