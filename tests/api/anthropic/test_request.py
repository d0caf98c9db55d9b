"""Anthropic's bodies become chat bodies with the same prompts: A49, A51, A59, A63, B12, B25."""

from __future__ import annotations

import asyncio
import base64
import copy
import io
import json
import logging
from typing import Any

import pytest
from PIL import Image

from mlxrun.api.anthropic import chat_messages
from mlxrun.api.anthropic.request import PreparedMessage, count_tokens, prepare_message, read_message
from mlxrun.api.context import ApiContext
from mlxrun.api.opaque_reasoning import decode_reasoning, encode_reasoning
from mlxrun.api.openai.request import prepare_request
from mlxrun.config.settings import Config, SamplingSettings, ServerSettings
from mlxrun.errors import (
    RequestError,
)
from mlxrun.text.images import MediaLoader
from tests.helpers.tokenizers import CHATML, STRICT, THINKING, TOOLS, FakeModelInfo

Json = dict[str, Any]

HOST = FakeModelInfo()
TOOL_HOST = FakeModelInfo(chat_template=TOOLS)
# As TOOLS, with parts and thoughts.
REASONING = TOOLS.replace("m.content }}", "(m.reasoning_content or '') + m.content }}")
EYES = FakeModelInfo(vision=True)
USER = {"role": "user", "content": "hi"}
ADD = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {"a": {}}}}
ADD_CHAT = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": ADD["input_schema"]},
}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": [True, None, "x"]}}
CALL_CHAT = {
    "id": "toolu_1",
    "type": "function",
    "function": {"name": "add", "arguments": json.dumps(CALL["input"])},
}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}


CALLED = [USER, {"role": "assistant", "content": [CALL]}]


def user(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


def png(colour: str = "red") -> str:
    data = io.BytesIO()
    Image.new("RGB", (4, 4), colour).save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


RED = png()
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED}}
IMAGE_CHAT = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{RED}"}}


def side(host: FakeModelInfo = HOST, config: Config | None = None) -> ApiContext:
    config = config or Config()
    return ApiContext(host, config, MediaLoader(config.media, None))


def text(value: str, **more: Any) -> Json:
    return {"type": "text", "text": value, **more}


def body(messages: Any = None, **fields: Any) -> Json:
    return {"model": "m", "max_tokens": 9, "messages": [USER] if messages is None else messages, **fields}


def make(given: Any, host: FakeModelInfo = HOST, config: Config | None = None) -> PreparedMessage:
    async def run() -> PreparedMessage:
        return await prepare_message(given, side(host, config))

    return asyncio.run(run())


def count(given: Json, host: FakeModelInfo = HOST, config: Config | None = None) -> int:
    async def run() -> Json:
        return await count_tokens(given, side(host, config))

    found = asyncio.run(run())
    assert found.keys() == {"input_tokens"}
    return found["input_tokens"]


def prompt(given: Json, host: FakeModelInfo = HOST, config: Config | None = None) -> str:
    return make(given, host, config).prepared.prompts[0]


def chat_prompt(given: Json, host: FakeModelInfo = HOST) -> str:
    async def run() -> str:
        return (await prepare_request("/v1/chat/completions", given, side(host))).prompts[0]

    return asyncio.run(run())


def refused(given: Any, host: FakeModelInfo = HOST, config: Config | None = None) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make(given, host, config)
    return caught.value


# -- one conversation, one prompt -----------------------------------------------------------------------

