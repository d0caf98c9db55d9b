"""Templates and prompts, and images that are marked exactly once."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from mlxrun.api.text.media.media_kinds import PDF, MediaRef
from mlxrun.api.text.prompt import build_chat_prompt, build_raw_prompt, check_text
from mlxrun.api.text.templates.template import get_image_markers
from mlxrun.core.errors import MediaError, RequestError
from tests.helpers.tokenizers import (
    CHATML,
    TEXT_ONLY,
    FakeModelInfo,
    byte_tokenizer,
    ids_of,
)

HI = [{"role": "user", "content": "hi"}]
SYSTEM = {"role": "system", "content": "be brief"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
RED = Image.new("RGB", (2, 2), "red")


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


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (AttributeError("no such size"), "refuses the images: no such size"),
        (MemoryError("Unable to allocate 8 GiB for an array"), "images: there is not enough memory for it"),
        (AttributeError(), "refuses the images: AttributeError"),
    ],
)
def test_a_failing_processor_fails_this_request_only(error: Exception, says: str) -> None:
    """Whatever the model's processor raises is a MediaError."""

    class Failing(FakeModelInfo):
        def process(self, text: str, images: Any) -> Any:
            raise error

    with pytest.raises(MediaError, match=f"{says}$"):
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


PICTURE, PAPER = MediaRef("", "a.url"), MediaRef("", "b.file_data", PDF)


@pytest.mark.parametrize("error", [MediaError("no"), ValueError("no")])
@pytest.mark.parametrize(
    ("refs", "param", "code"),
    [
        ([PICTURE], "a.url", "invalid_image"),
        ([PAPER, PAPER], "b.file_data", "invalid_document"),
        ([PICTURE, PAPER], "messages", "invalid_image"),
    ],
)
def test_what_the_processor_refuses_is_named(
    refs: list[MediaRef], param: str, code: str, error: Exception
) -> None:
    """By its own field, if it is the only one."""

    class Refusing(FakeModelInfo):
        def process(self, text: str, images: Any) -> Any:
            raise error

    messages = [{"role": "user", "content": [{"type": "image"}] * len(refs)}]
    with pytest.raises(MediaError, match=f"^{param}: .*no$") as caught:
        build_chat_prompt(Refusing(vision=True), messages, [RED] * len(refs), None, {}, refs=refs)
    assert (caught.value.param, caught.value.code) == (param, code)


def test_raw_prompts_as_ids() -> None:
    model_info = FakeModelInfo()
    prompt = build_raw_prompt(model_info, list(ids_of("hello<|im_end|>")), "prompt")
    assert (prompt.text, prompt.ids) == ("hello<|im_end|>", ids_of("hello<|im_end|>"))
    for ids, param in (([], "prompt"), ([1, 99_999], "prompt[1]"), ([-1], "prompt[0]")):
        with pytest.raises(RequestError) as caught:
            build_raw_prompt(model_info, ids, "prompt")
        assert caught.value.param == param
