"""Ollama's bodies become bodies of OpenAI's with the same prompts, and errors name Ollama's fields."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from mlxrun.api.ollama.fields import CHAT_PATH, EMBED_PATH, GENERATE_PATH, OLD_EMBED_PATH
from mlxrun.api.ollama.request import (
    OllamaMessages,
    OllamaRequest,
    check_model,
    prepare_answer,
    prepare_embeddings,
    read_ollama_request,
)
from mlxrun.api.prepared import ApiContext, PreparedRequest
from mlxrun.api.text import ignored_fields
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.api.text.raw_prompts import FORMATS
from mlxrun.config.settings import Config, SamplingSettings
from mlxrun.core.errors import NotFound, RequestError
from mlxrun.core.request import LoraAdapter, PooledModel
from tests.helpers.infill_models import make_infill_model
from tests.helpers.openai_api import chat, complete, image_part
from tests.helpers.tokenizers import THINKING, TOOLS, FakeModelInfo

HI = [{"role": "user", "content": "hi"}]
TEXT, EYES = FakeModelInfo(), FakeModelInfo(vision=True)
PNG = image_part("red")["image_url"]["url"].partition(",")[2]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def make_context(model_info: FakeModelInfo = TEXT, config: Config | None = None) -> ApiContext:
    config = config or Config()
    return ApiContext(model_info, config, MediaLoader(config.media, None))


def read(path: str = CHAT_PATH, model_info: FakeModelInfo = TEXT, **fields: Any) -> OllamaRequest:
    body = {"model": "m", **({"messages": HI} if path == CHAT_PATH else {"prompt": "hi"}), **fields}
    return read_ollama_request(path, body, make_context(model_info))


def prepare(
    path: str = CHAT_PATH, model_info: FakeModelInfo = TEXT, config: Config | None = None, **fields: Any
) -> PreparedRequest:
    body = {"model": "m", **({"messages": HI} if path == CHAT_PATH else {"prompt": "hi"}), **fields}
    found = asyncio.run(prepare_answer(path, body, make_context(model_info, config)))
    assert found is not None
    return found


def refuse(path: str = CHAT_PATH, model_info: FakeModelInfo = TEXT, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        prepare(path, model_info, **fields)
    return caught.value


def test_a_chat_has_the_prompt_of_the_chat_endpoint() -> None:
    assert prepare().prompts == chat().prompts
    assert prepare(messages=[{"role": "user", "content": "ho"}]).prompts != chat().prompts


def test_a_prompt_is_the_users_message() -> None:
    """With the system message before it; empty texts, as Ollama's Python client sends, count as not given."""
    messages = [{"role": "system", "content": "be brief"}, *HI]
    given = {"system": "be brief", "suffix": "", "template": "", "context": []}
    assert prepare(GENERATE_PATH, **given).prompts == chat(messages=messages).prompts
    assert prepare(GENERATE_PATH, system="").prompts == chat().prompts


def test_images_reach_the_model() -> None:
    message = {"role": "user", "content": "what?", "images": [PNG]}
    parts = [image_part("red"), {"type": "text", "text": "what?"}]
    expected = chat(EYES, messages=[{"role": "user", "content": parts}])
    for found in (
        prepare(model_info=EYES, messages=[message]),
        prepare(GENERATE_PATH, EYES, prompt="what?", images=[PNG]),
    ):
        assert found.prompts == expected.prompts
        assert found.requests[0].media == expected.requests[0].media == ((255, 0, 0),)


def test_a_raw_prompt_has_no_template() -> None:
    found = prepare(GENERATE_PATH, raw=True, logprobs=True, top_logprobs=2)
    assert found.kind == "completion" and found.requests[0].prompt == complete().requests[0].prompt
    assert found.requests[0].params.logprobs == 2


def test_a_model_without_a_template_gets_the_prompt_as_it_is() -> None:
    base = FakeModelInfo(chat_template=None)
    assert prepare(GENERATE_PATH, base).requests[0].prompt == complete().requests[0].prompt
    assert "chat template" in str(refuse(GENERATE_PATH, base, system="be brief"))


