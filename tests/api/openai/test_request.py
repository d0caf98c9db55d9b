"""OpenAI bodies in, OpenAI objects out: A33, A44, A51, A53, A67, B21 to B23, C4, C9. Nothing is ignored."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mlxrun.api.choice import Choice
from mlxrun.api.context import ApiContext
from mlxrun.api.openai.fields import HARMLESS, HONOURED, REFUSED
from mlxrun.api.openai.request import prepare_request
from mlxrun.api.openai.response import build_error, build_response
from mlxrun.api.prepared import PreparedRequest
from mlxrun.api.sampling_params import derive_choice_seed
from mlxrun.config.settings import (
    Config,
    MediaSettings,
    ModelSettings,
    SamplingSettings,
    SchedulerSettings,
)
from mlxrun.errors import (
    BodyTooLarge,
    EngineDead,
    Forbidden,
    MediaError,
    NotFound,
    Overloaded,
    PromptTooLong,
    RequestError,
    Unauthorized,
)
from mlxrun.parsers.delta import Delta
from mlxrun.scheduler.request import FinishReason, HitKind, ProcessedPrompt, TokenEvent, TokenLogprob
from mlxrun.text.images import MediaLoader
from tests.helpers.tokenizers import (
    THINKING,
    TOOLS,
    FakeModelInfo,
    byte_tokenizer,
    ids_of,
    metaspace_tokenizer,
)

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
}
HOST = FakeModelInfo()


def make(
    url: str,
    body: Any,
    host: FakeModelInfo = HOST,
    config: Config | None = None,
    base: Path | None = None,
    **options: Any,
) -> PreparedRequest:
    config = config or Config()

    async def run() -> PreparedRequest:
        return await prepare_request(
            url, body, ApiContext(host, config, MediaLoader(config.media, base)), **options
        )

    return asyncio.run(run())


def chat(host: FakeModelInfo = HOST, config: Config | None = None, **fields: Any) -> PreparedRequest:
    return make(CHAT, {"messages": HI, **fields}, host, config)


def complete(host: FakeModelInfo = HOST, config: Config | None = None, **fields: Any) -> PreparedRequest:
    return make(COMPLETION, {"prompt": "hi", **fields}, host, config)


def refused(
    url: str, body: Any, host: FakeModelInfo = HOST, config: Config | None = None, **options: Any
) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make(url, body, host, config, **options)
    return caught.value


def joined(pieces: Sequence[Delta]) -> str:
    """The text of pieces that are all text."""
    assert all(piece.kind == "content" for piece in pieces)
    return "".join(piece.text for piece in pieces)


def answer(prepared: PreparedRequest, *texts: str, finish: FinishReason = FinishReason.STOP) -> list[Choice]:
    """A Choice for each request, all tokens of a text in one event."""
    choices = []
    for index, text in enumerate(texts):
        choice = Choice(prepared, index, HOST)
        choice.feed(TokenEvent("r", ids_of(text), finish=finish))
        choices.append(choice)
    return choices


# Sampling.


def test_defaults_go_from_body_to_config_to_model() -> None:
    """A67: each value from the first that has one."""
    host = FakeModelInfo(defaults={"temperature": 0.3, "top_k": 20.0, "top_p": 0.9})
    config = Config(sampling=SamplingSettings(temperature=0.5, min_p=0.1))
    params = chat(host, config, top_p=0.5).requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.5, 20, 0.1)
    assert params.repetition_penalty == 1.0
    assert chat(host, config, temperature=0).requests[0].params.temperature == 0.0
    built_in = chat().requests[0].params
    assert (built_in.temperature, built_in.top_p, built_in.top_k, built_in.min_p) == (1.0, 1.0, 0, 0.0)


def test_every_sampling_field_arrives() -> None:
    """B21: per request, none dropped."""
    params = (
        chat(
            temperature=0.25,
            top_p=0.5,
            top_k=7,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=-1,
            frequency_penalty=2,
            logit_bias={"5": -100, "6": 1.5},
            seed=11,
            max_completion_tokens=9,
            logprobs=True,
            top_logprobs=3,
            stop_token_ids=[65],
        )
        .requests[0]
        .params
    )
    assert dataclasses.asdict(params) == {
        "max_tokens": 9,
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "logit_bias": {5: -100.0, 6: 1.5},
        "seed": 11,
        "logprobs": 3,
        "stop_ids": HOST.eos_ids | {65},
    }
    assert chat(top_k=-1, ignore_eos=True).requests[0].params.stop_ids == frozenset()
    assert complete(logprobs=0).requests[0].params.logprobs == 0


def test_settings_that_leave_float32() -> None:
    """A temperature that would make infinities is greedy; a top_k beyond any vocabulary is all of it."""
    params = [chat(temperature=t).requests[0].params.temperature for t in (1e-300, 9.9e-6, 1e-5, 0.5)]
    assert params == [0.0, 0.0, 1e-5, 0.5]
    assert [chat(top_k=k).requests[0].params.top_k for k in (2**70, 1e30, 7)] == [2**24, 2**24, 7]
    config = Config(sampling=SamplingSettings(temperature=1e-40, top_k=2**40))
    configured = chat(config=config).requests[0].params
    assert (configured.temperature, configured.top_k) == (0.0, 2**24)


@pytest.mark.parametrize(
    ("tool", "where"),
    [
        ({"type": "function"}, "tools[0].function"),
        ({"type": "function", "function": None}, "tools[0].function"),
        ({"type": "function", "function": {}}, "tools[0].function.name"),
        ({}, "tools[0].type"),
    ],
)
def test_what_a_tool_lacks_is_missing(tool: dict[str, Any], where: str) -> None:
    """A51: not null where nothing was sent."""
    error = refused(CHAT, {"messages": HI, "tools": [tool]})
    assert (str(error), error.param, error.code) == (f"{where}: missing", where, "missing_field")
    assert "expected object, got string" in str(
        refused(CHAT, {"messages": HI, "tools": [{"type": "function", "function": "f"}]})
    )


def test_both_spellings_of_the_cache_key() -> None:
    """Some clients send both."""
    assert chat(prompt_cache_key="a", promptCacheKey="a").requests[0].prompt == chat().requests[0].prompt


def test_seeds() -> None:
    """B22: the same seed is the same answer, no seed is a new one, and it is reported."""
    assert chat(seed=5).seed == 5
    assert chat(seed=-1).requests[0].params.seed == 2**64 - 1
    assert make(CHAT, {"messages": HI}, default_seed=77).seed == 77
    assert chat(config=Config(sampling=SamplingSettings(seed=3))).seed == 3
    drawn = {chat().seed for _ in range(20)}
    assert len(drawn) == 20 and max(drawn) < 2**53 and max(drawn) > 2**47  # whole in JavaScript
    three = chat(seed=5, n=3)
    seeds = [request.params.seed for request in three.requests]
    assert seeds[0] == 5 and len(set(seeds)) == 3
    assert seeds == [derive_choice_seed(5, i) for i in range(3)]
    assert [r.params.seed for r in complete(prompt=["a", "b"], seed=5).requests] == [5, 5]
    assert build_response(three, answer(three, "a", "b", "c"), "x", 0)["mlxrun"] == {"seed": 5}


def test_length_of_the_answer() -> None:
    """A33: what was asked for must fit, with the numbers said; a default is cut to what is left."""
    host = FakeModelInfo(context_length=50)
    prompt = len(chat(host).requests[0].prompt)
    left = 50 - prompt
    assert chat(host).requests[0].params.max_tokens == left
    assert chat(host, max_tokens=left).requests[0].params.max_tokens == left
    assert make(CHAT, {"messages": HI}, host, default_max_tokens=4).requests[0].params.max_tokens == 4
    assert make(CHAT, {"messages": HI}, host, default_max_tokens=400).requests[0].params.max_tokens == left
    limited = Config(sampling=SamplingSettings(max_tokens=6))
    assert (
        make(CHAT, {"messages": HI}, host, limited, default_max_tokens=4).requests[0].params.max_tokens == 6
    )
    error = refused(CHAT, {"messages": HI, "max_tokens": left + 1}, host)
    assert isinstance(error, PromptTooLong) and error.param == "max_tokens"
    assert f"{prompt} tokens" in str(error) and f"{left + 1} tokens" in str(error) and "50" in str(error)
    error = refused(COMPLETION, {"prompt": "x" * 60}, host)
    assert isinstance(error, PromptTooLong) and error.code == "context_length_exceeded"
    assert chat(max_tokens=5, max_completion_tokens=5).requests[0].params.max_tokens == 5


# Refusals.


@pytest.mark.parametrize(
    ("field", "value", "param", "words"),
    [
        ("temperature", 2.5, "temperature", "2.5 is greater than the maximum of 2"),
        ("temperature", "1", "temperature", "expected number, got string"),
        ("temperature", True, "temperature", "expected number, got boolean"),
        ("temperature", float("nan"), "temperature", "finite"),
        ("temperature", float("inf"), "temperature", "finite"),
        ("temperature", [[]], "temperature", "expected number, got array"),
        ("top_p", 0, "top_p", "0"),
        ("top_k", 1.5, "top_k", "expected integer"),
        ("min_p", 1, "min_p", "1"),
        ("repetition_penalty", 0, "repetition_penalty", "minimum of 0.01"),
        ("presence_penalty", 2.1, "presence_penalty", "maximum of 2"),
        ("frequency_penalty", -3, "frequency_penalty", "minimum of -2"),
        ("logit_bias", [], "logit_bias", "expected object"),
        ("logit_bias", {"x": 1}, "logit_bias", "'x' is not a token id"),
        ("logit_bias", {"1": 101}, "logit_bias.1", "maximum of 100"),
        ("logit_bias", {"1": float("nan")}, "logit_bias.1", "finite"),
        ("logit_bias", {"05": 1}, "logit_bias.05", "write '5'"),
        ("logit_bias", {"5\n": 1}, "logit_bias.5\n", "write '5'"),
        ("logit_bias", {str(i): 1 for i in range(1025)}, "logit_bias", "at most 1024"),
        ("logit_bias", {"99999": 1}, "logit_bias.99999", "the vocabulary has"),
        ("stop_token_ids", [1, 99999], "stop_token_ids[1]", "the vocabulary has"),
        ("stop_token_ids", [1, "a"], "stop_token_ids[1]", "expected integer"),
        ("seed", 2**64, "seed", "maximum"),
        ("seed", "1", "seed", "integer"),
        ("max_tokens", 0, "max_tokens", "minimum of 1"),
        ("n", 0, "n", "minimum of 1"),
        ("n", 129, "n", "maximum of 128"),
        ("stop", 1, "stop", "expected a string or an array"),
        ("stop", "", "stop[0]", "empty"),
        ("stop", ["a", ""], "stop[1]", "empty"),
        ("stop", ["a", None], "stop[1]", "expected string"),
        ("stop", ["a"] * 17, "stop", "at most 16"),
        ("stop", ["a", "b" * 1025], "stop[1]", "at most 1024"),
        ("stop_token_ids", [1] * 1025, "stop_token_ids", "at most 1024"),
        ("stream", True, "stream", "not supported"),
        ("stream_options", {"include_usage": True}, "stream_options", "stream"),
        ("priority", 1, "priority", "scheduler.policy: priority"),
        ("model", 1, "model", "string"),
        ("tempature", 1, "tempature", "did you mean 'temperature'"),
        ("nonsense", {}, "nonsense", "unknown parameter"),
        ("min_tokens", 1, "min_tokens", "not supported"),
    ],
)
@pytest.mark.parametrize("url", [CHAT, COMPLETION])
def test_bad_fields_are_named(url: str, field: str, value: Any, param: str, words: str) -> None:
    """C4: what and where, for both endpoints."""
    error = refused(url, {"messages" if url == CHAT else "prompt": HI if url == CHAT else "hi", field: value})
    assert error.param == param
    assert str(error).startswith(f"{param}: ") and words in str(error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"prompt": "x"}, "prompt"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"tools": {}}, "tools"),
        ({"tools": [1]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
        ({"tool_choice": 1}, "tool_choice"),
        ({"tool_choice": "atuo"}, "tool_choice"),
        ({"response_format": {"type": "jsn"}}, "response_format.type"),
        ({"response_format": {"type": "json_object", "x": 1}}, "response_format.x"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "strng"}}}},
            "response_format.json_schema.schema.type",
        ),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a"], "structured_outputs": {"regex": "a"}}, "guided_choice"),
        ({"structured_outputs": {"rgx": "a"}}, "structured_outputs.rgx"),
        ({"structured_outputs": {"json": {}}, "ignore_eos": True}, "ignore_eos"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"store": True}, "store"),
        ({"promptCacheKey": 3}, "promptCacheKey"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": None}, "messages"),
        *(({name: {}}, name) for name in REFUSED["chat"]),
        ({"echo": True}, "echo"),
    ],
)
def test_bad_chat_fields_are_named(fields: Mapping[str, Any], param: str) -> None:
    """B23 and the issue: what cannot be honoured is refused, never ignored."""
    error = refused(CHAT, {"messages": HI, **fields})
    assert error.param == param
    assert build_error(error)["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": HI}, "messages"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [[1], [2, "x"]]}, "prompt[1][1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], [99_999]]}, "prompt[1][0]"),
        ({"prompt": [1.0]}, "prompt[0]"),
        ({"prompt": ["a"] * 17, "n": 128}, "n"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"tools": [TOOL]}, "tools"),
    ],
)
def test_bad_completion_fields_are_named(fields: Mapping[str, Any], param: str) -> None:
    assert refused(COMPLETION, {"prompt": "hi", **fields}).param == param


def test_tables_do_not_overlap() -> None:
    """Every known field has one treatment."""
    for kind in ("chat", "completion"):
        names = [*HONOURED[kind], *HARMLESS[kind], *REFUSED[kind]]  # type: ignore[index]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_every_field_of_the_sdk_has_a_treatment(kind: Any) -> None:
    """B23: what the official client can send is honoured, harmless or refused by name; nothing is unknown."""
    if kind == "chat":
        from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Fields
    else:
        from openai.types.completion_create_params import (  # type: ignore[assignment]
            CompletionCreateParamsBase as Fields,
        )
    known = {*HONOURED[kind], *HARMLESS[kind], *REFUSED[kind]}
    assert set(Fields.__annotations__) <= known
    assert not {"response_formt"} <= known


def test_harmless_fields_are_taken() -> None:
    chat(
        user="u",
        metadata={"a": "b"},
        safety_identifier="x",
        prompt_cache_key="x",
        store=False,
        service_tier="auto",
        modalities=["text"],
        response_format={"type": "text"},
        parallel_tool_calls=True,
        tool_choice="auto",
        temperature=None,
        audio=None,
        nothing=None,
        stream=False,
        tools=[],
    )
    assert complete(best_of=1, user="u").requests[0].fairness_key == "u"


def test_model_names() -> None:
    host = FakeModelInfo(name="m", names=("m", "other"))
    for model in ("m", "other"):
        assert chat(host, model=model).model == "m"
    error = refused(CHAT, {"messages": HI, "model": "gpt"}, host)
    assert (error.param, error.code, error.http_status) == ("model", "model_not_found", 404)
    assert "m, other" in str(error)
    assert chat(FakeModelInfo(name="m"), model="anything").model == "m"
    placed = FakeModelInfo(name="m", names=("m", "other"), aliases=("/models/x",))
    assert chat(placed, model="/models/x").model == "m"
    assert refused(CHAT, {"messages": HI, "model": "/models/y"}, placed).code == "model_not_found"


@pytest.mark.parametrize("body", [None, [], "x", 1])
def test_a_body_is_an_object(body: Any) -> None:
    assert "expected an object" in str(refused(CHAT, body))


def test_unknown_urls() -> None:
    error = refused("/v1/chat/completion", {})
    assert error.param == "url" and "did you mean '/v1/chat/completions'" in str(error)


def test_deep_nesting_is_refused_not_a_crash() -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    for field in ("temperature", "metadata", "tools", "stop", "tool_choice", "chat_template_kwargs"):
        assert refused(CHAT, {"messages": HI, field: deep})
    assert refused(CHAT, {"messages": deep})
    assert refused(COMPLETION, {"prompt": deep})
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": deep}}}
    assert refused(CHAT, {"messages": HI, "tools": [tool]}, FakeModelInfo(chat_template=TOOLS))


FIELDS = st.sampled_from(sorted({*HONOURED["chat"], *HARMLESS["chat"], *REFUSED["chat"], "prompt", "echo"}))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 300) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | FIELDS, inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([CHAT, COMPLETION]), st.dictionaries(FIELDS, VALUES, max_size=4))
def test_any_body_is_prepared_or_refused(url: str, fields: dict[str, Any]) -> None:
    """A51, fuzzed over whole bodies: the error is ours, and its texts are JSON."""
    try:
        prepared = make(
            url, {"messages" if url == CHAT else "prompt": HI if url == CHAT else "hi", **fields}, stream=True
        )
    except RequestError as error:
        json.dumps(build_error(error), allow_nan=False)
        assert error.param is not None
    else:
        assert prepared.requests


# Prompts.


def test_tools_and_template_variables_reach_the_prompt() -> None:
    host = FakeModelInfo(chat_template=TOOLS)
    with_tools = chat(host, tools=[TOOL])
    assert '"name": "add"' in host.tokenizer.decode(with_tools.requests[0].prompt)
    assert chat(host, tools=[TOOL], tool_choice="none").requests[0].prompt == chat(host).requests[0].prompt
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


def image_part(colour: str) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.new("RGB", (2, 2), colour).save(buffer, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def test_images() -> None:
    """In the sender's order, shared by all choices; refused by text models, and beyond the limit."""
    host = FakeModelInfo(vision=True)
    messages = [
        {"role": "user", "content": [image_part("red"), {"type": "text", "text": "?"}, image_part("blue")]}
    ]
    prepared = chat(host, messages=messages, n=2)
    assert [request.media for request in prepared.requests] == [((255, 0, 0), (0, 0, 255))] * 2
    assert len(prepared.requests[0].image_spans) == 2
    error = refused(CHAT, {"messages": messages})
    assert error.param == "messages[0].content[0].image_url.url" and "does not accept images" in str(error)
    few = Config(media=MediaSettings(max_images=1))
    error = refused(CHAT, {"messages": messages}, host, few)
    assert isinstance(error, MediaError) and "2 images are more than media.max_images (1)" in str(error)


