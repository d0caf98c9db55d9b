"""The keys of a tool loop: `agent` in a task of a suite, and in a job line.

The string under a field is its description in the reference of suites. A line also has
`folder`, that of the tools' files relative to the job, and `digests`, the SHA-256 of each file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Annotated, Any

from mlxrun.config.setting_annotations import Range
from mlxrun.config.settings import Config, ModelSettings, SamplingSettings
from mlxrun.core.field_errors import get_json_type, suggest

CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class SimulatedUser:
    """A model that plays the user. It is asked where the agent answers without calling a tool. It sees the
    texts of both, but no tool calls."""

    prompt: str
    """Its system message: who it is, what it wants, and when it says `stop`. A template."""
    model: str | None = None
    """The model, as in `model.path` of a config, relative to the suite. null: that of the cell."""
    stop: str = "###STOP###"
    """Text in its answer that ends the conversation."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Fields of its requests, such as `max_tokens`, or `model` for an adapter of the cell's model."""


@dataclass(frozen=True, slots=True)
class AgentLoop:
    """A tool loop: the model calls tools and gets their results until it answers. See docs/agent-evals.md."""

    tools: tuple[str | dict[str, Any], ...] = ()
    """Python functions, as `FILE.py:function` relative to the suite or `module:function`. A mapping has
    `function`, and `name`, `description` or `parameters` in place of those made from its signature and
    docstring."""
    mcp: str | None = None
    """Command that starts an MCP server over stdio, in the folder of the suite. It needs `pip install
    'mlxrun[agents]'`."""
    max_turns: Annotated[int, Range(1, 1000)] = 20
    """The most answers of the model in one conversation."""
    seconds: Annotated[int, Range(1, None)] = 600
    """The most seconds of one conversation. A call that has begun may still end."""
    call_seconds: Annotated[int, Range(1, None)] = 60
    """The most seconds of one call; what takes longer is killed."""
    state: dict[str, Any] = field(default_factory=dict)
    """The first state: what functions get as `state` and may change, and what scorers get. Templates."""
    sandbox: bool | tuple[str, ...] = False
    """Whether tools run in bubblewrap, without network and files. A list has the files and folders, relative
    to the suite, that they may read besides their own."""
    files: tuple[str, ...] = ()
    """Files and folders, relative to the suite, that the tools read. Like the modules of the suite's folder
    that a tool imports, they have checksums in the lines, and are in a bundle."""
    replay: bool | None = None
    """Whether a resumed conversation makes its earlier calls again, for tools that keep more than `state`.
    null: with an MCP server only."""
    user: SimulatedUser | None = None
    """A model that plays the user."""

    @property
    def repeats_calls(self) -> bool:
        """Whether the tools keep more than the state, which their earlier calls have to make again."""
        return self.mcp is not None if self.replay is None else self.replay

    @property
    def has_tools(self) -> bool:
        return bool(self.tools) or self.mcp is not None

    def dump(self) -> dict[str, Any]:
        """Dump the keys that do not have their default, as a line has them: the config names models."""
        given = {key: each for key, each in asdict(self).items() if getattr(self, key) != _DEFAULTS[key]}
        if self.user is not None:
            given["user"] = {key: each for key, each in given["user"].items() if key != "model"}
        return {key: list(each) if isinstance(each, tuple) else each for key, each in given.items()}


@dataclass(frozen=True, slots=True)
class LineAgent:
    """The `agent` of a job line. `folder`: of the tools' files, relative to the job; `digests`: by file,
    empty if any content will do."""

    loop: AgentLoop
    folder: str = "."
    digests: Mapping[str, str] = field(default_factory=dict)


