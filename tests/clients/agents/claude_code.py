"""Claude Code: /v1/messages with blocks, cache marks that move, adaptive thinking, and system messages on the
way.

After Anthropic's documentation of its API and its beta features, and what users report in public issues of
Claude Code (headers, the billing line, the `total_tokens` messages).
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
from tests.helpers.anthropic_bodies import BILLING
from tests.helpers.served_model import make_image_part

SCHEMA = "https://json-schema.org/draft/2020-12/schema"
TOOLS: dict[str, Json] = {
    "Bash": {
        "command": {"description": "The command to execute", "type": "string"},
        "timeout": {"description": "Optional timeout in milliseconds", "type": "number"},
        "description": {"description": "What the command does", "type": "string"},
        "run_in_background": {"type": "boolean"},
    },
    "Glob": {"pattern": {"type": "string"}, "path": {"type": "string"}},
    "Read": {
        "file_path": {"description": "The absolute path of the file", "type": "string"},
        "offset": {"type": "integer", "minimum": 0, "maximum": 9007199254740991},
        "limit": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
    },
    "Edit": {
        "file_path": {"type": "string"},
        "old_string": {"type": "string"},
        "new_string": {"type": "string"},
        "replace_all": {"type": "boolean", "default": False},
    },
    "TodoWrite": {
        "todos": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "content": {"type": "string", "minLength": 1},
                    "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
                },
                "required": ["content", "status"],
                "additionalProperties": False,
            },
        }
    },
    "mcp__docs__search": {"query": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}},
}
BETAS = (
    "claude-code-20250219",
    "interleaved-thinking-2025-05-14",
    "context-management-2025-06-27",
    "prompt-caching-scope-2026-01-05",
    "effort-2025-11-24",
)
MARK: Json = {"type": "ephemeral", "ttl": "1h"}


def text(value: str, **more: Any) -> Json:
    return {"type": "text", "text": value, **more}


class ClaudeCode(Agent):
    path = "/v1/messages?beta=true"
    names = {"list": "Glob", "read": "Read", "run": "Bash", "edit": "Edit", "see": "Read"}

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self.requests = 0
        self.message_id: str | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        return {
            "authorization": "Bearer none",
            "anthropic-version": "2023-06-01",
            "anthropic-beta": ",".join(BETAS),
            "anthropic-dangerous-direct-browser-access": "true",
            "user-agent": "claude-cli/2.1.280 (external, cli)",
            "x-app": "cli",
            "x-claude-code-session-id": "fe79a1de-0000-4000-8000-000000000001",
            "x-stainless-lang": "js",
            "x-stainless-retry-count": "0",
            "x-stainless-timeout": "3000",
        }

    def ask(self, value: str) -> None:
        content = [text(value)]
        if not self.messages:
            reminder = f"<system-reminder>\nThe project's notes:\n{write_rules(6)}\n</system-reminder>"
            content = [text(reminder), *content]
        self.messages.append({"role": "user", "content": content})
        if len(self.messages) == 1:
            self._add_system("# Environment\nWorking folder: /src\nPlatform: darwin")
        self._add_system()

    def _add_system(self, value: str = "") -> None:
        """A system message on the way; how many tokens are left differs in each and stays in the history."""
        left = 180_000 - 731 * len(self.messages)
        value = value or f"<total_tokens>{left} tokens left</total_tokens>"
        self.messages.append({"role": "system", "content": [text(value)]})

    def make_body(self) -> Json:
        self.requests += 1
        tools = [
            {
                "name": name,
                "description": describe_tool(name),
                "input_schema": {
                    "$schema": SCHEMA,
                    "type": "object",
                    "properties": properties,
                    "required": list(properties)[:1],
                    "additionalProperties": False,
                },
                **({"eager_input_streaming": True} if name in ("Edit", "Bash") else {}),
            }
            for name, properties in TOOLS.items()
        ]
        return {
            "model": "claude-opus-4-6",
            "max_tokens": 32000,
            "stream": True,
            "system": [
                text(BILLING.format(f"{0xFA690 + self.requests:x}")),
                text("You are an agent for the command line.", cache_control=MARK),
                text(write_rules(45), cache_control={**MARK, "scope": "global"}),
            ],
            "messages": self._mark_last(),
            "tools": tools,
            "metadata": {"user_id": '{"device_id":"b4","account_uuid":"","session_id":"fe79"}'},
            "thinking": {"type": "adaptive", "display": "summarized"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
            "diagnostics": {"previous_message_id": self.message_id},
        }

    def _mark_last(self) -> list[Json]:
        """The messages; the last block alone has the cache mark, which is elsewhere in each request."""
        *before, last = self.messages
        *blocks, final = last["content"]
        return [*before, {**last, "content": [*blocks, {**final, "cache_control": MARK}]}]

    def take(self, answer: Answer) -> None:
        self.messages.append({"role": "assistant", "content": answer.items})
        results = [self._make_result(call) for call in answer.calls]
        if results:
            self.messages.append({"role": "user", "content": results})
            self._add_system()

    def _make_result(self, call: Call) -> Json:
        kind, made = self.get_kind(call), {"tool_use_id": call.id, "type": "tool_result"}
        if kind == "see":
            data = make_image_part()["image_url"]["url"].partition(",")[2]
            source = {"type": "base64", "data": data, "media_type": "image/png"}
            return {**made, "content": [{"type": "image", "source": source}]}
        return {**made, "content": RESULTS[kind], **({"is_error": kind == "run"} if kind != "read" else {})}

    def make_arguments(self, kind: str, about: str) -> Json:
        if kind == "list":
            return {"pattern": f"{about}/**/*"}
        if kind == "run":
            return {"command": about, "description": "Runs a command"}
        if kind == "edit":
            return {
                "file_path": "/src/parser.py",
                "old_string": "x",
                "new_string": about,
                "replace_all": False,
            }
        return {"file_path": f"/{about}"}

    def read_stream(self, stream: str) -> Answer:
        answer, inputs = Answer(), {}
        for event in list_events(stream):
            assert event["type"] != "error", event
            if event["type"] == "message_start":
                self.message_id = event["message"]["id"]
                usage = event["message"]["usage"]
                answer.cached_tokens = usage["cache_read_input_tokens"]
                answer.prompt_tokens = usage["input_tokens"] + answer.cached_tokens
                answer.prompt_tokens += usage.get("cache_creation_input_tokens") or 0
            if event["type"] == "content_block_start":
                answer.items.append(event["content_block"])
            if event["type"] == "content_block_delta":
                delta, block = event["delta"], answer.items[event["index"]]
                if delta["type"] == "input_json_delta":
                    inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
                else:
                    (key,) = delta.keys() - {"type"}
                    block[key] = block.get(key, "") + delta[key]
            if event["type"] == "message_delta":
                answer.finish = event["delta"]["stop_reason"]
        for index, block in enumerate(answer.items):
            if block["type"] == "tool_use":
                block["input"] = json.loads(inputs.get(index) or "{}")
                answer.calls.append(Call(block["id"], block["name"], json.dumps(block["input"])))
            answer.text += block.get("text", "")
            answer.reasoning += block.get("thinking", "")
        return answer

    def make_side_bodies(self) -> list[Json]:
        """What is sent beside the conversation: a load check of one token, and a title by a schema."""
        schema = {
            "type": "object",
            "properties": {"title": {"type": "string"}},
            "required": ["title"],
            "additionalProperties": False,
        }
        common = {"model": "claude-haiku-4-5-20251001", "metadata": {"user_id": "{}"}}
        return [
            {**common, "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]},
            {
                **common,
                "max_tokens": 64,
                "stream": True,
                "temperature": 1,
                "thinking": {"type": "disabled"},
                "tools": [],
                "system": [text(BILLING.format("1")), text("Write a title.")],
                "messages": [{"role": "user", "content": [text("Mend the parser.")]}],
                "output_config": {"format": {"type": "json_schema", "schema": schema}},
            },
        ]