class DigestingHost(FakeModelInfo):
    """Says what fills each span."""

    def process(self, text: str, images: Sequence[Any]) -> ProcessedPrompt:
        done = super().process(text, images)
        return dataclasses.replace(done, image_digests=tuple(bytes(c) for c in done.media))


def test_what_the_prefix_cache_needs_reaches_every_choice() -> None:
    """A3, B8: digests of the images and boundaries; raw prompts have neither."""
    long = {"role": "system", "content": "be brief and never say anything that is not true"}
    parts = [image_part("red"), {"type": "text", "text": "?"}, image_part("blue")]
    messages = [long, {"role": "user", "content": parts}]
    for request in chat(DigestingHost(vision=True), messages=messages, n=2).requests:
        assert request.image_digests == (b"\xff\x00\x00", b"\x00\x00\xff")
        assert len(request.image_spans) == 2
        assert request.boundaries == (request.image_spans[0][0] - 1,)  # before <|vision_start|>
    one, two = chat(messages=[long, *HI], n=2).requests
    assert one.boundaries == two.boundaries != () and one.image_digests == ()
    other = chat(messages=[long, {"role": "user", "content": "else"}]).requests[0]
    assert other.boundaries == one.boundaries
    assert other.prompt[: one.boundaries[0]] == one.prompt[: one.boundaries[0]]
    assert complete(prompt="<|im_start|>system\nx" * 9).requests[0].boundaries == ()


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
    error = refused(CHAT, {"messages": HI, **noise}, stream=True)
    assert error.param == "stream_options.include_obfuscation"