_DEFAULTS = {
    each.name: each.default if each.default_factory is MISSING else each.default_factory()
    for each in fields(AgentLoop)
}
_TEXTS = (list, "a list of texts and objects")
_PATHS = (list, "a list of paths")
_LISTS = ("tools", "sandbox", "files")
_COUNT = (int, "an integer from 1 on")
_KINDS: dict[str, tuple[Any, str]] = {
    "tools": _TEXTS,
    "mcp": (str, "a command"),
    "max_turns": _COUNT,
    "seconds": _COUNT,
    "call_seconds": _COUNT,
    "state": (dict, "an object"),
    "sandbox": (bool | list, "true, false or a list of paths"),
    "files": _PATHS,
    "replay": (bool, "true or false"),
    "user": (dict, "an object"),
    "folder": (str, "a folder"),
    "digests": (dict, "an object"),
}
_USER_KINDS = {"prompt": (str, "a text"), "stop": (str, "a text"), "generation": (dict, "an object")}
_TOOL_KINDS = {
    "function": (str, "a text"),
    "name": (str, "a text"),
    "description": (str, "a text"),
    "parameters": (dict, "a JSON schema"),
}


def parse_agent(value: Any) -> LineAgent:
    """Parse the `agent` of a line. ValueError with the reason if it is invalid."""
    found = {**_check_keys(value, _KINDS, "agent")}
    for each in found.get("tools", ()):
        if not isinstance(each, str):
            tool = _check_keys(each, _TOOL_KINDS, "agent.tools")
            if "function" not in tool:
                raise ValueError("agent.tools: a tool needs `function`")
    if "user" in found:
        if isinstance(found["user"], dict) and "model" in found["user"]:
            raise ValueError("agent.user.model: a line names no model; give the config `batch.user_model`")
        user = _check_keys(found["user"], _USER_KINDS, "agent.user")
        if not user.get("prompt") or not user.get("stop", "-"):
            raise ValueError("agent.user needs a `prompt`, and its `stop` is not empty")
        found["user"] = SimulatedUser(**user)
    lists = {key: tuple(found[key]) for key in _LISTS if isinstance(found.get(key), list)}
    for key in ("files", "sandbox"):
        if not all(isinstance(each, str) for each in lists.get(key, ())):
            raise ValueError(f"agent.{key} must be a list of paths")
    extra = {key: found.pop(key) for key in ("folder", "digests") if key in found}
    agent = LineAgent(replace(AgentLoop(), **{**found, **lists}), **extra)
    if not agent.loop.has_tools and agent.loop.user is None:
        raise ValueError("agent needs `tools`, `mcp` or `user`")
    return agent


def make_user_config(config: Config) -> Config | None:
    """Make the config of a model of its own that plays the user; None if there is none. Of the job's config
    it has how the engine computes, the form of weights in memory, and the seed."""
    if config.batch.user_model is None:
        return None
    own, batch = config.model, replace(config.batch, user_model=None)
    model = ModelSettings(path=config.batch.user_model, dtype=own.dtype, dequantize=own.dequantize)
    sampling = SamplingSettings(seed=config.sampling.seed)
    engine = {name: getattr(config, name) for name in ("engine", "scheduler", "cache", "media", "log")}
    return replace(Config(), model=model, sampling=sampling, batch=batch, **engine)


def check_agent_line(value: Any, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `agent` of a line. ValueError if the line cannot be answered by such a tool loop."""
    parse_agent(value)
    if url != CHAT:
        raise ValueError(f"agent: only {CHAT} has tool calls, and this line is for {url}")
    if not isinstance(body.get("messages"), list):
        raise ValueError("agent: the body needs a list of `messages`")
    if body.get("n") not in (None, 1):
        raise ValueError("agent: a conversation has one answer a turn; for several, use seeds instead of n")
    found: dict[str, Any] = value
    return found


def _check_keys(value: Any, kinds: Mapping[str, tuple[Any, str]], name: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, not {get_json_type(value)}")
    for key, each in value.items():
        if key not in kinds:
            raise ValueError(f"{name}.{key} is not known{suggest(key, kinds)}")
        kind, what = kinds[key]
        is_wrong = not isinstance(each, kind) or (kind is int and (isinstance(each, bool) or each < 1))
        if is_wrong:
            raise ValueError(f"{name}.{key} must be {what}, not {get_json_type(each)}")
    return value