def test_a_suffix_asks_for_the_text_between() -> None:
    coder = make_infill_model(FORMATS["starcoder, granite-code, stable-code, smollm"])
    expected = complete(coder, prompt="def f(", suffix="return x")
    found = prepare(GENERATE_PATH, coder, prompt="def f(", suffix="return x")
    assert found.requests[0].prompt == expected.requests[0].prompt
    assert refuse(GENERATE_PATH, suffix="return x").param == "suffix"
    for name, value in (("system", "be brief"), ("images", [PNG])):
        error = refuse(GENERATE_PATH, coder, suffix="x", **{name: value})
        assert error.param == name and "not together with suffix" in str(error)


def test_options_are_sampling_parameters() -> None:
    options = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 7,
        "num_predict": 12,
        "stop": ["x", "y"],
        "repeat_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
    }
    found = prepare(options=options)
    params = found.requests[0].params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.5, 0.9, 5, 0.1)
    assert (params.seed, params.max_tokens, found.stops) == (7, 12, ("x", "y"))
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    assert penalties == (1.5, 0.25, 0.75)


def test_num_predict_is_an_upper_limit() -> None:
    """More than fits into the context is lowered, and comes before the config's; -1 and 0 set no limit."""
    config = Config(sampling=SamplingSettings(max_tokens=50))
    limits = [
        prepare(config=config, options={"num_predict": n}).requests[0].params.max_tokens
        for n in (100_000, 60, 3, 0, -1, -2)
    ]
    assert limits == [TEXT.context_length - len(chat().requests[0].prompt), 60, 3, 50, 50, 50]


def test_a_seed_of_minus_one_is_random() -> None:
    assert len({prepare(options={"seed": -1}).seed for _ in range(3)}) == 3
    assert {prepare(options={"seed": 0}).seed for _ in range(3)} == {0}


def test_an_option_without_effect_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ignored_fields, "logged_fields", set())
    caplog.set_level(logging.INFO)
    read(options={"num_ctx": 8192}, keep_alive="5m")
    assert "'options.num_ctx'" in caplog.text and "'keep_alive'" in caplog.text


@pytest.mark.parametrize("path", [CHAT_PATH, GENERATE_PATH])
def test_a_format_is_a_response_format(path: str) -> None:
    assert read(path, format="json").translated["response_format"] == {"type": "json_object"}
    assert read(path, format=SCHEMA).translated["response_format"]["json_schema"]["schema"] == SCHEMA
    assert "response_format" not in read(path, format="").translated
    assert prepare(path, format=SCHEMA).requests[0].grammar is not None
    assert prepare(path).requests[0].grammar is None
    assert refuse(path, format="yaml").param == "format"
    assert refuse(path, format={"type": "nothing"}).param == "format.type"


def test_a_raw_prompt_has_a_format_too() -> None:
    for wanted in ("json", SCHEMA):
        assert prepare(GENERATE_PATH, raw=True, format=wanted).requests[0].grammar is not None
    assert refuse(GENERATE_PATH, raw=True, format={"type": "nothing"}).param == "format.type"


def test_think_switches_reasoning() -> None:
    model_info = FakeModelInfo(chat_template=THINKING)
    prompts = {think: prepare(model_info=model_info, think=think).prompts for think in (True, False, "high")}
    assert prompts[True] == prompts["high"] != prompts[False]
    assert prompts[False] == chat(model_info, enable_thinking=False).prompts
    assert read(think="max").translated["reasoning_effort"] == "high"
    assert prepare(think=True).prompts == chat().prompts, "a template without a switch takes it as a hint"


def test_tools_may_lack_their_type() -> None:
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    model_info = FakeModelInfo(chat_template=TOOLS)
    tool = {"type": "function", "function": function}
    found = [prepare(model_info=model_info, tools=[each]) for each in (tool, {"function": function})]
    assert found[0].prompts == found[1].prompts == chat(model_info, tools=[tool]).prompts


