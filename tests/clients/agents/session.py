"""A session of an agent: what the user says, what the model answers, and what the agent makes of it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A tool call of an answer; `arguments` as the text that came."""

    id: str
    name: str
    arguments: str


@dataclass
class Answer:
    """An answer as a client puts it together. `items`: its output items or blocks, if the API has any."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    items: list[Json] = field(default_factory=list)
    finish: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Step:
    """What the model answers. `calls`: kinds of tools (the keys of `names`), and what each is about."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class UserTurn:
    """What the user says, and how the model goes on until it has answered."""

    text: str
    steps: tuple[Step, ...]


RULES = (
    "Read a file before you change it, and change as little as necessary.",
    "Use absolute paths; the working folder may differ from the folder of the project.",
    "Run the tests after each change, and say which of them failed.",
    "Never print secrets, and never write them to a file that is tracked.",
    "Ask the user when two readings of a request lead to different code.",
    "Answer in few words; the user reads on a narrow terminal.",
    "Keep the style of the file: its names, its quotes, its line length.",
    "Search with the search tool and not with the shell.",
)
# Arguments that are hard to carry: quotes, line feeds, tags of tool-call formats, other scripts.
EDIT = 'def f(x):\n    """</parameter> "quoted" \\d+ Größe 漢字"""\n    return {"a": [1, 2.5, None]}\n'
TURNS = (
    UserTurn(
        "The test of the parser fails since yesterday. Find out why and mend it.",
        (
            Step(calls=(("list", "src"),)),
            Step("Two of them matter.", calls=(("read", "src/parser.py"), ("read", "src/test.py"))),
            Step("I run the test before I change anything.", calls=(("run", "pytest -q src/test.py"),)),
            Step(reasoning="The default is wrong.", calls=(("edit", EDIT),)),
            Step("The default of `f` was wrong; the test passes now."),
        ),
    ),
    UserTurn(
        "Is there a plot of the timings? What does it show?",
        (
            Step("Let me look.", calls=(("run", "ls plots"),)),
            Step(reasoning="There is one picture.", calls=(("see", "plots/a.png"),)),
            Step("It shows one red circle, and no timings."),
        ),
    ),
    UserTurn(
        "Then remove it, please.",
        (Step(calls=(("run", "git rm plots/a.png"),)), Step("It is removed.")),
    ),
)
RESULTS = {
    "list": "parser.py\ntest.py\ntables.py\nREADME.md\n",
    "read": "     1\tfrom tables import WORDS\n     2\t\n     3\tdef f(x=None):\n     4\t    return WORDS[x]",
    "run": "1 failed, 11 passed in 0.42s\nFAILED test.py::test_f - KeyError: None\n",
    "edit": "The file was changed: 3 lines added, 2 removed.",
    "see": "The picture was read.",
}


def write_rules(count: int) -> str:
    """Our own system prompt of about 14 * `count` words."""
    return "\n".join(f"{i + 1}. {RULES[i % len(RULES)]}" for i in range(count))


def describe_tool(name: str, sentences: int = 3) -> str:
    """Our own description of a tool; those of agents are long."""
    usage = " ".join(RULES[(len(name) + i) % len(RULES)] for i in range(sentences))
    return f"The tool {name}. {usage}"


