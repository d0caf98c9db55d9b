"""OpenAI bodies become Requests, and no field is ignored."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxrun.api.openai.fields import BODIES
from mlxrun.api.openai.request import prepare_request
from mlxrun.api.openai.response import build_error
from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.config.settings import (
    Config,
    MediaSettings,
    ModelSettings,
    SchedulerSettings,
    ServerSettings,
)
from mlxrun.core.errors import MediaError, RequestError
from mlxrun.core.request import ProcessedPrompt
from tests.helpers.examples import count_examples
from tests.helpers.openai_api import CHAT, COMPLETION, HI, TOOL, chat, complete, image_part, make, refused
from tests.helpers.tokenizers import (
    CHATML,
    STRICT,
    THINKING,
    TOOLS,
    FakeModelInfo,
    byte_tokenizer,
    ids_of,
)


def test_model_names() -> None:
    model_info = FakeModelInfo(name="m", names=("m", "other"))
    for model in ("m", "other"):
        assert chat(model_info, model=model).model == "m"
    error = refused(CHAT, {"messages": HI, "model": "gpt"}, model_info)
    assert (error.param, error.code, error.http_status) == ("model", "model_not_found", 404)
    assert "m, other" in str(error)
    assert chat(FakeModelInfo(name="m"), model="anything").model == "m"
    placed = FakeModelInfo(name="m", names=("m", "other"), aliases=("/models/x",))
    assert chat(placed, model="/models/x").model == "m"
    assert refused(CHAT, {"messages": HI, "model": "/models/y"}, placed).code == "model_not_found"


def test_unknown_urls() -> None:
    error = refused("/v1/chat/completion", {})
    assert error.param == "url" and "did you mean '/v1/chat/completions'" in str(error)


CHAT_BODY = BODIES["chat"]
FIELDS = st.sampled_from(
    sorted({*CHAT_BODY.honoured, *CHAT_BODY.harmless, *CHAT_BODY.refused, "prompt", "echo"})
)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | FIELDS, inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=count_examples(150), deadline=None)
@given(st.sampled_from([CHAT, COMPLETION]), st.dictionaries(FIELDS, VALUES, max_size=4))
def test_any_body_is_prepared_or_refused(url: str, fields: dict[str, Any]) -> None:
    """Fuzzed over whole bodies: the error is ours, and its texts are JSON."""
    try:
        prepared = make(
            url, {"messages" if url == CHAT else "prompt": HI if url == CHAT else "hi", **fields}, stream=True
        )
    except RequestError as error:
        json.dumps(build_error(error), allow_nan=False)
        assert error.param is not None
    else:
        assert prepared.requests


def test_tools_and_template_variables_reach_the_prompt() -> None:
    model_info = FakeModelInfo(chat_template=TOOLS)
    with_tools = chat(model_info, tools=[TOOL])
    assert '"name": "add"' in model_info.tokenizer.decode(with_tools.requests[0].prompt)
    assert (
        chat(model_info, tools=[TOOL], tool_choice="none").requests[0].prompt
        == chat(model_info).requests[0].prompt
    )
    thinking = FakeModelInfo(chat_template=THINKING)
    off = Config(model=ModelSettings(chat_template_args={"enable_thinking": False}))
    default, silent = chat(thinking), chat(thinking, off)
    assert silent.requests[0].prompt != default.requests[0].prompt
    again = chat(thinking, off, chat_template_kwargs={"enable_thinking": True})
    assert again.requests[0].prompt == default.requests[0].prompt
    effort = FakeModelInfo(chat_template="{{ messages[0].content }} {{ reasoning_effort }}")
    assert chat(effort, reasoning_effort="low").requests[0].prompt == ids_of("hi low")


def test_prompts_of_completions() -> None:
    """Strings get the tokenizer's special tokens, ids are taken as they are."""
    begin = byte_tokenizer().convert_tokens_to_ids("<|begin|>")
    two = complete(prompt=["a", "bc"], n=2, user="u")
    assert [request.prompt for request in two.requests] == [(begin, 97)] * 2 + [(begin, 98, 99)] * 2
    assert two.prompt_tokens == 5
    assert len({request.id for request in two.requests}) == 4
    assert complete(prompt=[97, 98]).requests[0].prompt == (97, 98)
    assert [r.prompt for r in complete(prompt=[[97], [98]]).requests] == [(97,), (98,)]


def test_images() -> None:
    """In the sender's order, shared by all choices; refused by text models, and beyond the limit."""
    model_info = FakeModelInfo(vision=True)
    messages = [
        {"role": "user", "content": [image_part("red"), {"type": "text", "text": "?"}, image_part("blue")]}
    ]
    prepared = chat(model_info, messages=messages, n=2)
    assert [request.media for request in prepared.requests] == [((255, 0, 0), (0, 0, 255))] * 2
    assert len(prepared.requests[0].image_spans) == 2
    error = refused(CHAT, {"messages": messages})
    assert error.param == "messages[0].content[0].image_url.url" and "does not accept images" in str(error)
    video = [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}]
    for seen in (FakeModelInfo(), model_info):
        error = refused(CHAT, {"messages": [{"role": "user", "content": video}]}, seen)
        assert "video_url.url: the model 'fake' does not accept videos" in str(error)
    few = Config(media=MediaSettings(max_images=1))
    error = refused(CHAT, {"messages": messages}, model_info, few)
    assert isinstance(error, MediaError) and "2 images are more than media.max_images (1)" in str(error)


