"""Chat templates: what they are given, their variables and their image marks."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from mlxrun.api.text import ignored_fields
from mlxrun.api.text.messages import normalize_messages
from mlxrun.api.text.templates.template import (
    find_reasoning_switch,
    find_template_variables,
    get_image_markers,
    render_chat,
    select_template_variables,
    warn_unused_variables,
)
from mlxrun.api.text.templates.template_support import get_message_support
from mlxrun.core.errors import RequestError
from tests.helpers.tokenizers import (
    CHATML,
    STRICT,
    SYSTEM_ONLY_FIRST,
    THINKING,
    TOOLS,
    FakeModelInfo,
    byte_tokenizer,
)

HI = [{"role": "user", "content": "hi"}]
SYSTEM = {"role": "system", "content": "be brief"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def rendered(model_info: FakeModelInfo, messages: list[Any], tools: Any = None, **arguments: Any) -> str:
    chat = normalize_messages(messages, get_message_support(model_info))
    return render_chat(model_info, chat.messages, tools, arguments)


def test_strict_template_gets_what_it_insists_on() -> None:
    """System, system, user, user and a developer in mid-chat suit a template that is strict."""
    model_info = FakeModelInfo(chat_template=STRICT)
    messages = [
        SYSTEM,
        SYSTEM,
        *HI,
        *HI,
        {"role": "assistant", "content": "a"},
        {**SYSTEM, "role": "developer"},
        *HI,
    ]
    text = rendered(model_info, messages)
    assert text == (
        "<|im_start|>system\nbe brief\n\nbe brief\n\nbe brief<|im_end|>\n"
        "<|im_start|>user\nhi\n\nhi<|im_end|>\n"
        "<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_what_a_template_raises_is_a_bad_request() -> None:
    """With the template's own words."""
    model_info = FakeModelInfo(chat_template=STRICT)
    with pytest.raises(RequestError, match="Roles must alternate"):
        rendered(model_info, [{"role": "assistant", "content": "1"}])
    for broken in (
        "{{ messages.nothing.more }}",
        "{{ 1 + 'a' }}",
        "{{ messages[0].content | nofilter }}",
        "{% if %}",
    ):
        with pytest.raises(RequestError) as caught:
            rendered(FakeModelInfo(chat_template=broken), HI)
        assert caught.value.param == "messages"


def test_a_model_without_template_takes_no_chat() -> None:
    with pytest.raises(RequestError, match="has no chat template: use /v1/completions"):
        rendered(FakeModelInfo(chat_template=None), HI)


def test_tool_history_reaches_the_template() -> None:
    """Arguments are a mapping, a missing content is an empty string, the role tool stays."""
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "x"}'}}
    messages = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
    ]
    text = rendered(FakeModelInfo(chat_template=TOOLS), messages, [TOOL])
    assert '<|im_start|>assistant\n<tool_call>add(a=1;b="x";)</tool_call><|im_end|>' in text
    assert "<|im_start|>tool\n3<|im_end|>" in text
    assert '"name": "add"' in text


def test_variables_of_a_template() -> None:
    assert find_template_variables(THINKING) == {"messages", "add_generation_prompt", "enable_thinking"}
    assert find_template_variables(
        "{% set x = x | default(1) %}{% for m in messages %}{% generation %}{{ y }}{% endgeneration %}"
        "{% break %}{% endfor %}"
    ) == {"x", "y", "messages"}
    with pytest.raises(RequestError, match="chat template is broken: line 1"):
        find_template_variables("{% if %}")


@pytest.mark.parametrize(
    ("template", "switch"),
    [
        (THINKING, "enable_thinking"),
        ("{% if thinking %}{{ enable_thinking }}{% endif %}", "enable_thinking"),
        ("{{ thinking }}", "thinking"),
        ("{% set thinking = 1 %}{{ thinking }}", None),
        (None, None),
    ],
)
def test_the_switch_of_reasoning(template: str | None, switch: str | None) -> None:
    assert find_reasoning_switch(FakeModelInfo(chat_template=template)) == switch


def test_template_variables(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the template does not have has no effect, from a request or the config, and is logged once."""
    monkeypatch.setattr(ignored_fields, "logged_fields", set())
    caplog.set_level(logging.INFO)
    model_info = FakeModelInfo(chat_template=THINKING)
    assert rendered(model_info, HI, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert rendered(model_info, HI).endswith("assistant\n")
    sent = {"enable_thinking": False, "enable_thinkin": True}
    for _ in range(3):
        assert select_template_variables(model_info, sent, "kw") == {"enable_thinking": False}
        warn_unused_variables(model_info, ["nonsense", "enable_thinking"])
    logged = [record.getMessage() for record in caplog.records]
    assert [text for text in logged if "nonsense" in text] == [
        "model.chat_template_args: the chat template does not use nonsense"
    ]
    assert [text for text in logged if "kw.enable" in text] == [
        "the field 'kw.enable_thinkin' is accepted and has no effect: the model's chat template has no such "
        "variable (did you mean 'enable_thinking'?)"
    ]


def test_strict_template_variables() -> None:
    model_info = FakeModelInfo(chat_template=THINKING)
    with pytest.raises(RequestError, match=r"kw.enable_thinkin: .*did you mean 'enable_thinking'") as caught:
        select_template_variables(model_info, {"enable_thinkin": 1}, "kw", strict=True)
    assert caught.value.param == "kw.enable_thinkin"
    for name in ("tokenize", "messages", "chat_template", "raise_exception"):
        with pytest.raises(RequestError, match="set by mlxrun"):
            select_template_variables(model_info, {name: 1}, "kw")


@pytest.mark.parametrize("template", [CHATML, SYSTEM_ONLY_FIRST])
def test_image_marks_are_found_in_the_template(template: str) -> None:
    marks = get_image_markers(FakeModelInfo(vision=True, chat_template=template))
    names = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    assert marks.per_kind["image"] == {byte_tokenizer().convert_tokens_to_ids(name): 1 for name in names}
    assert set(marks.reserved) == {*names, "<|video_pad|>"}
    assert get_image_markers(FakeModelInfo(vision=False)).reserved == {}


def test_audio_may_be_marked_with_ordinary_text() -> None:
    """Its processor counts the marks; videos are marked with tokens."""
    part = "{% if p.type == 'audio' %}<|audio_1|>{% elif p.type == 'video' %}VIDEO{% elif"
    template = CHATML.replace("{% if p.type ==", part + " p.type ==", 1)
    marks = get_image_markers(FakeModelInfo(vision=True, chat_template=template)).per_kind
    assert marks["audio"] == {} and "video" not in marks
