"""The grammars of request bodies, with the embedded model's tokenizer, template and formats."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import jsonschema
import pytest

from mlxrun.api.choice import Choice
from mlxrun.api.openai import request as chat_request
from mlxrun.api.openai.request import prepare_request
from mlxrun.api.parsers.registry import detect_formats
from mlxrun.api.prepared import ApiContext, PreparedRequest
from mlxrun.api.structured.response_format import is_large_grammar
from mlxrun.api.structured.thinking_budget import ThinkingBudget
from mlxrun.api.text.media.images import MediaLoader
from mlxrun.config.settings import Config, ModelSettings
from mlxrun.core.errors import RequestError
from mlxrun.core.request import Grammar
from mlxrun.core.workers import Lane
from mlxrun.engine.client import EngineClient
from mlxrun.model.load.model_info import load_model_info

pytestmark = pytest.mark.usefixtures("probed_once")

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["age"],
    "additionalProperties": False,
}


THINK = {"chat_template_kwargs": {"enable_thinking": True}}
UNTHINK = {"chat_template_kwargs": {"enable_thinking": False}}


def tool(name: str, key: str = "age", **more: Any) -> dict[str, Any]:
    parameters = {**AGE, "properties": {key: AGE["properties"]["age"]}, "required": [key]}  # type: ignore[index]
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@cache
def get_context() -> ApiContext:
    config = Config()
    model = load_model_info(config.model)
    return ApiContext(
        model,
        config,
        MediaLoader(config.media, None),
        detect_formats(model.chat_template, model.tokenizer, config.parsers),
    )


def prepare(url: str = CHAT, context: ApiContext | None = None, **fields: Any) -> PreparedRequest:
    of = {"messages": [{"role": "user", "content": "Hi"}]} if url == CHAT else {"prompt": "Hi"}
    return asyncio.run(prepare_request(url, {**of, "max_tokens": 60, **fields}, context or get_context()))


def allows(grammar: Grammar | None, text: str) -> str | None:
    """None if an answer may be `text` and end there, else the part of it that may not come, or "end"."""
    assert grammar is not None
    model: Any = get_context().model_info
    row = grammar.start((), model.eos_ids)
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    for at, token in enumerate((*ids, *sorted(model.eos_ids)[:1])):
        mask = row.mask()
        if token // 8 >= len(mask) or not mask[token // 8] >> token % 8 & 1:
            return model.tokenizer.decode(ids[at:]) or "end"
        row.accept(token)
    return None


AGE_FORMAT = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "age", "schema": AGE, "strict": True}}
}


@pytest.mark.parametrize(
    ("fields", "right", "wrong"),
    [
        (
            AGE_FORMAT,
            ['{"age": 5}', '{"age":150}'],
            ['{"age": 151}', '{"age": "5"}', "5", "", '{"age": 5} so'],
        ),
        ({"structured_outputs": {"json": AGE}}, ['{"age": 5}'], ['{"age": -1}']),
        ({"guided_json": AGE}, ['{"age": 5}'], ["[]"]),
        ({"response_format": {"type": "json_object"}}, ["{}", '{"a": [1]}'], ["[1]", "no"]),
        ({"guided_regex": "[ab]{2}c?"}, ["ab", "bac"], ["a", "abcc"]),
        ({"guided_choice": ["yes", "no"]}, ["yes", "no"], ["y", "yess", "maybe"]),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "y" root'}}, ["x", "yyx"], ["y", "z"]),
    ],
)
def test_formats_of_the_text(fields: Mapping[str, Any], right: list[str], wrong: list[str]) -> None:
    for url in (CHAT, COMPLETION) if "response_format" not in fields else (CHAT,):
        (request,) = prepare(url, **fields).requests
        assert [allows(request.grammar, text) for text in right] == [None] * len(right)
        assert all(allows(request.grammar, text) is not None for text in wrong)


def test_without_a_response_format_the_answer_is_free() -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"tools": [tool("f")]}, {"guided_json": None}):
        assert prepare(**fields).requests[0].grammar is None
    assert (
        prepare().control_stops and not prepare(**AGE_FORMAT).control_stops
    )  # which could cut inside a JSON string
    assert (
        prepare(thinking_budget=5).control_stops
        and not prepare(thinking_budget=5, **AGE_FORMAT).control_stops
    )


LONG_TOOLS = [{"type": "function", "function": {"name": f"f{i}", "parameters": AGE}} for i in range(100)]
STRICT_TOOLS = [tool(f"f{i}", strict=True) for i in range(100)]


@pytest.mark.parametrize(
    ("fields", "is_large"),
    [
        ({}, False),
        (AGE_FORMAT, False),
        ({"tools": LONG_TOOLS}, False),  # they are free
        ({"tools": LONG_TOOLS, "tool_choice": "required"}, True),
        ({"tools": LONG_TOOLS, "response_format": {"type": "json_object"}}, True),
        ({"tools": STRICT_TOOLS}, True),
        ({"tools": STRICT_TOOLS[:3]}, False),
        ({"guided_choice": [f"{i}" for i in range(2000)]}, True),
        ({"guided_regex": "a" * 200_000}, True),
        ({"structured_outputs": {"json": {"enum": list(range(2000))}}}, True),
    ],
)
def test_which_grammars_are_large(fields: dict[str, Any], is_large: bool) -> None:
    assert is_large_grammar(fields, fields.get("tools", [])) == is_large


def test_large_grammars_have_a_lane_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []

    class CountedLane(Lane):
        async def run(self, function: Any, *args: Any, **kwargs: Any) -> Any:
            runs.append(function)
            return await super().run(function, *args, **kwargs)

    monkeypatch.setattr(chat_request, "GRAMMARS", CountedLane("test", 1))
    prepare()
    assert allows(prepare(**AGE_FORMAT).requests[0].grammar, '{"age": 5}') is None
    assert runs == []
    grammar = prepare(guided_choice=[f"{i}" for i in range(2000)]).requests[0].grammar
    assert allows(grammar, "1234") is None and len(runs) == 1


def test_a_required_call_is_one_of_the_tools() -> None:
    grammar = prepare(tools=[tool("f"), tool("g", "size")], tool_choice="required").requests[0].grammar
    assert allows(grammar, call("f", '{"age": 5}')) is None
    assert allows(grammar, call("g", '{"size": 5}')) is None
    both = call("f", '{"age": 5}') + "\n" + call("g", '{"size": 5}')
    assert allows(grammar, both) is None
    for text in ("no", call("h", "{}"), call("g", '{"age": 5}'), call("f", '{"age": "5"}'), ""):
        assert allows(grammar, text) is not None
    alone = prepare(tools=[tool("f")], tool_choice="required", parallel_tool_calls=False).requests[0].grammar
    assert allows(alone, both) is not None


def test_a_named_call_is_that_tool() -> None:
    choice = {"type": "function", "function": {"name": "g"}}
    grammar = prepare(tools=[tool("f"), tool("g")], tool_choice=choice).requests[0].grammar
    assert allows(grammar, call("g", '{"age": 5}')) is None
    assert allows(grammar, call("f", '{"age": 5}')) is not None


def test_strict_tools_constrain_the_calls_and_not_the_text() -> None:
    grammar = prepare(tools=[tool("f", strict=True)]).requests[0].grammar
    for text in ("All is well.", "So: " + call("f", '{"age": 5}') + " done", "a < b"):
        assert allows(grammar, text) is None
    for text in (call("f", '{"age": "x"}'), "So: " + call("g", "{}")):
        assert allows(grammar, text) is not None


def test_json_or_a_call() -> None:
    """A schema with tools: an answer that matches it, or a call instead."""
    grammar = prepare(tools=[tool("f", "size")], **AGE_FORMAT).requests[0].grammar
    assert allows(grammar, '{"age": 5}') is None and allows(grammar, call("f", '{"size": 5}')) is None
    assert allows(grammar, "Hello") is not None


def test_the_format_begins_behind_the_reasoning() -> None:
    """Reasoning is free; reasoning that the template has closed does not begin again."""
    free = prepare(**AGE_FORMAT, **THINK).requests[0].grammar
    assert allows(free, '<think>\nHm, {"age"\n</think>\n\n{"age": 5}') is None
    assert allows(free, "<think>\nHm\n</think>\n\nfive") is not None
    formats = get_context().formats
    assert formats.get_reasoning_tags("<|im_start|>assistant\n<think>\n") == ("", "</think>")
    assert formats.get_reasoning_tags("<|im_start|>assistant\n<think>\n\n</think>\n\n") is None


def configured(template: str | None = None, **arguments: bool) -> ApiContext:
    """The built-in model's tokenizer with another template, or other variables for it in the config."""
    config = Config(model=ModelSettings(chat_template_args=arguments))
    model = (
        get_context().model_info
        if template is None
        else dataclasses.replace(get_context().model_info, chat_template=template)
    )  # type: ignore[type-var]
    return ApiContext(model, config, get_context().media_loader, get_context().formats)