TAKES_TURNS = STRICT.replace("== 'user') != (loop", "!= 'assistant') != (loop")


@pytest.mark.parametrize("template", [CHATML, TAKES_TURNS])
def test_images_of_tool_results(template: str) -> None:
    """They reach the model in the order of the messages, also under a template that insists on turns."""
    model_info = FakeModelInfo(chat_template=template, vision=True)
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [image_part("red"), {"type": "text", "text": "and there?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": [{"type": "text", "text": "seen"}, image_part("blue")],
        },
    ]
    alone = chat(model_info, messages=messages)
    assert alone.requests[0].media == ((255, 0, 0), (0, 0, 255))
    prompt = alone.prompts[0]
    assert prompt.count("<|image_pad|>") == 2 and prompt.index("seen") < prompt.rindex("<|image_pad|>")
    later = chat(model_info, messages=[*messages, {"role": "user", "content": "so?"}])
    assert later.requests[0].media == alone.requests[0].media and "so?" in later.prompts[0]
    error = refused(CHAT, {"messages": messages[1:]})
    assert error.param == "messages[1].content[1].image_url.url" and "does not accept images" in str(error)


class DigestingModelInfo(FakeModelInfo):
    """Says what fills each span."""

    def process(self, text: str, images: Sequence[Any]) -> ProcessedPrompt:
        done = super().process(text, images)
        return dataclasses.replace(done, image_digests=tuple(bytes(c) for c in done.media))


def test_what_the_prefix_cache_needs_reaches_every_choice() -> None:
    """Digests of the images and cache_positions; raw prompts have neither."""
    long = {"role": "system", "content": "be brief and never say anything that is not true"}
    parts = [image_part("red"), {"type": "text", "text": "?"}, image_part("blue")]
    messages = [long, {"role": "user", "content": parts}]
    for request in chat(DigestingModelInfo(vision=True), messages=messages, n=2).requests:
        assert request.image_digests == (b"\xff\x00\x00", b"\x00\x00\xff")
        assert len(request.image_spans) == 2
        assert request.cache_positions == (request.image_spans[0][0] - 1,)  # before <|vision_start|>
    one, two = chat(messages=[long, *HI], n=2).requests
    assert one.cache_positions == two.cache_positions != () and one.image_digests == ()
    other = chat(messages=[long, {"role": "user", "content": "else"}]).requests[0]
    assert other.cache_positions == one.cache_positions
    assert other.prompt[: one.cache_positions[0]] == one.prompt[: one.cache_positions[0]]
    assert complete(prompt="<|im_start|>system\nx" * 9).requests[0].cache_positions == ()


def test_the_first_bad_image_is_the_one_named() -> None:
    """Whichever fails first in time."""

    class Late(MediaLoader):
        async def load(self, url: str, param: str) -> Any:
            await asyncio.sleep(0.02 if url == "first" else 0)
            raise MediaError(f"{param}: bad", param=param)

    parts = [{"type": "image_url", "image_url": {"url": url}} for url in ("first", "second")]
    body = {"messages": [{"role": "user", "content": parts}]}
    with pytest.raises(MediaError) as caught:
        asyncio.run(
            prepare_request(
                CHAT, body, ApiContext(FakeModelInfo(vision=True), Config(), Late(MediaSettings(), None))
            )
        )
    assert caught.value.param == "messages[0].content[0].image_url.url"


def test_priority_and_streams_where_they_count() -> None:
    config = Config(scheduler=SchedulerSettings(policy="priority"))
    assert chat(config=config, priority=-2).requests[0].priority == -2
    options = {"stream": True, "stream_options": {"include_usage": True}}
    prepared = make(CHAT, {"messages": HI, **options}, stream=True)
    assert prepared.stream and prepared.include_usage
    plain = {"stream": True, "stream_options": {"include_obfuscation": False}}
    assert not make(CHAT, {"messages": HI, **plain}, stream=True).include_usage
    noise = {"stream": True, "stream_options": {"include_obfuscation": True}}
    assert not make(CHAT, {"messages": HI, **noise}, stream=True).include_usage
    strict = Config(server=ServerSettings(strict_fields=True))
    error = refused(CHAT, {"messages": HI, **noise}, config=strict, stream=True)
    assert error.param == "stream_options.include_obfuscation"
    assert chat(priority=5).requests[0].priority == 0


def test_prompts_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="mlxrun"):
        chat(messages=[{"role": "user", "content": "a secret"}])
    assert "secret" not in caplog.text
