"""Open WebUI with native tools: /v1/chat/completions.

After `backend/open_webui/utils/middleware.py` (the loop of tools), `utils/misc.py` and `routers/openai.py`
(the body).
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from tests.clients.agents.session import (
    Answer,
    Call,
    ChatAgent,
    Json,
    make_chat_call,
    make_chat_tools,
    write_rules,
)
from tests.helpers.served_model import make_image_part

# Functions of Python, described by their signatures.
TOOLS: tuple[tuple[str, Json], ...] = (
    (
        "list_files",
        {"properties": {"path": {"description": "The folder.", "type": "string"}}, "required": ["path"]},
    ),
    (
        "view_file",
        {
            "properties": {
                "file_id": {"type": "string"},
                "max_chars": {"default": 10000, "type": "integer"},
                "page": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            },
            "required": ["file_id"],
        },
    ),
    (
        "execute_code",
        {"properties": {"code": {"type": "string"}, "language": {"type": "string"}}, "required": ["code"]},
    ),
    (
        "write_note",
        {"properties": {"title": {"type": "string"}, "content": {"type": "string"}}, "required": ["title"]},
    ),
    ("get_current_timestamp", {"properties": {}, "required": []}),
)


class OpenWebUi(ChatAgent):
    system = (f"You are an assistant.\n{write_rules(45)}",)
    names = {
        "list": "list_files",
        "read": "view_file",
        "run": "execute_code",
        "edit": "write_note",
        "see": "view_file",
    }

    @property
    def headers(self) -> Mapping[str, str]:
        return {
            "authorization": "Bearer none",
            "user-agent": "Python/3.11 aiohttp/3.14.1",
            "x-openwebui-user-name": "Zora",
            "x-openwebui-user-id": "b4",
            "x-openwebui-user-email": "zora@example.org",
            "x-openwebui-user-role": "admin",
            "x-openwebui-chat-id": "fe79",
        }

    def ask(self, text: str) -> None:
        if len(self.messages) == 1:
            self.messages.append({"role": "user", "content": text})
        else:
            self.messages.append(
                {"role": "user", "content": [{"type": "text", "text": text}, make_image_part()]}
            )

    def make_body(self) -> Json:
        return {
            "stream": True,
            "model": "embedded",
            "messages": list(self.messages),
            "stream_options": {"include_usage": True},
            "temperature": 0.8,
            "max_tokens": 4096,
            "tools": make_chat_tools(TOOLS),
        }

    def make_content(self, answer: Answer) -> str:
        """Within a loop of tools, reasoning is sent back as tags."""
        reasoning = f"<think>{answer.reasoning}</think>\n" if answer.reasoning and answer.calls else ""
        return reasoning + answer.text

    def repeat_call(self, call: Call, index: int) -> Json:
        """With its index. Arguments go through an object: they come back as Python writes them, in ASCII."""
        return make_chat_call(Call(call.id, call.name, json.dumps(json.loads(call.arguments))), index=index)

    def make_arguments(self, kind: str, about: str) -> Json:
        if kind == "list":
            return {"path": about}
        if kind == "run":
            return {"code": about, "language": "shell"}
        if kind == "edit":
            return {"title": "parser", "content": about}
        return {"file_id": about, "max_chars": 10000}

    def make_task_bodies(self) -> list[Json]:
        """Titles, tags and follow-up questions are asked for beside the chat."""
        tasks = ("a title of 3 to 5 words", "one to three tags", "three questions that the user may ask next")
        return [
            {
                "model": "embedded",
                "messages": [{"role": "user", "content": f'### Task:\nReturn {task} as JSON: {{"x": ...}}'}],
                "stream": False,
                "max_tokens": 64,
            }
            for task in tasks
        ]