def test_calls_and_results_are_those_of_a_chat() -> None:
    model_info = FakeModelInfo(chat_template=TOOLS)
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    ours = [*HI, {"role": "assistant", "content": "", "tool_calls": [call]}]
    ours.append({"role": "tool", "tool_name": "f", "content": "2"})
    theirs = [*HI, {"role": "assistant", "tool_calls": [{**call, "id": "c", "type": "function"}]}]
    theirs.append({"role": "tool", "tool_call_id": "c", "name": "f", "content": "2"})
    assert prepare(model_info=model_info, messages=ours).prompts == chat(model_info, messages=theirs).prompts


def test_without_a_prompt_the_model_is_loaded() -> None:
    for path, fields in (
        (CHAT_PATH, {"messages": []}),
        (GENERATE_PATH, {"prompt": ""}),
        (GENERATE_PATH, {"prompt": "", "raw": True, "keep_alive": 0}),
    ):
        body = {"model": "m", **fields}
        assert asyncio.run(prepare_answer(path, body, make_context())) is None
        assert asyncio.run(prepare_answer(path, {"model": "m"}, make_context())) is None


def test_answers_are_streamed_unless_the_client_says_no() -> None:
    assert prepare().stream and prepare(GENERATE_PATH, raw=True).stream
    assert not prepare(stream=False).stream


def test_names_with_and_without_a_tag() -> None:
    named = FakeModelInfo(name="qwen3", names=("qwen3:8b", "own"), aliases=("./path",))
    assert check_model("qwen3", named) == check_model("qwen3:latest", named) == "qwen3"
    assert check_model("qwen3:8b", named) == "qwen3:8b" and check_model("./path:latest", named) == "./path"
    assert check_model("anything:latest", TEXT) == "anything"
    for name in ("other", "own:8b"):
        with pytest.raises(NotFound, match="is not served"):
            check_model(name, named)
    for missing in (None, ""):
        with pytest.raises(RequestError, match="model: is required"):
            check_model(missing, named)


def test_a_tag_may_name_an_adapter() -> None:
    adapted = FakeModelInfo(name="qwen3", adapters=(LoraAdapter("latest", "0"), LoraAdapter("sql", "1")))
    assert check_model("qwen3:latest", adapted) == "qwen3:latest"
    assert check_model("qwen3:sql", adapted) == "qwen3:sql"


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT_PATH, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (CHAT_PATH, {"messages": [*HI, {"role": "user", "images": ["%"]}]}, "messages[1].images[0]"),
        (CHAT_PATH, {"messages": [{"role": "system", "images": [PNG]}]}, "messages[0].images[0]"),
        (GENERATE_PATH, {"images": [PNG, "%"]}, "images[1]"),
        (GENERATE_PATH, {"system": "x", "prompt": "<|image_pad|>"}, "prompt"),
        (GENERATE_PATH, {"system": "<|image_pad|>"}, "system"),
        (CHAT_PATH, {"options": {"stop": [""]}}, "options.stop[0]"),
        (CHAT_PATH, {"top_logprobs": 2}, "top_logprobs"),
        (CHAT_PATH, {"tools": [{"function": {}}]}, "tools[0].function.name"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "long " * 9000}]}, None),
    ],
)
def test_errors_name_ollamas_fields(path: str, fields: dict[str, Any], param: str | None) -> None:
    error = refuse(path, EYES, **fields)
    assert error.param == param and (param is None or str(error).startswith(f"{param}:"))


