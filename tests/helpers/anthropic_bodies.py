"""Bodies of Anthropic's messages: pairs with the same chat prompt, Claude Code's, and generated ones."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from mlxrun.api.anthropic.fields import BODY
from tests.helpers.anthropic_api import (
    ADD,
    ADD_CHAT,
    CALL,
    CALL_CHAT,
    EPHEMERAL,
    EYES,
    IMAGE,
    IMAGE_CHAT,
    MODEL_INFO,
    REASONING,
    RESULT,
    TOOL_MODEL_INFO,
    USER,
    Json,
    body,
    text,
)
from tests.helpers.tokenizers import CHATML, STRICT, THINKING, FakeModelInfo

SAME: list[tuple[FakeModelInfo, Json, Json]] = [
    (MODEL_INFO, body(), {"messages": [USER]}),
    (
        MODEL_INFO,
        body(system="be\nbrief"),
        {"messages": [{"role": "system", "content": "be\nbrief"}, USER]},
    ),
    (
        MODEL_INFO,
        body([{"role": "user", "content": [text("a"), text("b")]}], system=[text("x"), text("y")]),
        {
            "messages": [
                {"role": "system", "content": [text("x"), text("y")]},
                {"role": "user", "content": [text("a"), text("b")]},
            ]
        },
    ),
    (  # system in the middle, two users in a row, under a strict template
        FakeModelInfo(chat_template=STRICT),
        body(
            [USER, {"role": "system", "content": "late"}, USER, {"role": "assistant", "content": "yo"}, USER]
        ),
        {
            "messages": [
                USER,
                {"role": "system", "content": "late"},
                USER,
                {"role": "assistant", "content": "yo"},
                USER,
            ]
        },
    ),
    (  # calls with objects, results in their own messages, the user's words after them
        TOOL_MODEL_INFO,
        body(
            [
                USER,
                {"role": "assistant", "content": [text("let me"), CALL]},
                {"role": "user", "content": [RESULT, text("and now?")]},
            ],
            tools=[ADD],
        ),
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "let me", "tool_calls": [CALL_CHAT]},
                {"role": "tool", "tool_call_id": "toolu_1", "content": "2"},
                {"role": "user", "content": "and now?"},
            ],
            "tools": [ADD_CHAT],
        },
    ),
    (
        TOOL_MODEL_INFO,
        body(
            [
                USER,
                {"role": "assistant", "content": [CALL, {**CALL, "id": "toolu_2"}]},
                {
                    "role": "user",
                    "content": [
                        {**RESULT, "content": [text("2"), text("3")]},
                        {"type": "tool_result", "tool_use_id": "toolu_2"},
                    ],
                },
            ],
            tools=[ADD],
            tool_choice={"type": "none"},
        ),
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [CALL_CHAT, {**CALL_CHAT, "id": "toolu_2"}],
                },
                {"role": "tool", "tool_call_id": "toolu_1", "content": "2\n3"},
                {"role": "tool", "tool_call_id": "toolu_2", "content": ""},
            ],
            "tools": [ADD_CHAT],
            "tool_choice": "none",
        },
    ),
    (  # reasoning go where the template may use them
        FakeModelInfo(chat_template=REASONING),
        body(
            [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "of another server"},
                        {"type": "redacted_thinking", "data": "AAAA"},
                        text("yo"),
                    ],
                },
                USER,
            ]
        ),
        {
            "messages": [
                USER,
                {"role": "assistant", "reasoning_content": "hm", "content": "yo"},
                USER,
            ]
        },
    ),
    (
        EYES,
        body([{"role": "user", "content": [text("what"), IMAGE, text("is it")]}]),
        {"messages": [{"role": "user", "content": [text("what"), IMAGE_CHAT, text("is it")]}]},
    ),
    (  # an image in a result is the user's
        EYES,
        body(
            [
                USER,
                {"role": "assistant", "content": [CALL]},
                {"role": "user", "content": [{**RESULT, "content": [text("read"), IMAGE]}, text("so?")]},
            ]
        ),
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "", "tool_calls": [CALL_CHAT]},
                {"role": "tool", "tool_call_id": "toolu_1", "content": "read"},
                {"role": "user", "content": [IMAGE_CHAT, text("so?")]},
            ]
        },
    ),
    (
        FakeModelInfo(chat_template=THINKING),
        body(thinking={"type": "disabled"}),
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    ),
    (
        FakeModelInfo(chat_template=CHATML + "{{ reasoning_effort }}"),
        body(output_config={"effort": "xhigh"}),
        {"messages": [USER], "reasoning_effort": "high"},
    ),
]


BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"


def claude_code(cch: str, **more: Any) -> Json:
    """The shape of a body that Claude Code is documented to send."""
    bash = {
        "name": "Bash",
        "description": "Run a shell command",
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"command": {"type": "string"}},
            "required": ["command"],
            "additionalProperties": False,
        },
        "eager_input_streaming": True,
    }
    return {
        "model": "claude-opus-4-6",
        "max_tokens": 32000,
        "stream": True,
        "system": [
            text(BILLING.format(cch)),
            text("You are an agent.", cache_control={"type": "ephemeral", "ttl": "1h"}),
            text("# Rules\nBe brief.", cache_control=EPHEMERAL),
        ],
        "messages": [
            {"role": "user", "content": "<available-deferred-tools>\nWebFetch\n</available-deferred-tools>"},
            {
                "role": "user",
                "content": [text("<system-reminder>x</system-reminder>"), text("list files")],
            },
            {"role": "system", "content": "mid-conversation reminder", "output_config": {"effort": "medium"}},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "", "signature": "opaque"},
                    text("Listing."),
                    {
                        "type": "tool_use",
                        "id": "toolu_old",
                        "name": "Bash",
                        "input": {"command": "ls"},
                        "caller": {"type": "direct"},
                    },
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_old",
                        "content": "a.txt",
                        "is_error": False,
                        "cache_control": {"type": "ephemeral"},
                    },
                    text("now count them", cache_control={"type": "ephemeral"}),
                ],
            },
        ],
        "tools": [bash],
        "metadata": {"user_id": '{"device_id":"b4","account_uuid":"","session_id":"fe79"}'},
        "thinking": {"type": "adaptive", "display": "summarized"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "diagnostics": {"previous_message_id": None},
        **more,
    }


LEAF = (
    st.none() | st.booleans() | st.integers(-3, 2000) | st.floats() | st.text(max_size=6)
    | st.sampled_from(["text", "image", "tool_use", "tool_result", "user", "assistant", "system", "base64"])
)  # fmt: skip


KEYS = st.sampled_from(
    [
        *("type", "text", "content", "role", "source", "data", "media_type", "url", "id", "name", "input"),
        *(
            "tool_use_id",
            "is_error",
            "thinking",
            "signature",
            "cache_control",
            "citations",
            "edits",
            "effort",
        ),
    ]
)


VALUE = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


FIELDS = st.sampled_from([*BODY.honoured, *BODY.harmless, *BODY.refused, "foo"])


SEEDS = [ours for _, ours, _ in SAME] + [claude_code("1")]


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a JSON value."""
    found = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += [(value, key), *nodes(item)]
    return found