SAME: list[tuple[FakeModelInfo, Json, Json]] = [
    (HOST, body(), {"messages": [USER]}),
    (
        HOST,
        body(system="be\nbrief"),
        {"messages": [{"role": "system", "content": "be\nbrief"}, USER]},
    ),
    (
        HOST,
        body([{"role": "user", "content": [text("a"), text("b")]}], system=[text("x"), text("y")]),
        {
            "messages": [
                {"role": "system", "content": [text("x"), text("y")]},
                {"role": "user", "content": [text("a"), text("b")]},
            ]
        },
    ),
    (  # B25, A49: system in the middle, two users in a row, under a strict template
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
    (  # A59: calls with objects, results in their own messages, the user's words after them
        TOOL_HOST,
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
        TOOL_HOST,
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
    (  # thoughts go where the template may use them
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


@pytest.mark.parametrize("case", range(len(SAME)))
def test_one_conversation_has_one_prompt(case: int) -> None:
    """A49, A59, B25: the same prompt on both surfaces, and the count is that of its tokens (A63)."""
    host, ours, theirs = SAME[case]
    message = make(ours, host)
    assert message.prepared.prompts[0] == chat_prompt(theirs, host)
    counted = {key: value for key, value in ours.items() if key != "max_tokens"}
    assert count(counted, host) == len(message.prepared.requests[0].prompt)


def test_another_conversation_has_another_prompt() -> None:
    """The twin of the test above: each word that is changed shows."""
    for host, ours, _ in SAME:
        changed = json.loads(json.dumps(ours).replace('"hi"', '"ho"').replace('"what"', '"who"'))
        assert changed == ours or prompt(changed, host) != prompt(ours, host)


def test_the_count_has_the_images_in_it() -> None:
    """A63: four tokens for each image of this host, and as many as the engine is given."""
    blocks = [text("what"), IMAGE]
    with_image = body([{"role": "user", "content": blocks}])
    without = body([{"role": "user", "content": blocks[:1]}])
    counted = {key: value for key, value in with_image.items() if key != "max_tokens"}
    assert count(counted, EYES) == len(make(with_image, EYES).prepared.requests[0].prompt)
    assert count(counted, EYES) == len(make(without, EYES).prepared.requests[0].prompt) + 6


def test_any_part_of_a_conversation_can_be_counted() -> None:
    """Agents count prompts that are longer than the context, answers, and calls without their results."""
    host = FakeModelInfo(chat_template=TOOLS, context_length=64)
    long = {"model": "m", "messages": [{"role": "user", "content": "x" * 500}]}
    assert count(long, host) > 500
    assert refused({**long, "max_tokens": 5}, host).code == "context_length_exceeded"
    for messages in (
        [USER, {"role": "assistant", "content": "yo "}],
        [USER, {"role": "assistant", "content": [CALL]}],
        [{"role": "user", "content": [RESULT]}],
    ):
        assert count({"model": "m", "messages": messages}, host) > 5
        assert refused(body(messages), host)


def test_sampling() -> None:
    config = Config(sampling=SamplingSettings(max_tokens=3, temperature=0.1, top_p=0.2))
    asked = body(
        max_tokens=7,
        temperature=0.5,
        top_k=4,
        stop_sequences=["a", "\n\n"],
        metadata={"user_id": "u"},
        stream=True,
    )
    message = make(asked, config=config)
    params = message.prepared.requests[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.2, 4)
    assert message.prepared.stops == ("a", "\n\n")
    assert message.prepared.requests[0].fairness_key == "u"
    assert message.prepared.stream and not make(body()).prepared.stream


def test_max_tokens_is_a_ceiling() -> None:
    """Clients send the same for every model: what the context does not hold is cut off it."""
    host = FakeModelInfo(context_length=50)
    whole, cut = make(body(max_tokens=5), host), make(body(max_tokens=64_000), host)
    prompt_tokens = whole.prepared.prompt_tokens
    assert whole.prepared.requests[0].params.max_tokens == 5 and not whole.limited_by_context
    assert cut.prepared.requests[0].params.max_tokens == 50 - prompt_tokens and cut.limited_by_context


def test_thinking_is_switched_where_the_template_can() -> None:
    """A50: no name of a switch is taken for granted."""
    host = FakeModelInfo(chat_template=THINKING)
    other = FakeModelInfo(chat_template=CHATML + "{% if thinking %}<think>{% endif %}")
    off, enabled = {"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}
    plain = prompt(body(), host)
    assert prompt(body(thinking=enabled, max_tokens=1025), host) == plain
    assert prompt(body(thinking={"type": "adaptive"}), host) == plain
    assert prompt(body(thinking=off), host) == plain + "<think>\n\n</think>\n\n"
    assert prompt(body(thinking=enabled, max_tokens=1025), other) == prompt(body(), other) + "<think>"
    assert prompt(body(thinking=off)) == prompt(body())


def test_a_failed_call_says_so() -> None:
    """Templates have no mark for it: the text says it, once."""

    def result(**fields: Any) -> str:
        turns = [
            USER,
            {"role": "assistant", "content": [CALL]},
            {"role": "user", "content": [RESULT | fields]},
        ]
        return prompt(body(turns), TOOL_HOST).split("<|im_start|>tool\n")[1].split("<|im_end|>")[0]

    assert result(is_error=True, content="no such file") == "Error: no such file"
    assert result(is_error=True, content=[text("<tool_use_error>no</tool_use_error>")]).startswith(
        "<tool_use"
    )
    assert result(is_error=True, content=None) == "Error"
    assert result(is_error=False, content="no such file") == "no such file"


def test_examples_of_a_tool_are_told() -> None:
    tool = {**ADD, "input_examples": [{"a": 1}, {"a": "č"}]}
    told = read_message(body(tools=[tool]), side(TOOL_HOST)).chat["tools"][0]["function"]["description"]
    assert told == 'adds\n\nExamples of input:\n{"a": 1}\n{"a": "č"}'
    del tool["description"]
    told = read_message(body(tools=[tool]), side(TOOL_HOST)).chat["tools"][0]["function"]["description"]
    assert told.startswith("Examples of input:")


def test_one_call_at_most() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert make(body(tools=[ADD], tool_choice=choice), TOOL_HOST).prepared.single_tool_call
    assert not make(body(tools=[ADD], tool_choice={"type": "auto"}), TOOL_HOST).prepared.single_tool_call


def test_a_reminder_is_shown_for_one_turn() -> None:
    late = {"role": "system", "content": "reminder", "clear_at": "next_user_message"}
    answer = {"role": "assistant", "content": "yo"}
    assert "reminder" in prompt(body([USER, late]))
    assert "reminder" not in prompt(body([USER, late, answer, USER]))
    assert "reminder" in prompt(body([USER, {**late, "clear_at": "never"}, answer, USER]))


# -- the billing line -----------------------------------------------------------------------------------

BILLING = "x-anthropic-billing-header: cc_version=2.1.37.0d9; cc_entrypoint=cli; cch={};"


def test_the_billing_line_of_a_leading_system_block_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """B12: requests that differ in it only have one prompt; said once; anywhere else it stays."""
    chat_messages._log_stripped.cache_clear()
    caplog.set_level(logging.INFO)
    plain = prompt(body(system="You are"))
    shapes: list[Any] = [
        BILLING + "\nYou are",
        [text(BILLING), text("You are")],
        [text(BILLING + "\n\nYou are")],
    ]
    for shape in shapes:
        for cch in ("fa690", "00000"):
            assert prompt(body(system=json.loads(json.dumps(shape).replace("{}", cch)))) == plain
        assert prompt(body([{"role": "system", "content": shape}, USER])) == plain
    assert len([r for r in caplog.records if "x-anthropic-billing-header" in r.message]) == 1
    assert "cch" not in caplog.text
    assert prompt(body(system=BILLING)) == prompt(body())
    for other in (
        body(system=[text("You are"), text(BILLING)]),
        body(system=f"You are\n{BILLING}"),
        body([{"role": "user", "content": BILLING}]),
        body([{"role": "user", "content": [text(BILLING), text("hi")]}]),
        body([USER, {"role": "system", "content": BILLING}], system="You are"),
    ):
        assert "x-anthropic-billing-header" in prompt(other)
    kept = Config(server=ServerSettings(strip_billing_header=False))
    assert "cch=" in prompt(body(system=BILLING), config=kept)


def test_nothing_changes_what_was_sent() -> None:
    """Bodies are read, never written: the same object may be in a log or in a store."""
    for host, ours, _ in SAME:
        before = copy.deepcopy(ours)
        make(ours, host)
        assert ours == before


# -- harmless, and Claude Code --------------------------------------------------------------------------

EPHEMERAL = {"type": "ephemeral", "ttl": "1h", "scope": "global"}


def marked(value: Any) -> Any:
    """The same with a cache_control on every object that may have one."""
    if isinstance(value, list):
        return [marked(item) for item in value]
    if isinstance(value, dict) and ("type" in value or "input_schema" in value):
        more = {key: marked(value[key]) for key in ("content", "source") if key in value}
        return {**value, **more, "cache_control": EPHEMERAL}
    return value


def test_markers_for_the_cache_change_nothing() -> None:
    for host, ours, _ in SAME:
        turns = [{**turn, "content": marked(turn["content"])} for turn in ours["messages"]]
        more = {key: marked(ours[key]) for key in ("system", "tools") if key in ours}
        assert prompt({**ours, **more, "messages": turns, "cache_control": EPHEMERAL}, host) == prompt(
            ours, host
        )


def test_null_is_not_given() -> None:
    """What objects of the SDK carry when they are sent back."""
    turns = [
        USER,
        {
            "role": "assistant",
            "content": [text("a", citations=None, cache_control=None), {**CALL, "caller": None}],
        },
        *user({**RESULT, "is_error": None}),
    ]
    assert make(body(turns, system=None, tools=None, stop_sequences=None, thinking=None), TOOL_HOST)
    direct = [USER, {"role": "assistant", "content": [{**CALL, "caller": {"type": "direct"}}]}, *user(RESULT)]
    assert prompt(body(direct), TOOL_HOST) == prompt(body([*CALLED, *user(RESULT)]), TOOL_HOST)


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


def test_bodies_of_claude_code() -> None:
    """B12, B25: taken as they are; two that differ in their billing line only have one prompt."""
    message = make(claude_code("fa690"), TOOL_HOST)
    other = make(claude_code("aa114"), TOOL_HOST)
    assert message.prepared.requests[0].prompt == other.prepared.requests[0].prompt
    assert message.message.reports_edits and not make(body()).message.reports_edits
    rendered = message.prepared.prompts[0]
    assert '<tool_call>Bash(command="ls";)</tool_call>' in rendered
    assert "cch=" not in rendered and "mid-conversation reminder" in rendered
    # The question whether there is quota, a title, and a budget of older versions.
    quota = {"model": "claude-haiku-4-5", "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}
    assert make({**quota, "metadata": {"user_id": "u"}})
    assert make(body(temperature=1, system=[], tools=[], stream=True))
    budget = {"budget_tokens": 31999, "type": "enabled"}
    assert make(claude_code("1", thinking=budget), TOOL_HOST)
    counted = {key: claude_code("1")[key] for key in ("model", "messages", "tools", "system", "thinking")}
    assert count(counted, TOOL_HOST) == len(message.prepared.requests[0].prompt)


# -- thoughts -------------------------------------------------------------------------------------------


def test_a_hidden_thought_comes_back() -> None:
    """thinking.display omitted: the client sees nothing of it, the next turn has it."""
    host = FakeModelInfo(chat_template=REASONING)

    def turn(block: Json) -> str:
        return prompt(body([USER, {"role": "assistant", "content": [block, text("yo")]}, USER]), host)

    shown = {"type": "thinking", "thinking": "čau 🙂", "signature": encode_reasoning("")}
    hidden = {"type": "thinking", "thinking": "", "signature": encode_reasoning("čau 🙂")}
    assert turn(shown) == turn(hidden) and "čau 🙂" in turn(shown)
    assert "čau" not in hidden["signature"] and len(shown["signature"]) < 10
    for foreign in ("", "ErUB", "mlxrun.!", "mlxrun.gICA", "mlxrun.č"):
        assert decode_reasoning(foreign) is None