# Answers.


def test_chat_response() -> None:
    """Golden object; C9."""
    prepared = chat(seed=1)
    (choice,) = answer(prepared, "hello")
    prompt = len(prepared.requests[0].prompt)
    tokens = len(ids_of("hello"))
    assert build_response(prepared, [choice], "abc", 5) == {
        "id": "chatcmpl-abc",
        "object": "chat.completion",
        "created": 5,
        "model": "fake",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "mlxrun": {"seed": 1},
    }


def test_completion_response_with_echo() -> None:
    prepared = complete(prompt=["one ", "two "], n=2, echo=True, seed=1)
    choices = answer(prepared, "a", "b", "c", "d", finish=FinishReason.LENGTH)
    choices[2].cached_tokens = 3
    choices[3].cached_tokens = 4
    body = build_response(prepared, choices, "abc", 5)
    assert (body["id"], body["object"]) == ("cmpl-abc", "text_completion")
    assert [c["text"] for c in body["choices"]] == ["one a", "one b", "two c", "two d"]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2, 3]
    assert body["choices"][0] == {"index": 0, "text": "one a", "logprobs": None, "finish_reason": "length"}
    assert body["usage"]["prompt_tokens"] == 10
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    ids = complete(prompt=[104, 105], echo=True)
    assert build_response(ids, answer(ids, "!"), "x", 0)["choices"][0]["text"] == "hi!"


