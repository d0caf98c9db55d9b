"""Codex CLI: /v1/responses without storage, with function, custom, namespace and hosted tools, and reasoning
back.

After codex-rs: `codex-api/src/common.rs` (the body), `protocol/src/models.rs` (the items), `tools/src` (the
tools).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.clients.agents.session import (
    RESULTS,
    Agent,
    Answer,
    Call,
    Json,
    describe_tool,
    list_events,
    write_rules,
)
from tests.helpers.served_model import make_image_part

SESSION = "0199a213-81c0-7800-8aa1-bbab2a035a53"
# Fields of output items that its types do not write again.
UNSENT = {"message": ("id", "status"), "reasoning": ("id", "status", "content")}


def function(name: str, required: int = 1, **properties: Any) -> Json:
    """A tool as Codex writes it: never strict, closed."""
    return {
        "type": "function",
        "name": name,
        "description": describe_tool(name),
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:required],
            "additionalProperties": False,
        },
    }


PATCH = """start: "*** Begin Patch" LF line+ "*** End Patch" LF?
line: /[^\\n]*/ LF
%import common.LF
"""
TOOLS: list[Json] = [
    function(
        "exec_command",
        cmd={"type": "string", "description": "Shell command to execute."},
        workdir={"type": "string", "description": "Optional working directory."},
        yield_time_ms={"type": "number", "description": "How long to wait for output before yielding."},
        max_output_tokens={"type": "number"},
        tty={"type": "boolean"},
    ),
    function("write_stdin", session_id={"type": "number"}, chars={"type": "string"}),
    function(
        "update_plan",
        0,
        explanation={"type": "string"},
        plan={
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"step": {"type": "string"}, "status": {"type": "string"}},
                "required": ["step", "status"],
                "additionalProperties": False,
            },
        },
    ),
    {
        "type": "custom",
        "name": "apply_patch",
        "description": describe_tool("apply_patch"),
        "format": {
            "type": "grammar",
            "syntax": "lark",
            "definition": PATCH,
        },
    },
    function("view_image", path={"type": "string"}),
    {"type": "web_search", "external_web_access": False, "search_content_types": ["text", "image"]},
    {
        "type": "tool_search",
        "execution": "client",
        "description": "Finds tools.",
        "parameters": {"type": "object"},
    },
    {
        "type": "namespace",
        "name": "mcp__docs__",
        "description": "Tools of the server docs.",
        "tools": [function("search", query={"type": "string"})],
    },
]


def message(role: str, *texts: str) -> Json:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


class Codex(Agent):
    path = "/v1/responses"
    names = {
        "list": "exec_command",
        "read": "exec_command",
        "run": "exec_command",
        "edit": "apply_patch",
        "see": "view_image",
    }

    def __init__(self) -> None:
        self.input: list[Json] = [
            message(
                "developer", "<permissions instructions>read-only</permissions instructions>", write_rules(8)
            ),
            message("user", f"# AGENTS.md instructions for /src\n\n{write_rules(10)}"),
            message(
                "user",
                "<environment_context>\n  <cwd>/src</cwd>\n  <shell>zsh</shell>\n</environment_context>",
            ),
        ]

    @property
    def headers(self) -> Mapping[str, str]:
        return {
            "accept": "text/event-stream",
            "authorization": "Bearer none",
            "originator": "codex_cli_rs",
            "user-agent": "codex_cli_rs/0.142.5 (Mac OS 14.5; arm64) iTerm.app/3.5",
            "session-id": SESSION,
            "thread-id": SESSION,
            "x-codex-window-id": f"{SESSION}:0",
            "x-codex-beta-features": "multi_agent",
        }

    def ask(self, text: str) -> None:
        if len(self.input) > 3:  # what has changed since the last turn comes as a developer's message
            self.input.append(
                message("developer", "<permissions instructions>full access</permissions instructions>")
            )
        self.input.append(message("user", text))

    def make_body(self) -> Json:
        return {
            "model": "gpt-5.4-codex",
            "instructions": f"You are a coding agent in a terminal.\n{write_rules(40)}",
            "input": list(self.input),
            "tools": TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "service_tier": "priority",
            "prompt_cache_key": SESSION,
            "text": {"verbosity": "low"},
            "client_metadata": {"x-codex-installation-id": SESSION, "session_id": SESSION},
        }

    def take(self, answer: Answer) -> None:
        for item in answer.items:
            unsent = UNSENT.get(item["type"], ("id",))
            sent = {key: value for key, value in item.items() if key not in unsent}
            if item["type"] == "message":
                parts = [{"type": part["type"], "text": part["text"]} for part in item["content"]]
                sent["content"] = parts
            self.input.append(sent)
        self.input += [self._make_result(call, answer.items) for call in answer.calls]

    def _make_result(self, call: Call, items: list[Json]) -> Json:
        kind = self.get_kind(call)
        if kind == "see":
            image = {
                "type": "input_image",
                "image_url": make_image_part()["image_url"]["url"],
                "detail": "high",
            }
            return {"type": "function_call_output", "call_id": call.id, "output": [image]}
        (item,) = (item for item in items if item.get("call_id") == call.id)
        return {"type": f"{item['type']}_output", "call_id": call.id, "output": RESULTS[kind]}

    def make_arguments(self, kind: str, about: str) -> Json:
        if kind == "edit":
            lines = "".join(f"+{line}\n" for line in about.splitlines())
            return {"input": f"*** Begin Patch\n*** Update File: src/parser.py\n\n{lines}*** End Patch\n"}
        if kind == "see":
            return {"path": f"/{about}"}
        return {"cmd": {"list": f"ls {about}", "read": f"cat {about}", "run": about}[kind], "workdir": "/src"}

    def get_kind(self, call: Call) -> str:
        for kind in ("edit", "see"):
            if call.name == self.names[kind]:
                return kind
        command = json.loads(call.arguments)["cmd"]
        return {"ls": "list", "cat": "read"}.get(command.split()[0], "run")

    def read_stream(self, text: str) -> Answer:
        answer = Answer()
        for event in list_events(text):
            assert event["type"] not in ("error", "response.failed"), event
            if event["type"] == "response.output_item.done":
                self._add_item(answer, event["item"])
            if event["type"] == "response.completed":
                usage = event["response"]["usage"]
                answer.finish = event["response"]["status"]
                answer.prompt_tokens = usage["input_tokens"]
                answer.cached_tokens = usage["input_tokens_details"]["cached_tokens"]
        return answer

    def _add_item(self, answer: Answer, item: Json) -> None:
        answer.items.append(item)
        if item["type"] == "message":
            answer.text += "".join(part["text"] for part in item["content"])
        if item["type"] == "reasoning":
            answer.reasoning += "".join(part["text"] for part in item.get("content") or [])
        if item["type"] in ("function_call", "custom_tool_call"):
            answer.calls.append(
                Call(item["call_id"], item["name"], item.get("arguments") or item.get("input", ""))
            )
