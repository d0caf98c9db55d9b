"""Templates and prompts, and images that are marked exactly once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from PIL import Image

from mlxrun.errors import MediaError, RequestError
from mlxrun.text.messages import normalize_messages
from mlxrun.text.prompt import build_chat_prompt, build_raw_prompt, check_text
from mlxrun.text.template import (
    check_template_arguments,
    find_template_variables,
    get_image_markers,
    render_chat,
)
from mlxrun.text.tools_prompt import describe_tools_in_prompt
from tests.helpers.tokenizers import (
    CHATML,
    STRICT,
    SYSTEM_ONLY_FIRST,
    TEXT_ONLY,
    THINKING,
    TOOLS,
    FakeModelInfo,
    byte_tokenizer,
    ids_of,
)

HI = [{"role": "user", "content": "hi"}]
SYSTEM = {"role": "system", "content": "be brief"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
RED = Image.new("RGB", (2, 2), "red")


def rendered(model_info: FakeModelInfo, messages: list[Any], tools: Any = None, **arguments: Any) -> str:
    return render_chat(model_info, normalize_messages(messages).messages, tools, arguments)


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


def test_template_variables_are_honoured_or_refused(caplog: pytest.LogCaptureFixture) -> None:
    """From a request an unknown one is an error; from the config it is said once and left out."""
    model_info = FakeModelInfo(chat_template=THINKING)
    check_template_arguments(model_info, {"enable_thinking": "here"}, ())
    assert rendered(model_info, HI, enable_thinking=False).endswith("<think>\n\n</think>\n\n")
    assert rendered(model_info, HI).endswith("assistant\n")
    with pytest.raises(RequestError, match=r"kw.enable_thinkin: .*did you mean 'enable_thinking'") as caught:
        check_template_arguments(model_info, {"enable_thinkin": "kw.enable_thinkin"}, ())
    assert caught.value.param == "kw.enable_thinkin"
    for name in ("tokenize", "messages", "chat_template", "raise_exception"):
        with pytest.raises(RequestError, match="set by mlxrun"):
            check_template_arguments(model_info, {name: "kw"}, ())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            check_template_arguments(model_info, {}, ["nonsense", "enable_thinking"])
    assert [record.getMessage() for record in caplog.records if "nonsense" in record.getMessage()] == [
        "model.chat_template_args: the chat template does not use nonsense"
    ]


def test_tools_are_described_if_the_template_knows_none() -> None:
    """A documented fallback. The system prompt has the functions; calls and results are written out."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "user", "content": "Sure?"},
    ]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    system, first, made, rest = describe_tools_in_prompt(turns, [tool])
    assert system["content"].startswith("Be brief.\n\nYou can call functions.")
    assert system["content"].endswith('{"name": "add", "parameters": {"type": "object"}}')
    assert first == turns[1] and made == {
        "role": "assistant",
        "content": '{"name": "add", "arguments": {"a": 1}}',
    }
    assert rest == {"role": "user", "content": "Result of add: 2\n\nSure?"}
    assert describe_tools_in_prompt(turns[:2], []) == turns[:2]
    both = {**turns[2], "content": "Well.", "tool_calls": [call, call]}
    assert describe_tools_in_prompt([both], [])[0]["content"].startswith('Well.\n[{"name": "add"')
    assert describe_tools_in_prompt(turns[1:2], [tool])[0]["role"] == "system"
    assert describe_tools_in_prompt(
        turns, [tool], ('{"name": "NAME", "arguments": ', "}")
    ) == describe_tools_in_prompt(turns, [tool])
    tagged, *same = describe_tools_in_prompt(turns, [tool], ("<call>NAME:", "</call>"), native=True)
    assert "<call>NAME:{...}</call>" in tagged["content"] and same == turns[1:]