def logged(text: str) -> tuple[TokenLogprob, ...]:
    ids = ids_of(text)
    return tuple(TokenLogprob(-0.5 - i, ((t, -0.5 - i), (228, float("-inf")))) for i, t in enumerate(ids))


def test_chat_logprobs() -> None:
    prepared = chat(logprobs=True, top_logprobs=2)
    choice = Choice(prepared, 0, HOST)
    choice.feed(TokenEvent("r", ids_of("a\u4f60"), logged("a\u4f60"), finish=FinishReason.STOP))
    body = build_response(prepared, [choice], "x", 0)
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["a", "\\xe4", "\\xbd", "\\xa0"]
    assert bytes(b for entry in content for b in entry["bytes"]).decode() == "a\u4f60"
    assert content[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.5, "bytes": [97]},
            {"token": "\\xe4", "logprob": -9999.0, "bytes": [228]},
        ],
    }
    json.dumps(body, allow_nan=False)


def test_completion_logprobs_are_cut_with_the_text() -> None:
    """Tokens wholly behind the start of a stop string go; the text before it keeps its own."""
    prepared = complete(logprobs=2, stop="END")
    choice = Choice(prepared, 0, HOST)
    text = "ab \u4f60END more"
    shown = joined(choice.feed(TokenEvent("r", ids_of(text), logged(text))))
    assert (shown, choice.stopped, choice.stop, choice.finish_reason) == ("ab \u4f60", True, "END", "stop")
    assert choice.feed(TokenEvent("r", ids_of("x"), logged("x"), finish=FinishReason.LENGTH)) == []
    result = build_response(prepared, [choice], "x", 0)["choices"][0]["logprobs"]
    assert result == {
        "tokens": ["a", "b", " ", "bytes:\\xe4", "bytes:\\xbd", "bytes:\\xa0"],
        "token_logprobs": [-0.5, -1.5, -2.5, -3.5, -4.5, -5.5],
        "top_logprobs": [
            {"a": -0.5, "bytes:\\xe4": -9999.0},
            {"b": -1.5, "bytes:\\xe4": -9999.0},
            {" ": -2.5, "bytes:\\xe4": -9999.0},
            {"bytes:\\xe4": -9999.0},
            {"bytes:\\xbd": -4.5, "bytes:\\xe4": -9999.0},
            {"bytes:\\xa0": -5.5, "bytes:\\xe4": -9999.0},
        ],
        "text_offset": [0, 1, 2, 3, 3, 3],
    }
    assert choice.completion_tokens == len(ids_of("ab \u4f60END"))


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="abE\u0159\u4f60\U0001f600", max_size=12), st.lists(st.integers(0, 40), max_size=4))
def test_events_may_be_merged_in_any_way(text: str, cuts: list[int]) -> None:
    """A44: what is streamed joins to the whole text, and all counts are the same, however events arrive."""
    prepared = complete(logprobs=0, stop=["bE", "\u0159a"])
    ids = ids_of(text)
    lps = tuple(TokenLogprob(-1.0) for _ in ids)

    def run(bounds: list[int]) -> tuple[Any, ...]:
        choice = Choice(prepared, 0, HOST)
        shown = ""
        for start, end in zip(bounds, bounds[1:], strict=False):
            last = FinishReason.LENGTH if end == bounds[-1] and start == bounds[-2] else None
            shown += joined(choice.feed(TokenEvent("r", ids[start:end], lps[start:end], finish=last)))
        assert shown == choice.text
        return (
            choice.text,
            choice.stop,
            choice.finish_reason,
            choice.completion_tokens,
            choice.get_tokens_with_logprobs(),
        )

    one_by_one = run([*range(len(ids) + 1), len(ids)])
    assert run([0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids), len(ids)]) == one_by_one
    assert run([0, len(ids)]) == one_by_one


