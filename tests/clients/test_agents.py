"""What OpenCode and Continue send to /v1/chat/completions, by their public sources and docs.

Shapes, not texts: the fields, the order of roles, the forms of content and of tools, one body at a time.
Whole sessions, also of other agents, are in test_agent_sessions.py.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from mlxrun.api.openai.request import prepare_request
from tests.helpers.served_model import ModelServer, make_image_part

Json = dict[str, Any]


def call(id: str, name: str, arguments: Json) -> Json:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


# -- OpenCode ---------------------------------------------------------------------------------------------
# Its package `@ai-sdk/openai-compatible`: streams only, usage on, tools with the JSON Schema that zod writes.

SCHEMA = "https://json-schema.org/draft/2020-12/schema"
OPENCODE_TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Executes a given bash command in a persistent shell session.",
            "parameters": {
                "$schema": SCHEMA,
                "type": "object",
                "properties": {
                    "command": {"description": "The command to execute", "type": "string"},
                    "timeout": {"description": "Optional timeout in milliseconds", "type": "number"},
                    "description": {"description": "What it does in 5-10 words.", "type": "string"},
                },
                "required": ["command", "description"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "todowrite",
            "description": "Use this tool to manage a structured task list.",
            "parameters": {
                "$schema": SCHEMA,
                "type": "object",
                "properties": {
                    "todos": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "properties": {
                                "content": {"type": "string", "description": "Brief description of the task"},
                                "status": {"type": "string"},
                                "priority": {"type": "string"},
                                "id": {"type": "string"},
                            },
                            "required": ["content", "status", "priority", "id"],
                            "additionalProperties": False,
                        },
                    }
                },
                "required": ["todos"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "context7_resolve-library-id",  # of an MCP server, whose name comes before
            "description": "Resolves a package name.",
            "parameters": {
                "type": "object",
                "properties": {
                    "libraryName": {"type": "string"},
                    "limit": {"type": "integer", "minimum": 1, "maximum": 9007199254740991},
                    "kind": {"anyOf": [{"type": "string", "enum": ["a", "b"]}, {"type": "null"}]},
                },
                "required": ["libraryName"],
                "additionalProperties": False,
                "$schema": "http://json-schema.org/draft-07/schema#",
            },
        },
    },
]
OPENCODE_SYSTEM = [
    {"role": "system", "content": "You are opencode, an interactive CLI tool."},
    {"role": "system", "content": "Here is some useful information:\n<env>\n  Platform: darwin\n</env>"},
]
OPENCODE: Json = {
    "model": "embedded",
    "max_tokens": 16,
    "temperature": 0.55,
    "top_p": 1,
    "messages": [*OPENCODE_SYSTEM, {"role": "user", "content": "list the files"}],
    "tools": OPENCODE_TOOLS,
    "tool_choice": "auto",
    "stream": True,
    "stream_options": {"include_usage": True},
}
# The second turn: parts where there are several, the thought as it came, results as text, an answer that was
# interrupted, a file as text, and the key that version 2 always sends.
OPENCODE_MORE: Json = {
    **OPENCODE,
    "prompt_cache_key": "ses_5c0ffee0ffeeXYZ",
    "messages": [
        *OPENCODE["messages"],
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I should look.",
            "tool_calls": [
                call("call_1", "bash", {"command": "ls", "description": "Lists files"}),
                call("call_2", "todowrite", {"todos": []}),
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "README.md\n"},
        {"role": "tool", "tool_call_id": "call_2", "content": "[]"},
        {"role": "assistant", "content": "One file."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what is in @README.md?"},
                {"type": "text", "text": "<file>\n00001| # Title\n</file>"},
            ],
        },
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "go on"},
        {"role": "user", "content": "<system-reminder>\nYour mode has changed.\n</system-reminder>"},
    ],
}
OPENCODE_CASES: dict[str, Json] = {
    "first turn": OPENCODE,
    "later turn": OPENCODE_MORE,
    # Titles and summaries: no tools, though the history has calls.
    "title": {
        "model": "embedded",
        "max_tokens": 16,
        "temperature": 0.5,
        "messages": [
            {"role": "system", "content": "You are a title generator."},
            {"role": "user", "content": "Generate a title for this conversation:\n"},
            {"role": "user", "content": "list the files"},
        ],
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "summary": {key: value for key, value in OPENCODE_MORE.items() if key not in ("tools", "tool_choice")},
    # An answer by a schema is a call of a tool that must be called.
    "structured output": {**OPENCODE, "tool_choice": "required"},
    "image": {
        **OPENCODE,
        "messages": [
            *OPENCODE_SYSTEM,
            {"role": "user", "content": [{"type": "text", "text": "What colour is it?"}, make_image_part()]},
        ],
    },
}

# -- Continue ---------------------------------------------------------------------------------------------
# Its provider `openai`, and `vllm`, `lmstudio` and others made of it: through the `openai` package for Node.

CONTINUE_TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Use this tool if you need to view the contents of an existing file.",
            "parameters": {
                "type": "object",
                "required": ["filepath"],
                "properties": {"filepath": {"type": "string", "description": "The path of the file to read"}},
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "run_terminal_command",
            "description": "Run a terminal command in the current directory.",
            "parameters": {
                "type": "object",
                "required": ["command"],
                "properties": {
                    "command": {"type": "string", "description": "The command to run."},
                    "waitForCompletion": {"type": "boolean", "description": "Whether to wait."},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "view_diff", "description": "View the current diff."}},
]
CONTINUE: Json = {
    "messages": [
        {"role": "system", "content": "<important_rules>\n  You are in agent mode.\n</important_rules>"},
        {"role": "user", "content": "fix the test"},
    ],
    "model": "embedded",
    "max_tokens": 16,
    "temperature": 0,
    "top_p": 0.95,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "stop": ["<|im_end|>", "</s>"],
    "stream": True,
    "tools": CONTINUE_TOOLS,
    "stream_options": {"include_usage": True},
}
CONTINUE_CASES: dict[str, Json] = {
    "first turn": CONTINUE,
    # Empty content is sent as a space; images have a detail.
    "later turn": {
        **CONTINUE,
        "messages": [
            *CONTINUE["messages"],
            {"role": "assistant", "content": " ", "tool_calls": [call("1", "read_file", {"filepath": "a"})]},
            {"role": "tool", "content": "x = 1", "tool_call_id": "1"},
            {"role": "assistant", "content": " ", "tool_calls": [call("2", "view_diff", {})]},
            {"role": "tool", "content": "", "tool_call_id": "2"},
            {"role": "assistant", "content": "Done."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "and this?"},
                    {**make_image_part(), "image_url": {**make_image_part()["image_url"], "detail": "auto"}},
                ],
            },
        ],
    },
    "title": {
        "messages": [{"role": "user", "content": "Given the following, reply with a title of 3-4 words: hi"}],
        "model": "embedded",
        "max_tokens": 12,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "edit": {
        "messages": [{"role": "user", "content": "```python\nx = 1\n```\nRewrite it: y for x"}],
        "model": "embedded",
        "max_tokens": 16,
        "temperature": 0.01,
        "stop": ["\n```", "<END_EDITS>"],
        "stream": True,
    },
    "whole": {**CONTINUE, "stream": False},
    "one tool": {**CONTINUE, "tool_choice": {"type": "function", "function": {"name": "read_file"}}},
    "one call at most": {**CONTINUE, "parallel_tool_calls": False},
}
del CONTINUE_CASES["whole"]["stream_options"]

CASES = {f"opencode: {name}": body for name, body in OPENCODE_CASES.items()} | {
    f"continue: {name}": body for name, body in CONTINUE_CASES.items()
}


def post(served: ModelServer, body: Json) -> str:
    """The answer's body. The headers are those that these programs add."""
    headers = {
        "Content-Type": "application/json",
        "Accept": "application/json",
        "Authorization": "Bearer none",
        "x-api-key": "none",
        "api-key": "none",
        "User-Agent": "opencode/1.0.0 ai-sdk/openai-compatible/1.0.0",
        "HTTP-Referer": "https://example.org/",
        "X-Title": "agent",
    }
    request = urllib.request.Request(
        served.url + "/v1/chat/completions", json.dumps(body).encode(), headers, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 200
        found: str = response.read().decode()
    return found


@pytest.mark.parametrize("name", CASES)
def test_what_agents_send_is_answered(served: ModelServer, name: str) -> None:
    """A stream of chunks to its end, usage last where it is asked for; or one object."""
    body = CASES[name]
    text = post(served, body)
    if not body["stream"]:
        assert json.loads(text)["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
        return
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert not any("error" in chunk for chunk in chunks)
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert reasons[-1] in ("stop", "length", "tool_calls") and not any(reasons[:-1])
    if "stream_options" in body:
        assert chunks[-1]["usage"]["completion_tokens"] > 0 and chunks[-1]["choices"] == []


def test_what_nobody_sends_is_refused(served: ModelServer) -> None:
    """The twin: an accepted body is not one that nobody has looked at."""
    for more in ({"promptCacheKeys": "x"}, {"stream_options": {"usage": True}}, {"tools": [{"type": "mcp"}]}):
        with pytest.raises(urllib.error.HTTPError) as caught:
            post(served, {**OPENCODE, **more})
        assert caught.value.code == 400
        assert json.load(caught.value)["error"]["param"].startswith(next(iter(more)))


def test_the_history_is_all_there(served: ModelServer) -> None:
    """Two system messages, results, parts and consecutive users reach the prompt in order, and
    arguments as objects."""
    side = served.state.context
    prepared = served.call(prepare_request("/v1/chat/completions", OPENCODE_MORE, side, stream=True))
    prompt, at = prepared.prompts[0], 0
    for text in (
        *("interactive CLI tool.", "<env>", "context7_resolve-library-id", "list the files"),
        '{"name": "bash", "arguments": {"command": "ls", "description": "Lists files"}}',
        '{"name": "todowrite", "arguments": {"todos": []}}',
        *("README.md\n", "[]", "One file.", "what is in @README.md?", "00001| # Title"),
        *("go on", "Your mode has changed."),
    ):
        found = prompt.find(text, at)
        assert found > 0, (text, prompt[at:])
        at = found + len(text)