def test_text_prompts_never_see_the_image_processor() -> None:
    """Also of a vision model; chat text gets no special tokens besides the template's, raw text does."""
    model_info = FakeModelInfo(vision=True)
    prompt = build_chat_prompt(model_info, HI, [], None, {})
    assert prompt.ids == ids_of("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert (prompt.image_spans, prompt.media, model_info.calls) == ((), None, [])
    begin = byte_tokenizer().convert_tokens_to_ids("<|begin|>")
    assert build_raw_prompt(model_info, "hi", "prompt").ids == (begin, *ids_of("hi"))
    assert model_info.calls == []


def test_images_are_marked_where_the_sender_put_them() -> None:
    """One mark an image, in order, between the words it was sent between."""
    model_info = FakeModelInfo(vision=True)
    content = [
        {"type": "text", "text": "a"},
        {"type": "image"},
        {"type": "image"},
        {"type": "text", "text": "b"},
    ]
    blue = Image.new("RGB", (2, 2), "blue")
    prompt = build_chat_prompt(
        model_info, [SYSTEM, {"role": "user", "content": content}], [RED, blue], None, {}
    )
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"<|im_start|>user\na{mark}{mark}b<|im_end|>" in model_info.calls[0]
    assert prompt.text == model_info.calls[0] and "be brief" in prompt.text
    assert prompt.media == ((255, 0, 0), (0, 0, 255))
    pad = byte_tokenizer().convert_tokens_to_ids("<|image_pad|>")
    assert [set(prompt.ids[a:b]) for a, b in prompt.image_spans] == [{pad}, {pad}]


@pytest.mark.parametrize("template", [CHATML, SYSTEM_ONLY_FIRST])
def test_image_marks_are_found_in_the_template(template: str) -> None:
    marks = get_image_markers(FakeModelInfo(vision=True, chat_template=template))
    names = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
    assert marks.per_image == {byte_tokenizer().convert_tokens_to_ids(name): 1 for name in names}
    assert set(marks.reserved) == {*names, "<|video_pad|>"}
    assert get_image_markers(FakeModelInfo(vision=False)).reserved == {}


@pytest.mark.parametrize("template", [TEXT_ONLY, "{{ messages[0].content + '' }}"])
def test_a_template_without_images_takes_none(template: str) -> None:
    model_info = FakeModelInfo(vision=True, chat_template=template)
    messages = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(RequestError):
        build_chat_prompt(model_info, messages, [RED], None, {})
    assert model_info.calls == []
    assert build_chat_prompt(model_info, HI, [], None, {}).ids


def test_a_lost_or_extra_mark_is_an_error() -> None:
    """A template that shows the newest image only would give every image the wrong place."""
    last = CHATML.replace("{% for m in messages %}", "{% for m in messages[-1:] %}")
    model_info = FakeModelInfo(vision=True, chat_template=last)
    turn = {"role": "user", "content": [{"type": "image"}]}
    with pytest.raises(RequestError, match="2 images were sent, but the chat template renders 1"):
        build_chat_prompt(model_info, [turn, turn], [RED, RED], None, {})
    parts = [{"type": "image"}, {"type": "text", "text": "<|image"}, {"type": "text", "text": "_pad|>"}]
    split = {"role": "user", "content": parts}
    with pytest.raises(RequestError, match="1 images were sent, but the chat template renders 2"):
        build_chat_prompt(FakeModelInfo(vision=True), [split], [RED], None, {})


def test_image_tokens_in_text_are_refused_by_name() -> None:
    """Words of a user are never taken for an image, wherever they stand; a text model may hear of them."""
    marks = get_image_markers(FakeModelInfo(vision=True))
    messages = [*HI, {"role": "assistant", "content": "", "tool_calls": [{"x": {"y": "<|image_pad|>"}}]}]
    with pytest.raises(RequestError, match=r"media token '<\|image_pad\|>'") as caught:
        check_text(messages, "messages", marks)
    assert caught.value.param == "messages[1].tool_calls[0].x.y"
    with pytest.raises(RequestError) as caught:
        check_text({"<|video_pad|>": 1}, "tools", marks)
    assert caught.value.param == "tools"
    check_text(messages, "messages", get_image_markers(FakeModelInfo()))
    check_text("<|im_end|>", "messages", marks)
    for prompt in ("<|image_pad|>", [byte_tokenizer().convert_tokens_to_ids("<|image_pad|>")]):
        with pytest.raises(RequestError, match="media"):
            build_raw_prompt(FakeModelInfo(vision=True), prompt, "prompt")


@pytest.mark.parametrize("value", ["a\ud800", ["x", "\udfff"], {"a": {"b\udc00": 1}}])
def test_half_surrogates_are_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        check_text(value, "x", get_image_markers(FakeModelInfo()))


def test_a_failing_processor_fails_this_request_only() -> None:
    """Whatever the model's processor raises is a MediaError."""

    class Failing(FakeModelInfo):
        def process(self, text: str, images: Any) -> Any:
            raise AttributeError("no such size")

    with pytest.raises(MediaError, match="no such size"):
        build_chat_prompt(
            Failing(vision=True), [{"role": "user", "content": [{"type": "image"}]}], [RED], None, {}
        )


@pytest.mark.parametrize("param", [None, "messages[0].content[0]"])
def test_an_image_that_the_processor_refuses(param: str | None) -> None:
    """The error names `messages`, unless the processor's context knows better."""

    class Refusing(FakeModelInfo):
        def process(self, text: str, images: Any) -> Any:
            raise MediaError("refused: too small", param=param)

    with pytest.raises(MediaError, match="refused: too small") as caught:
        build_chat_prompt(
            Refusing(vision=True), [{"role": "user", "content": [{"type": "image"}]}], [RED], None, {}
        )
    assert caught.value.param == (param or "messages")
    assert str(caught.value).startswith("messages: ") == (param is None)


def test_raw_prompts_as_ids() -> None:
    model_info = FakeModelInfo()
    prompt = build_raw_prompt(model_info, list(ids_of("hello<|im_end|>")), "prompt")
    assert (prompt.text, prompt.ids) == ("hello<|im_end|>", ids_of("hello<|im_end|>"))
    for ids, param in (([], "prompt"), ([1, 99_999], "prompt[1]"), ([-1], "prompt[0]")):
        with pytest.raises(RequestError) as caught:
            build_raw_prompt(model_info, ids, "prompt")
        assert caught.value.param == param
