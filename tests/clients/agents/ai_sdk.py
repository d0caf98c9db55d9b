"""OpenCode and Cline: both send what the package `@ai-sdk/openai-compatible` makes of their messages.

After the package itself (node_modules of tests/clients/node), OpenCode's `session/llm.ts` and
`provider/transform.ts`, and Cline's `sdk/packages/llms/src/providers/ai-sdk.ts` and
`sdk/packages/core/src/extensions/tools/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tests.clients.agents.session import (
    RESULTS,
    Answer,
    Call,
    ChatAgent,
    Json,
    make_chat_call,
    make_chat_tools,
    write_rules,
)
from tests.helpers.served_model import make_image_part

SCHEMA = "https://json-schema.org/draft/2020-12/schema"


def closed(required: int = 1, **properties: Any) -> Json:
    """The parameters of a tool as zod writes them."""
    return {"properties": properties, "required": list(properties)[:required], "additionalProperties": False}


def string(about: str = "") -> Json:
    return {"type": "string", **({"description": about} if about else {})}


class AiSdkAgent(ChatAgent):
    """Messages in the order of the conversation; of an answer its text, its reasoning and its calls."""

    tools: tuple[tuple[str, Json], ...]
    reasoning_field = "reasoning_content"

    def make_fields(self) -> Json:
        """The fields of a body besides messages and tools."""
        return {}

    def make_body(self) -> Json:
        return {
            "model": "embedded",
            **self.make_fields(),
            "messages": list(self.messages),
            "tools": make_chat_tools(self.tools, {"$schema": SCHEMA}),
            "tool_choice": "auto",
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    def repeat_call(self, call: Call, index: int) -> Json:
        """The arguments go through an object: they come back as JavaScript writes them."""
        arguments = json.dumps(json.loads(call.arguments), separators=(",", ":"), ensure_ascii=False)
        return make_chat_call(Call(call.id, call.name, arguments))


class OpenCode(AiSdkAgent):
    names = {"list": "list", "read": "read", "run": "bash", "edit": "edit", "see": "read"}
    system = (
        f"You are opencode, an agent for the command line.\n{write_rules(40)}",
        "<env>\n  Platform: darwin\n</env>",
    )
    tools = (
        ("bash", closed(2, command=string(), description=string(), timeout={"type": "number"})),
        (
            "edit",
            closed(
                3, filePath=string(), oldString=string(), newString=string(), replaceAll={"type": "boolean"}
            ),
        ),
        (
            "list",
            closed(
                0, path=string("The absolute path"), ignore={"type": "array", "items": {"type": "string"}}
            ),
        ),
        ("read", closed(1, filePath=string(), offset={"type": "number"}, limit={"type": "number"})),
        ("context7_resolve-library-id", closed(1, libraryName=string())),
        ("todoread", closed(0)),
    )

    @property
    def headers(self) -> Mapping[str, str]:
        return {
            "authorization": "Bearer none",
            "user-agent": "opencode/1.0.0 ai-sdk/openai-compatible/3.0.92",
        }

    def make_fields(self) -> Json:
        return {
            "max_tokens": 32000,
            "temperature": 0.55,
            "top_p": 1,
            "prompt_cache_key": "ses_5c0ffee0ffeeXYZ",
        }

    def ask(self, text: str) -> None:
        parts = [text, "<system-reminder>\nYour mode is build.\n</system-reminder>"]
        content = [{"type": "text", "text": part} for part in parts]
        self.messages.append({"role": "user", "content": content})

    def take(self, answer: Answer) -> None:
        super().take(answer)
        if any(self.get_kind(call) == "see" for call in answer.calls):  # the file follows as the user's
            text = {"type": "text", "text": "The picture that was read:"}
            self.messages.append({"role": "user", "content": [text, make_image_part()]})

    def make_arguments(self, kind: str, about: str) -> Json:
        if kind == "list":
            return {"path": f"/{about}"}
        if kind == "run":
            return {"command": about, "description": "Runs a command"}
        if kind == "edit":
            return {"filePath": "/src/parser.py", "oldString": "x", "newString": about}
        return {"filePath": f"/{about}"}

    def make_title_body(self) -> Json:
        """Titles have a request of their own, with the user's words and without tools."""
        received = [message for message in self.messages if message["role"] == "user"][:1]
        return {
            "model": "embedded",
            "max_tokens": 64,
            "temperature": 0.5,
            "messages": [
                {"role": "system", "content": "You write titles."},
                {"role": "user", "content": "Generate a title for this conversation:\n"},
                *received,
            ],
            "stream": True,
            "stream_options": {"include_usage": True},
        }


class Cline(AiSdkAgent):
    names = {
        "list": "search_codebase",
        "read": "read_files",
        "run": "run_commands",
        "edit": "editor",
        "see": "read_files",
    }
    system = (f"You are Cline, a coding agent.\n{write_rules(40)}",)
    tools = (
        (
            "read_files",
            closed(
                files={
                    "type": "array",
                    "description": "Array of file read requests",
                    "items": {
                        "type": "object",
                        "properties": {
                            "path": string("The absolute path"),
                            "start_line": {
                                "anyOf": [
                                    {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
                                    {"type": "null"},
                                ]
                            },
                        },
                        "required": ["path"],
                        "additionalProperties": False,
                    },
                }
            ),
        ),
        ("search_codebase", closed(queries={"type": "array", "items": string("A regular expression")})),
        ("run_commands", closed(commands={"type": "array", "items": string("A complete shell command")})),
        ("editor", closed(2, path={**string(), "minLength": 1}, new_text=string(), old_text=string())),
        (
            "ask_question",
            closed(2, question=string(), options={"type": "array", "items": string(), "minItems": 2}),
        ),
    )

    @property
    def headers(self) -> Mapping[str, str]:
        return {
            "authorization": "Bearer none",
            "user-agent": "Cline/4.1.0 ai/7.0.173 ai-sdk/openai-compatible/3.0.92 runtime/node.js/22",
            "http-referer": "https://example.org",
            "x-title": "Cline",
        }

    def ask(self, text: str) -> None:
        self.messages.append({"role": "user", "content": f'<user_input mode="act">{text}</user_input>'})

    def make_result(self, kind: str) -> Any:
        """Results are objects, written as JSON; a picture goes beside the text."""
        result = [{"query": kind, "result": RESULTS[kind], "success": kind != "run"}]
        text = json.dumps(result, separators=(",", ":"), ensure_ascii=False)
        if kind != "see":
            return text
        return [{"type": "text", "text": text}, make_image_part()]

    def make_arguments(self, kind: str, about: str) -> Json:
        if kind == "list":
            return {"queries": [about]}
        if kind == "run":
            return {"commands": [about]}
        if kind == "edit":
            return {"path": "/src/parser.py", "old_text": "x", "new_text": about}
        return {"files": [{"path": f"/{about}", "start_line": None}]}