RESUMED = (
    "a\u4f60bE",
    "\U0001f600\u0159a!",
    "b\u0159",
    "ok<|im_end|>more",
    "\u4f60\u4f60",
    "plain bbE text",
)


@pytest.mark.parametrize("text", RESUMED)
@pytest.mark.parametrize("url", [CHAT, COMPLETION])
def test_an_answer_resumes_at_any_token(url: str, text: str) -> None:
    """A44, C3: known tokens and then events give what events alone give: text, stop, counts, logprobs; also
    where a stop string or a character lies across the border, and cut within the last character."""
    wanted = {"logprobs": True, "top_logprobs": 1} if url == CHAT else {"logprobs": 1}
    of = {"messages": HI} if url == CHAT else {"prompt": "hi"}
    prepared = make(url, {**of, **wanted, "stop": ["bE", "\u0159a"], "seed": 1})
    for ids in (tuple(text.encode()), ids_of(text), tuple(text.encode())[:-1]):
        logprobs = tuple(TokenLogprob(-0.1 * i, ((t, -0.1 * i),)) for i, t in enumerate(ids))
        whole = resumed(prepared, ids, logprobs, 0)
        for k in range(1, len(ids) + 1):
            assert resumed(prepared, ids, logprobs, k) == whole


def resumed(
    prepared: PreparedRequest, ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...], k: int
) -> tuple[Any, ...]:
    """Everything that shows of an answer whose first `k` tokens are known."""
    choice = Choice(prepared, 0, HOST)
    shown = joined(choice.resume(ids[:k], logprobs[:k])) if k else ""
    assert shown == choice.text
    for token, logprob in zip(ids[k:], logprobs[k:], strict=True):
        event = TokenEvent(
            "r", (token,), (logprob,), num_computed_tokens=9, num_cached_tokens=4, hit_kind=HitKind.LCP
        )
        shown += joined(choice.feed(event))
    last = TokenEvent(
        "r", num_computed_tokens=9, num_cached_tokens=4, hit_kind=HitKind.LCP, finish=FinishReason.LENGTH
    )
    shown += joined(choice.feed(last))
    assert shown == choice.text
    body = build_response(prepared, [choice], "x", 0)
    return (
        body,
        choice.stop,
        choice.stopped,
        choice.get_tokens_with_logprobs(),
        choice.cached_tokens,
        choice.hit,
    )