def test_texts_to_embed() -> None:
    pooled = PooledModel("embed", 4, 16)
    model_info = FakeModelInfo(pooled=pooled, chat_template=None)

    def embed(path: str, **fields: Any) -> Any:
        return asyncio.run(prepare_embeddings(path, {"model": "m", **fields}, make_context(model_info)))

    assert len(embed(EMBED_PATH, input=["a", "b"], dimensions=0).prepared.requests) == 2
    assert len(embed(OLD_EMBED_PATH, prompt="a").prepared.requests) == 1
    for path, fields in ((EMBED_PATH, {}), (EMBED_PATH, {"input": []}), (OLD_EMBED_PATH, {"prompt": ""})):
        assert embed(path, **fields) is None
    long = "word " * 40
    assert len(embed(EMBED_PATH, input=long).prepared.requests[0].prompt) == pooled.max_tokens
    for path, fields, param in (
        (EMBED_PATH, {"input": long, "truncate": False}, "input"),
        (EMBED_PATH, {"input": ["a", 5]}, "input[1]"),
        (EMBED_PATH, {"input": "a", "dimensions": 5}, "dimensions"),
        (OLD_EMBED_PATH, {"prompt": long}, "prompt"),
    ):
        with pytest.raises(RequestError) as caught:
            embed(path, **fields)
        assert caught.value.param == param
    with pytest.raises(RequestError, match="model.pooling"):
        asyncio.run(prepare_embeddings(EMBED_PATH, {"model": "m", "input": "a"}, make_context()))


def translate(*messages: Any) -> OllamaMessages:
    found = OllamaMessages()
    for i, message in enumerate(messages):
        found.add(message, f"messages[{i}]")
    return found


def call(name: str, **fields: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {"a": 1}}, **fields}


def result(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **fields}


def list_ids(*messages: Any) -> list[str]:
    """The ids that the results got."""
    made = translate(*messages).messages
    return [message["tool_call_id"] for message in made if message["role"] == "tool"]


def test_images_go_before_the_text() -> None:
    found = translate({"role": "USER", "content": "what?", "images": ["AAAA", "BB\r\nBB"]})
    urls = [f"data:image/png;base64,{data}" for data in ("AAAA", "BBBB")]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    parts.append({"type": "text", "text": "what?"})
    assert found.messages == [{"role": "user", "content": parts}]
    assert found.sources["messages[0].content[1].image_url.url"] == "messages[0].images[1]"
    assert found.sources["messages[0].content[2].text"] == "messages[0].content"


def test_content_may_be_missing() -> None:
    assert translate({"role": "user", "images": []}).messages == [{"role": "user", "content": ""}]


def test_results_find_their_calls() -> None:
    """By name first, in the order of the calls else; a call has one result."""
    calls = {"role": "assistant", "content": "", "tool_calls": [call("f"), call("g"), call("f")]}
    named = (result("1", tool_name="g"), result("2", tool_name="f"), result("3", tool_name="f"))
    assert list_ids(calls, *named) == ["call00002", "call00001", "call00003"]
    assert list_ids(calls, result("1"), result("2"), result("3")) == ["call00001", "call00002", "call00003"]


def test_ids_that_are_given_are_kept() -> None:
    calls = {"role": "assistant", "tool_calls": [call("f", id="mine"), call("f")]}
    assert list_ids(calls, result("1"), result("2")) == ["mine", "call00002"]
    assert list_ids(calls, result("1", tool_call_id="mine"), result("2")) == ["mine", "call00002"]


def test_a_result_without_a_call_has_an_id() -> None:
    assert list_ids(result("1")) == ["call00000"]


def test_the_name_of_the_tool_and_the_calls_index() -> None:
    calls = {"role": "assistant", "tool_calls": [{"function": {"index": 3, "name": "f", "arguments": {}}}]}
    made = translate(calls, result("1", tool_name="f")).messages
    assert made[0]["tool_calls"] == [{"id": "call00001", "function": {"name": "f", "arguments": {}}}]
    assert made[1] == {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "1"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (7, "messages[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content"),
        ({"role": "user", "images": "AAAA"}, "messages[0].images"),
        ({"role": "user", "images": ["AAAA", 5]}, "messages[0].images[1]"),
        ({"role": "tool", "content": "1", "tool_name": 5}, "messages[0].tool_name"),
    ],
)
def test_a_wrong_type_is_named(message: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        translate(message)
    assert caught.value.param == param
