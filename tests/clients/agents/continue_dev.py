"""Continue's provider `openai`: /v1/chat/completions through the package `openai` for Node.

After `core/llm/openaiTypeConverters.ts`, `core/llm/llms/OpenAI.ts`, `packages/openai-adapters` and
`core/tools/definitions`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.clients.agents.session import Answer, ChatAgent, Json, make_chat_tools, write_rules
from tests.helpers.served_model import make_image_part

TOOLS: tuple[tuple[str, Json], ...] = (
    ("read_file", {"required": ["filepath"], "properties": {"filepath": {"type": "string"}}}),
    (
        "single_find_and_replace",
        {
            "required": ["filepath", "old_string", "new_string"],
            "properties": {
                "filepath": {"type": "string"},
                "old_string": {"type": "string"},
                "new_string": {"type": "string"},
                "replace_all": {"type": "boolean"},
            },
        },
    ),
    (
        "run_terminal_command",
        {
            "required": ["command"],
            "properties": {"command": {"type": "string"}, "waitForCompletion": {"type": "boolean"}},
        },
    ),
    ("ls", {"properties": {"dirPath": {"type": "string"}, "recursive": {"type": "boolean"}}}),
    ("view_diff", {"properties": {}}),
)


class Continue(ChatAgent):
    system = (f"<important_rules>\n{write_rules(45)}\n</important_rules>",)
    max_calls = 1  # `parallel_tool_calls` is false
    names = {
        "list": "ls",
        "read": "read_file",
        "run": "run_terminal_command",
        "edit": "single_find_and_replace",
        "see": "read_file",
    }

    @property
    def headers(self) -> Mapping[str, str]:
        return {
            "accept": "application/json",
            "authorization": "Bearer none",
            "user-agent": "OpenAI/JS 5.13.1",
            "x-stainless-lang": "js",
            "x-stainless-runtime": "node",
        }

    def ask(self, text: str) -> None:
        """Words alone are a string; with a picture they are parts, whose detail is always given."""
        if len(self.messages) == 1:
            self.messages.append({"role": "user", "content": text})
            return
        image = make_image_part()
        image["image_url"]["detail"] = "auto"
        self.messages.append({"role": "user", "content": [{"type": "text", "text": text}, image]})

    def make_body(self) -> Json:
        return {
            "messages": list(self.messages),
            "model": "embedded",
            "max_tokens": 4096,
            "temperature": 0,
            "top_p": 0.95,
            "frequency_penalty": 0,
            "presence_penalty": 0,
            "stream": True,
            "tools": make_chat_tools(TOOLS),
            "parallel_tool_calls": False,
            "stream_options": {"include_usage": True},
        }

    def make_content(self, answer: Answer) -> str:
        """Never empty; reasoning is not sent back."""
        return answer.text or " "

    def make_arguments(self, kind: str, about: str) -> Json:
        if kind == "list":
            return {"dirPath": about, "recursive": False}
        if kind == "run":
            return {"command": about}
        if kind == "edit":
            return {"filepath": "src/parser.py", "old_string": "x", "new_string": about}
        return {"filepath": about}
