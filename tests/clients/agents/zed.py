"""Zed's provider for servers with OpenAI's API: /v1/chat/completions.

After `crates/open_ai/src/open_ai.rs` and `completion.rs`,
`crates/language_models/src/provider/open_ai_compatible.rs`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.clients.agents.session import (
    RESULTS,
    Call,
    ChatAgent,
    Json,
    make_chat_call,
    make_chat_tools,
    write_rules,
)
from tests.helpers.served_model import make_image_part

# As the Rust package schemars writes types: titles, formats of integers, definitions.
TOOLS: tuple[tuple[str, Json], ...] = (
    (
        "read_file",
        {
            "required": ["path"],
            "properties": {
                "path": {"type": "string", "description": "The relative path of the file"},
                "start_line": {
                    "type": ["integer", "null"],
                    "format": "uint32",
                    "minimum": 0,
                    "default": None,
                },
            },
        },
    ),
    ("list_directory", {"required": ["path"], "properties": {"path": {"type": "string"}}}),
    (
        "terminal",
        {
            "required": ["command", "cd"],
            "properties": {"command": {"type": "string"}, "cd": {"type": "string"}},
        },
    ),
    (
        "edit_file",
        {
            "required": ["path", "mode", "content"],
            "properties": {
                "path": {"type": "string"},
                "content": {"type": "string"},
                "mode": {
                    "oneOf": [
                        {"description": "Change a file.", "type": "string", "const": "edit"},
                        {"description": "Make a file.", "type": "string", "const": "create"},
                    ]
                },
            },
        },
    ),
    ("thinking", {"required": ["content"], "properties": {"content": {"type": "string"}}}),
)


class Zed(ChatAgent):
    system = (f"You are an agent in an editor.\n{write_rules(45)}",)
    reasoning_field = "reasoning_content"
    names = {
        "list": "list_directory",
        "read": "read_file",
        "run": "terminal",
        "edit": "edit_file",
        "see": "read_file",
    }

    @property
    def headers(self) -> Mapping[str, str]:
        return {"authorization": "Bearer none", "user-agent": "Zed/1.20.0 (macos; aarch64)"}

    def ask(self, text: str) -> None:
        """Several parts of words stay parts; one is a string."""
        if len(self.messages) == 1:
            context = "<context>\nThe following items were attached by the user.\n</context>\n"
            parts = [{"type": "text", "text": part} for part in (context, text)]
            self.messages.append({"role": "user", "content": parts})
        else:
            self.messages.append({"role": "user", "content": text})

    def make_body(self) -> Json:
        return {
            "model": "embedded",
            "messages": list(self.messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 32000,
            "temperature": 1.0,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "tools": make_chat_tools(TOOLS, {"$schema": "https://json-schema.org/draft/2020-12/schema"}),
            "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
            "reasoning_effort": "medium",
        }

    def repeat_call(self, call: Call, index: int) -> Json:
        """The arguments go through an object, written without spaces and with sorted keys."""
        arguments = json.dumps(
            json.loads(call.arguments), separators=(",", ":"), sort_keys=True, ensure_ascii=False
        )
        return make_chat_call(Call(call.id, call.name, arguments))

    def make_result(self, kind: str) -> Any:
        if kind == "see":
            return [{"type": "text", "text": "The picture:"}, make_image_part()]
        return RESULTS[kind]

    def make_arguments(self, kind: str, about: str) -> Json:
        if kind == "run":
            return {"command": about, "cd": "src"}
        if kind == "edit":
            return {"path": "src/parser.py", "mode": "edit", "content": about}
        return {"path": about}
