"""Anthropic's bodies become chat bodies with the same prompts."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrun.api.anthropic.request import read_message
from mlxrun.api.anthropic.response import build_error
from mlxrun.config.settings import Config, SamplingSettings
from mlxrun.core.errors import RequestError
from tests.helpers.anthropic_api import (
    ADD,
    CALL,
    CALLED,
    EPHEMERAL,
    EYES,
    IMAGE,
    RESULT,
    TOOL_MODEL_INFO,
    USER,
    body,
    chat_prompt,
    context,
    count,
    make,
    prompt,
    refused,
    text,
    user,
)
from tests.helpers.anthropic_bodies import FIELDS, SAME, SEEDS, VALUE, claude_code, nodes
from tests.helpers.examples import count_examples
from tests.helpers.tokenizers import CHATML, THINKING, TOOLS, FakeModelInfo


@pytest.mark.parametrize("case", range(len(SAME)))
def test_one_conversation_has_one_prompt(case: int) -> None:
    """The same prompt on both surfaces, and the count is that of its tokens."""
    model_info, ours, theirs = SAME[case]
    message = make(ours, model_info)
    assert message.prepared.prompts[0] == chat_prompt(theirs, model_info)
    counted = {key: value for key, value in ours.items() if key != "max_tokens"}
    assert count(counted, model_info) == len(message.prepared.requests[0].prompt)


def test_another_conversation_has_another_prompt() -> None:
    """The twin of the test above: each word that is changed shows."""
    for model_info, ours, _ in SAME:
        changed = json.loads(json.dumps(ours).replace('"hi"', '"ho"').replace('"what"', '"who"'))
        assert changed == ours or prompt(changed, model_info) != prompt(ours, model_info)


def test_a_response_format_has_two_names() -> None:
    """`output_format` is what the beta of 2025-11-13 called output_config.format, and clients still do."""
    wanted = {"type": "json_schema", "schema": {"type": "object", "additionalProperties": False}}
    chats = [
        read_message(body(**fields), context()).chat
        for fields in ({"output_config": {"format": wanted}}, {"output_format": wanted})
    ]
    assert chats[0] == chats[1] and chats[0]["response_format"]["json_schema"]["schema"] == wanted["schema"]
    error = refused(body(output_config={"format": wanted}, output_format=wanted))
    assert error.param == "output_format" and "not together" in str(error)
    begun = [*user(text("hi")), {"role": "assistant", "content": "The"}]
    assert refused(body(begun, output_format=wanted)).param == "output_format"


def test_the_count_has_the_images_in_it() -> None:
    """Four tokens for each image of this model_info, and as many as the engine is given."""
    blocks = [text("what"), IMAGE]
    with_image = body([{"role": "user", "content": blocks}])
    without = body([{"role": "user", "content": blocks[:1]}])
    counted = {key: value for key, value in with_image.items() if key != "max_tokens"}
    assert count(counted, EYES) == len(make(with_image, EYES).prepared.requests[0].prompt)
    assert count(counted, EYES) == len(make(without, EYES).prepared.requests[0].prompt) + 6


def test_any_part_of_a_conversation_can_be_counted() -> None:
    """Agents count prompts that are longer than the context, answers, and calls without their results."""
    model_info = FakeModelInfo(chat_template=TOOLS, context_length=64)
    long = {"model": "m", "messages": [{"role": "user", "content": "x" * 500}]}
    assert count(long, model_info) > 500
    assert refused({**long, "max_tokens": 5}, model_info).code == "context_length_exceeded"
    for messages in (
        [USER, {"role": "assistant", "content": "yo "}],
        [USER, {"role": "assistant", "content": [CALL]}],
        [{"role": "user", "content": [RESULT]}],
    ):
        assert count({"model": "m", "messages": messages}, model_info) > 5
        assert refused(body(messages), model_info)


def test_sampling() -> None:
    config = Config(sampling=SamplingSettings(max_tokens=3, temperature=0.1, top_p=0.2))
    given = body(
        max_tokens=7,
        temperature=0.5,
        top_k=4,
        stop_sequences=["a", "\n\n"],
        metadata={"user_id": "u"},
        stream=True,
    )
    message = make(given, config=config)
    params = message.prepared.requests[0].params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.2, 4)
    assert message.prepared.stops == ("a", "\n\n")
    assert message.prepared.requests[0].fairness_key == "u"
    assert message.prepared.stream and not make(body()).prepared.stream


def test_max_tokens_is_a_ceiling() -> None:
    """Clients send the same for every model: what the context does not hold is cut off it."""
    model_info = FakeModelInfo(context_length=50)
    whole, cut = make(body(max_tokens=5), model_info), make(body(max_tokens=64_000), model_info)
    prompt_tokens = whole.prepared.prompt_tokens
    assert whole.prepared.requests[0].params.max_tokens == 5 and not whole.limited_by_context
    assert cut.prepared.requests[0].params.max_tokens == 50 - prompt_tokens and cut.limited_by_context


def test_thinking_is_switched_where_the_template_can() -> None:
    """No name of a switch is taken for granted."""
    model_info = FakeModelInfo(chat_template=THINKING)
    other = FakeModelInfo(chat_template=CHATML + "{% if thinking %}<think>{% endif %}")
    off, enabled = {"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}
    plain = prompt(body(), model_info)
    assert prompt(body(thinking=enabled, max_tokens=1025), model_info) == plain
    assert prompt(body(thinking={"type": "adaptive"}), model_info) == plain
    assert prompt(body(thinking=off), model_info) == plain + "<think>\n\n</think>\n\n"
    assert prompt(body(thinking=enabled, max_tokens=1025), other) == prompt(body(), other) + "<think>"
    assert prompt(body(thinking=off)) == prompt(body())


def test_examples_of_a_tool_are_described() -> None:
    tool = {**ADD, "input_examples": [{"a": 1}, {"a": "č"}]}
    description = read_message(body(tools=[tool]), context(TOOL_MODEL_INFO)).chat["tools"][0]["function"][
        "description"
    ]
    assert description == 'adds\n\nExamples of input:\n{"a": 1}\n{"a": "č"}'
    del tool["description"]
    description = read_message(body(tools=[tool]), context(TOOL_MODEL_INFO)).chat["tools"][0]["function"][
        "description"
    ]
    assert description.startswith("Examples of input:")


def test_one_call_at_most() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert make(body(tools=[ADD], tool_choice=choice), TOOL_MODEL_INFO).prepared.single_tool_call
    assert not make(
        body(tools=[ADD], tool_choice={"type": "auto"}), TOOL_MODEL_INFO
    ).prepared.single_tool_call


def test_nothing_changes_what_was_sent() -> None:
    """Bodies are read, never written: the same object may be in a log or in a store."""
    for model_info, ours, _ in SAME:
        before = copy.deepcopy(ours)
        make(ours, model_info)
        assert ours == before


def marked(value: Any) -> Any:
    """The same with a cache_control on every object that may have one."""
    if isinstance(value, list):
        return [marked(item) for item in value]
    if isinstance(value, dict) and ("type" in value or "input_schema" in value):
        more = {key: marked(value[key]) for key in ("content", "source") if key in value}
        return {**value, **more, "cache_control": EPHEMERAL}
    return value


def test_markers_for_the_cache_change_nothing() -> None:
    for model_info, ours, _ in SAME:
        turns = [{**turn, "content": marked(turn["content"])} for turn in ours["messages"]]
        more = {key: marked(ours[key]) for key in ("system", "tools") if key in ours}
        assert prompt({**ours, **more, "messages": turns, "cache_control": EPHEMERAL}, model_info) == prompt(
            ours, model_info
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
    assert make(body(turns, system=None, tools=None, stop_sequences=None, thinking=None), TOOL_MODEL_INFO)
    direct = [USER, {"role": "assistant", "content": [{**CALL, "caller": {"type": "direct"}}]}, *user(RESULT)]
    assert prompt(body(direct), TOOL_MODEL_INFO) == prompt(body([*CALLED, *user(RESULT)]), TOOL_MODEL_INFO)


def test_bodies_of_claude_code() -> None:
    """Taken as they are; two that differ in their billing line only have one prompt."""
    message = make(claude_code("fa690"), TOOL_MODEL_INFO)
    other = make(claude_code("aa114"), TOOL_MODEL_INFO)
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
    assert make(claude_code("1", thinking=budget), TOOL_MODEL_INFO)
    counted = {key: claude_code("1")[key] for key in ("model", "messages", "tools", "system", "thinking")}
    assert count(counted, TOOL_MODEL_INFO) == len(message.prepared.requests[0].prompt)


@settings(max_examples=count_examples(150))
@given(st.data())
def test_any_body_is_taken_or_refused(data: st.DataObject) -> None:
    """Never anything but a RequestError that names a field; for bodies with a few things changed."""
    given_body = copy.deepcopy(data.draw(st.sampled_from(SEEDS)))
    for _ in range(data.draw(st.integers(1, 3))):
        holder, key = data.draw(st.sampled_from(nodes(given_body)))
        holder[key] = data.draw(VALUE)
        given_body |= data.draw(st.dictionaries(FIELDS, VALUE, max_size=1))
    model_info = data.draw(st.sampled_from([TOOL_MODEL_INFO, EYES]))
    try:
        assert make(given_body, model_info).prepared.requests
    except RequestError as error:
        assert error.http_status in (400, 404)
        assert build_error(error, "r")["error"]["message"]