def test_an_answer_that_was_complete_stays_complete() -> None:
    """A stop string among the known tokens: nothing is wanted of the engine."""
    choice = Choice(complete(stop="END"), 0, HOST)
    assert joined(choice.resume(ids_of("abEND"))) == "ab"
    assert (choice.stopped, choice.stop, choice.finish_reason) == (True, "END", "stop")
    assert Choice(complete(), 0, HOST).resume(()) == []


def test_known_tokens_have_logprobs_if_the_answer_does() -> None:
    with pytest.raises(ValueError, match="2 answered tokens with 0 logprobs"):
        Choice(complete(logprobs=0), 0, HOST).resume((97, 98))
    with pytest.raises(ValueError, match="2 answered tokens with 1 logprobs"):
        Choice(complete(), 0, HOST).resume((97, 98), (TokenLogprob(-1.0),))


def test_what_was_found_in_the_cache_is_reported() -> None:
    """A65: the first choice's of each prompt, as a prompt counts once; and how it was found."""
    for prepared, expected in ((chat(n=3), 5), (complete(prompt=["a", "b"], n=2), 5 + 7)):
        choices = []
        for index, cached in enumerate((5, 6, 7, 8)[: len(prepared.requests)]):
            choice = Choice(prepared, index, HOST)
            choice.feed(TokenEvent("r", num_computed_tokens=3, num_cached_tokens=3))
            assert choice.hit is None
            choice.feed(TokenEvent("r", num_cached_tokens=3, hit_kind=HitKind.PREFIX))
            choice.feed(TokenEvent("r", num_cached_tokens=cached, hit_kind=HitKind.SUPERSEQUENCE))
            choice.feed(TokenEvent("r", ids_of("x"), finish=FinishReason.LENGTH))
            assert (choice.cached_tokens, choice.hit) == (cached, HitKind.SUPERSEQUENCE)
            choices.append(choice)
        usage = build_response(prepared, choices, "x", 0)["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": expected}