class Agent(ABC):
    """Builds the body of the next request from what was said so far.

    `path`: the endpoint. `names`: the agent's tool for each kind of call.
    """

    path: str
    names: Mapping[str, str]
    max_calls = 2  # how many calls the agent wants in an answer at most

    @property
    @abstractmethod
    def headers(self) -> Mapping[str, str]: ...

    @abstractmethod
    def ask(self, text: str) -> None:
        """Add what the user says."""

    @abstractmethod
    def make_body(self) -> Json:
        """The body of the next request."""

    @abstractmethod
    def take(self, answer: Answer) -> None:
        """Add an answer, as the agent keeps it, and the results of its calls."""

    @abstractmethod
    def make_arguments(self, kind: str, about: str) -> Json:
        """The arguments of a call of the tool `names[kind]`."""

    @abstractmethod
    def read_stream(self, text: str) -> Answer:
        """Put the answer together from the stream's text."""

    def get_kind(self, call: Call) -> str:
        """The kind of a call. Agents that have no tool for images see them through the one that reads."""
        path = json.loads(call.arguments) if call.arguments.startswith("{") else {}
        kinds = [kind for kind, name in self.names.items() if name == call.name]
        return "see" if "see" in kinds and ".png" in json.dumps(path) else kinds[0]

    def write_answer(self, step: Step) -> str:
        """A step in the format of the embedded model."""
        calls = [
            f'<tool_call>\n{{"name": "{self.names[kind]}", '
            f'"arguments": {json.dumps(self.make_arguments(kind, about), ensure_ascii=False)}}}\n</tool_call>'
            for kind, about in step.calls
        ]
        reasoning = f"<think>\n{step.reasoning}\n</think>\n\n" if step.reasoning else ""
        return reasoning + "\n".join([step.text] * bool(step.text) + calls)


class ChatAgent(Agent):
    """An agent on /v1/chat/completions. `system`: its system messages. How it writes its own answers differs:
    `make_content`, `repeat_call`, `make_result`; `reasoning_field` is where it sends reasoning back, if it
    does."""

    path = "/v1/chat/completions"
    system: tuple[str, ...]
    reasoning_field: str | None = None

    def __init__(self) -> None:
        self.messages: list[Json] = [{"role": "system", "content": text} for text in self.system]

    def take(self, answer: Answer) -> None:
        message: Json = {"role": "assistant", "content": self.make_content(answer)}
        if answer.reasoning and self.reasoning_field is not None:
            message[self.reasoning_field] = answer.reasoning
        if answer.calls:
            message["tool_calls"] = [self.repeat_call(call, at) for at, call in enumerate(answer.calls)]
        self.messages.append(message)
        for call in answer.calls:
            content = self.make_result(self.get_kind(call))
            self.messages.append({"role": "tool", "tool_call_id": call.id, "content": content})

    def make_content(self, answer: Answer) -> str | None:
        """An answer without words has null content."""
        return answer.text or None

    def repeat_call(self, call: Call, index: int) -> Json:
        """A call as history; its arguments as the text that came."""
        return make_chat_call(call)

    def make_result(self, kind: str) -> Any:
        return RESULTS[kind]

    def read_stream(self, text: str) -> Answer:
        return read_chat_stream(text)


def list_events(text: str) -> list[Json]:
    """The data of a stream's events, without the last marker."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def read_chat_stream(text: str) -> Answer:
    """Chunks of /v1/chat/completions."""
    answer, calls = Answer(), {}
    for chunk in list_events(text):
        assert "error" not in chunk, chunk
        if usage := chunk.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        for choice in chunk["choices"]:
            delta = choice["delta"]
            answer.text += delta.get("content") or ""
            answer.reasoning += delta.get("reasoning_content") or ""
            answer.finish = choice["finish_reason"] or answer.finish
            for part in delta.get("tool_calls") or []:
                call = calls.setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
                call["id"] = part.get("id") or call["id"]
                for key in ("name", "arguments"):
                    call[key] += part["function"].get(key) or ""
    answer.calls = [Call(**calls[index]) for index in sorted(calls)]
    return answer


def make_chat_tools(tools: Sequence[tuple[str, Json]], schema: Mapping[str, Any] | None = None) -> list[Json]:
    """Functions of /v1/chat/completions; `schema` is added to each object of parameters."""
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": describe_tool(name),
                "parameters": {**(schema or {}), "type": "object", **parameters},
            },
        }
        for name, parameters in tools
    ]


def make_chat_call(call: Call, **more: Any) -> Json:
    """A call as history."""
    function = {"name": call.name, "arguments": call.arguments}
    return {**more, "id": call.id, "type": "function", "function": function}