CHOICE = {"guided_choice": ["yes", "no"]}
ALWAYS = "{{ messages[0].content }}{% if enable_thinking is defined and not enable_thinking %}.{% endif %}"
BROKEN = ALWAYS + "{% if messages[0].content == 'x' %}{{ raise_exception('no') }}{% endif %}"


@pytest.mark.parametrize("forced", [CHOICE, AGE_FORMAT, {"tools": [tool("f")], "tool_choice": "required"}])
@pytest.mark.parametrize(
    ("enabled", "arguments", "reasons"),
    [
        (None, {}, False),  # the template does not think by itself
        (False, {}, False),
        (True, {}, True),
        (None, {"enable_thinking": True}, True),
        (False, {"enable_thinking": True}, False),
        (True, {"enable_thinking": False}, True),
    ],
)
def test_reasoning_comes_first_only_where_it_is_requested(
    forced: Mapping[str, Any], enabled: bool | None, arguments: Mapping[str, bool], reasons: bool
) -> None:
    """By the request, else by the config, else as the template does."""
    fields = (
        dict(forced) if enabled is None else {**forced, "chat_template_kwargs": {"enable_thinking": enabled}}
    )
    texts = {"guided_choice": "yes", "response_format": '{"age": 5}', "tools": call("f", '{"age": 5}')}
    text = next(text for name, text in texts.items() if name in forced)
    (request,) = prepare(context=configured(**arguments), **fields).requests
    assert allows(request.grammar, text) is None
    assert (allows(request.grammar, f"<think>\nHm\n</think>\n\n{text}") is None) == reasons