def test_special_tokens_never_reach_content() -> None:
    """A53: neither as the token, nor spelled in pieces; other added tokens stay for the parsers."""
    prepared = chat()
    assert answer(prepared, "<think>a</think><|im_start|>b<|vision_end|>")[0].text == "<think>a</think>b"
    (choice,) = answer(prepared, "done<|im_")
    assert choice.text == "done<|im_"
    pieces = tuple(b"ok<|im_end|>more")
    spelled = Choice(prepared, 0, HOST)
    assert joined(spelled.feed(TokenEvent("r", pieces))) == "ok"
    assert (spelled.stopped, spelled.stop, spelled.finish_reason) == (True, None, "stop")
    free = chat(ignore_eos=True)
    shown = Choice(free, 0, HOST)
    assert joined(shown.feed(TokenEvent("r", pieces, finish=FinishReason.LENGTH))) == "ok<|im_end|>more"
    html = FakeModelInfo(tokenizer=metaspace_tokenizer(), chat_template="{{ messages[0].content }}")
    assert chat(html).control_stops == ()  # </s> is also HTML


def test_held_back_text_comes_at_the_end() -> None:
    prepared = chat(stop="<end>")
    choice = Choice(prepared, 0, HOST)
    assert joined(choice.feed(TokenEvent("r", ids_of("a<e")))) == "a"
    assert choice.finish_reason is None
    assert joined(choice.feed(TokenEvent("r", finish=FinishReason.LENGTH, num_cached_tokens=2))) == "<e"
    assert (choice.text, choice.finish_reason, choice.cached_tokens, choice.finish()) == (
        "a<e",
        "length",
        2,
        [],
    )
    early = Choice(prepared, 0, HOST)
    early.feed(TokenEvent("r", (*ids_of("a<e"), 0xE4)))
    assert joined(early.finish()) == "<e\ufffd" and early.finish() == []


