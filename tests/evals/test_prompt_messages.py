"""Prompts of all APIs as messages."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.evals.prompt_messages import PromptMessage, list_messages

IMAGE = "data:image/png;base64,AAAA"
PDF = "data:application/pdf;base64," + "A" * 1000
CASES: dict[str, tuple[dict[str, Any], list[PromptMessage]]] = {
    "files": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "file", "file": {"file_data": PDF, "filename": "a.pdf"}}],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "document", "source": {"media_type": "application/pdf", "data": PDF[30:]}},
                        {"type": "document", "source": {"media_type": "text/plain", "data": "B" * 100}},
                    ],
                },
            ]
        },
        [
            PromptMessage(
                "user",
                f'{{"type": "file", "file": {{"file_data": "{PDF[:40]}...", "filename": "a.pdf"}}}}',
            ),
            PromptMessage(
                "user",
                '{"type": "document", "source": {"media_type": "application/pdf", '
                f'"data": "{"A" * 40}..."}}}}\n'
                f'{{"type": "document", "source": {{"media_type": "text/plain", "data": "{"B" * 100}"}}}}',
            ),
        ],
    ),
    "chat": (
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": IMAGE}},
                        {"type": "text", "text": "What is it?"},
                    ],
                },
            ]
        },
        [PromptMessage("system", "Be brief."), PromptMessage("user", "What is it?", [IMAGE])],
    ),
    "tool calls": (
        {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
                {"role": "tool", "content": "4", "tool_call_id": "c1"},
            ],
            "tools": [{"type": "function"}],
        },
        [
            PromptMessage("tools", '[{"type": "function"}]'),
            PromptMessage("assistant", 'tool_calls: [{"function": {"name": "f"}}]'),
            PromptMessage("tool", "4\ntool_call_id: c1"),
        ],
    ),
    "completion": (
        {"prompt": "Once", "suffix": "end"},
        [PromptMessage("prompt", "Once"), PromptMessage("suffix", "end")],
    ),
    "several prompts": (
        {"prompt": ["a", [1, 2]]},
        [PromptMessage("prompt 1", "a"), PromptMessage("prompt 2", "[1, 2]")],
    ),
    "token ids": ({"prompt": [1, 2]}, [PromptMessage("prompt", "[1, 2]")]),
    "a response's text": (
        {"instructions": "Be brief.", "input": "Hi"},
        [PromptMessage("system", "Be brief."), PromptMessage("user", "Hi")],
    ),
    "a response's items": (
        {
            "input": [
                {"role": "user", "content": [{"type": "input_image", "image_url": "a.png"}]},
                {"type": "function_call_output", "call_id": "c", "output": "4"},
            ]
        },
        [
            PromptMessage("user", "", ["a.png"]),
            PromptMessage(
                "function_call_output", '{"type": "function_call_output", "call_id": "c", "output": "4"}'
            ),
        ],
    ),
    "an Anthropic message": (
        {
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "image",
                            "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
                        },
                        {"type": "text", "text": "What?"},
                    ],
                }
            ],
        },
        [PromptMessage("system", "Be brief."), PromptMessage("user", "What?", [IMAGE])],
    ),
    "sounds": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
                        {"type": "audio_url", "audio_url": {"url": "a.mp3"}},
                        {"type": "text", "text": "Who speaks?"},
                    ],
                }
            ]
        },
        [PromptMessage("user", "Who speaks?", [], ["data:audio/wav;base64,AAAA", "a.mp3"])],
    ),
    "an image in a tool result": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "content": [
                                {"type": "image", "source": {"type": "url", "url": "http://x/a.png"}},
                                {"type": "text", "text": "done"},
                            ],
                        }
                    ],
                }
            ]
        },
        [
            PromptMessage(
                "user",
                '{"type": "tool_result", "content": [{"type": "text", "text": "done"}]}',
                ["http://x/a.png"],
            )
        ],
    ),
    "what is no message": (
        {"messages": ["text", 4]},
        [PromptMessage("message", "text"), PromptMessage("message", "4")],
    ),
    "nothing": ({}, []),
}


@pytest.mark.parametrize("name", CASES)
def test_prompts_are_messages(name: str) -> None:
    body, messages = CASES[name]
    assert list_messages(body) == messages


@pytest.mark.parametrize("content", [None, 4, {}, [None], [[]], [{"type": "image_url"}], [{"type": "image"}]])
def test_any_content_is_shown(content: Any) -> None:
    """A line that was refused may have any body."""
    (message,) = list_messages({"messages": [{"role": "user", "content": content}]})
    assert message.role == "user"