@pytest.mark.parametrize(
    ("template", "enabled", "reasons"),
    [
        (ALWAYS, {}, True),  # another prompt with the switch off: it reasons by itself
        (ALWAYS, {"enable_thinking": False}, False),
        (ALWAYS.replace("enable_thinking", "thinking"), {"thinking": False}, False),
        (ALWAYS.replace("enable_thinking", "thinking"), {}, True),
        ("{{ messages[0].content }}{{ '.' if thinking }}", {}, False),
        ("{{ messages[0].content }}{{ '.' if thinking }}", {"thinking": True}, True),
        ("{{ messages[0].content }}", {}, True),  # without a switch it is left to the model
        (BROKEN, {}, True),  # and where nothing can be found out
    ],
)
def test_templates_that_reason_by_default(template: str, enabled: dict[str, bool], reasons: bool) -> None:
    fields = CHOICE | ({"chat_template_kwargs": enabled} if enabled else {})
    (request,) = prepare(context=configured(template), **fields).requests
    assert (allows(request.grammar, "<think>\nHm\n</think>\n\nno") is None) == reasons


@pytest.mark.parametrize("fields", [{}, {"json_schema": None}])
def test_a_schema_that_is_not_there_is_missing(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"^response_format\.json_schema: missing$") as caught:
        prepare(response_format={"type": "json_schema", **fields})
    assert (caught.value.param, caught.value.code) == ("response_format.json_schema", "missing_field")