def test_an_error_event_is_raised() -> None:
    with pytest.raises(EngineDead):
        Choice(chat(), 0, HOST).feed(TokenEvent("r", finish=FinishReason.ERROR, error=EngineDead("gone")))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RequestError("a: b", param="a"), ("a: b", "invalid_request_error", "a", "invalid_request")),
        (PromptTooLong("long"), ("long", "invalid_request_error", None, "context_length_exceeded")),
        (Unauthorized("key"), ("key", "invalid_request_error", None, "invalid_api_key")),
        (Forbidden("no"), ("no", "permission_error", None, "forbidden")),
        (NotFound("m", param="model"), ("m", "invalid_request_error", "model", "not_found")),
        (BodyTooLarge("big"), ("big", "invalid_request_error", None, "request_too_large")),
        (Overloaded("full"), ("full", "rate_limit_error", None, "overloaded")),
        (EngineDead("gone"), ("gone", "server_error", None, "engine_unavailable")),
        (KeyError("secret"), ("internal error (KeyError)", "server_error", None, "internal_error")),
    ],
)
def test_error_bodies(error: Exception, expected: tuple[Any, ...]) -> None:
    body = build_error(error)["error"]
    assert (body["message"], body["type"], body["param"], body["code"]) == expected


def test_prompts_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="mlxrun"):
        chat(messages=[{"role": "user", "content": "a secret"}])
    assert "secret" not in caplog.text