@pytest.mark.parametrize("schema", [5, 1.5, "x", []])
@pytest.mark.parametrize("tools", [{}, {"tools": [tool("f")]}])
def test_a_schema_of_another_type_is_refused(schema: object, tools: dict[str, Any]) -> None:
    """Also where the answer may be a call instead: that ended in a 500."""
    with pytest.raises(
        RequestError, match=r"^response_format\.json_schema\.schema: expected object, got"
    ) as caught:
        prepare(
            **tools, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        )
    assert caught.value.param == "response_format.json_schema.schema"


BAD = tool("bad", parameters={"type": "x"})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {"tools": [tool("f")], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
            "tool_choice.type",
        ),
        ({"tools": [tool("f")], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
        (
            {"tools": [tool("f")], "tool_choice": "required", **AGE_FORMAT},
            "response_format.json_schema.schema",
        ),
        ({"tools": [tool("f")], "guided_regex": "a"}, "guided_regex"),
        ({"tools": [tool("f", strict=True, parameters={"type": "x"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool("f"), BAD], "tool_choice": "required"}, "tools[1].function.parameters.type"),
        (
            {"tools": [tool("f"), BAD], "tool_choice": {"type": "function", "function": {"name": "bad"}}},
            "tools[1].function.parameters.type",
        ),
        ({"tools": [tool("f"), BAD], **AGE_FORMAT}, "tools[1].function.parameters.type"),
        (
            {"tools": [tool("f"), tool("g", strict=True, parameters={"not": {}})], **AGE_FORMAT},
            "tools[1].function.parameters",
        ),
        ({"guided_json": {"type": "array", "uniqueItems": True}, "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_formats_that_cannot_be_enforced_are_rejected(fields: Mapping[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        prepare(**fields)
    assert str(caught.value.param).startswith(param)


async def answers(*bodies: Mapping[str, Any]) -> list[Choice]:
    """All at once on the built-in model."""
    client = await EngineClient.start(Config(), load_model_info(Config().model, weights=True))

    async def one(body: Mapping[str, Any]) -> Choice:
        prepared = await prepare_request(CHAT, {"max_tokens": 80, "temperature": 0, **body}, get_context())
        choice = Choice(prepared, 0, client.model_info)
        async for event in client.generate(prepared.requests[0]):
            choice.feed(event)
        return choice

    try:
        return list(await asyncio.gather(*(one(body) for body in bodies)))
    finally:
        await client.close()


async def test_formats_are_enforced_side_by_side() -> None:
    """One batch: a schema, a forced call that is not needed, a choice, reasoning first, free text."""
    asks = [
        {"messages": [{"role": "user", "content": "What is 23 + 48?"}], **AGE_FORMAT},
        {"messages": [{"role": "user", "content": "Hello"}], "tools": [tool("f")], "tool_choice": "required"},
        {"messages": [{"role": "user", "content": "Is it so?"}], **CHOICE},
        {"messages": [{"role": "user", "content": "Is it so?"}], **CHOICE, **UNTHINK},
        {
            "messages": [{"role": "user", "content": "What is 5 + 4?"}],
            "chat_template_kwargs": {"enable_thinking": True},
            **AGE_FORMAT,
        },
        {"messages": [{"role": "user", "content": "What is 23 + 48?"}]},
    ]
    schema, forced, choice, silent, reasoned, free = await answers(*asks)
    jsonschema.validate(json.loads(schema.content), AGE)
    assert forced.finish_reason == "tool_calls" and not forced.content
    assert {c.name for c in forced.calls} == {"f"}
    for each in forced.calls:
        jsonschema.validate(json.loads(each.arguments), AGE)
    assert choice.text in ("yes", "no") and silent.text in ("yes", "no")
    assert reasoned.reasoning and reasoned.reasoning_tokens > 3
    jsonschema.validate(json.loads(reasoned.content), AGE)
    assert "71" in free.content and schema.completion_tokens < 20


async def test_reasoning_is_closed_in_time() -> None:
    """`thinking_budget`, also among the template's variables, with a response format and without."""
    ask = {"messages": [{"role": "user", "content": "There are 62 people on a train. 52 get on. How many?"}]}
    think = {"chat_template_kwargs": {"enable_thinking": True}}
    inner = {"chat_template_kwargs": {"enable_thinking": True, "thinking_budget": 2}}
    bodies = [ask | think, ask | think | {"thinking_budget": 2}, ask | inner, ask | inner | AGE_FORMAT]
    free, outer, other, formed = await answers(*bodies)
    assert outer.text == other.text and "</think>" in outer.text
    assert all(
        choice.content and choice.reasoning_tokens < free.reasoning_tokens
        for choice in (outer, other, formed)
    )
    jsonschema.validate(json.loads(formed.content), AGE)


@pytest.mark.parametrize(
    ("fields", "second"),
    [
        ({"thinking_budget": 5, "chat_template_kwargs": {"thinking_budget": 5}},
         "chat_template_kwargs.thinking_budget"),
        ({"thinking_token_budget": 5, "chat_template_kwargs": {"thinking_budget": 6}},
         "chat_template_kwargs.thinking_budget"),
        ({"thinking_token_budget": 5, "thinking_budget": 5}, "thinking_token_budget"),
    ],
)  # fmt: skip
def test_an_answer_has_one_budget(fields: dict[str, Any], second: str) -> None:
    with pytest.raises(RequestError, match="not together with thinking_") as caught:
        prepare(**fields)
    assert caught.value.param == second


def test_names_of_the_budget() -> None:
    """vLLM's name, ours, and that of Qwen's clients mean the same."""
    for fields in (
        {"thinking_budget": 5},
        {"thinking_token_budget": 5},
        {"chat_template_kwargs": {"thinking_budget": 5}},
    ):
        grammar = prepare(**fields).requests[0].grammar
        assert isinstance(grammar, ThinkingBudget) and grammar.max_tokens == 5


def test_a_budget_needs_a_known_format() -> None:
    plain = ApiContext(get_context().model_info, get_context().config, get_context().media_loader)
    body = {"messages": [{"role": "user", "content": "Hi"}], "thinking_budget": 5}
    with pytest.raises(RequestError) as caught:
        asyncio.run(prepare_request(CHAT, body, plain))
    assert caught.value.param == "thinking_budget"


async def test_tools_without_a_template_for_them() -> None:
    """The tools are described in the prompt, and a forced call comes as JSON."""
    model = dataclasses.replace(
        load_model_info(Config().model),
        chat_template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    )
    config = Config()
    plain = ApiContext(
        model,
        config,
        MediaLoader(config.media, None),
        detect_formats(model.chat_template, model.tokenizer, config.parsers),
    )
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool("f")], "tool_choice": "required"}
    prepared = await prepare_request(CHAT, {**body, "max_tokens": 60}, plain)
    assert "You can call functions." in prepared.prompts[0] and '"name": "f"' in prepared.prompts[0]
    assert allows(prepared.requests[0].grammar, '{"name": "f", "arguments": {"age": 5}}') is None
    parser = prepared.make_parser(0)
    deltas = [*parser.feed('{"name": "f", "arguments": {"age": 5}}'), *parser.finish()]
    assert [delta.kind for delta in deltas] == ["call"] and deltas[0].name == "f"
