"""Every field of the clients is honoured, accepted without effect, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_type_hints

import pytest

from mlxrun.api.anthropic import fields as anthropic_fields
from mlxrun.api.body_schema import BodySchema, describe_values
from mlxrun.api.openai.fields import BODIES
from mlxrun.api.openai.foreign_fields import (
    CHAT_IGNORED,
    COMPLETION_IGNORED,
    REFUSED_OF_OTHER_CHATS,
    REFUSED_OF_OTHERS,
)
from mlxrun.api.openai.response import build_error
from mlxrun.api.responses.fields import BODY as RESPONSES
from mlxrun.config.settings import Config, ServerSettings
from mlxrun.core.errors import RequestError
from tests.helpers.field_examples import list_examples, set_field
from tests.helpers.openai_api import CHAT, COMPLETION, HI, TOOL, chat, complete, refused

ACCEPTED = [
    (name, value) for name, (schema, _) in BODIES["chat"].ignored.items() for value in list_examples(schema)
]


def test_both_spellings_of_the_cache_key() -> None:
    """Some clients send both."""
    assert chat(prompt_cache_key="a", promptCacheKey="a").requests[0].prompt == chat().requests[0].prompt


def test_values_in_errors_are_written_as_json() -> None:
    schema = BodySchema(
        {"size": {"enum": ["small", None]}}, {"store": ({"const": False}, "nothing is stored")}
    )
    with pytest.raises(RequestError, match=r'^size: "huge" is not one of "small"$'):
        schema.check({"size": "huge"})
    with pytest.raises(RequestError, match=r"^store: .*only false is supported \(nothing is stored\)$"):
        schema.check({"store": True})


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
        ("max_tokens", -1, "max_tokens", "minimum of"),
        ("prompt_logprobs", -1, "prompt_logprobs", "minimum of 0"),
        ("prompt_logprobs", 21, "prompt_logprobs", "maximum of 20"),
        ("prompt_logprobs", True, "prompt_logprobs", "expected integer"),
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
        ("model", 1, "model", "string"),
        ("tempature", 1, "tempature", "did you mean 'temperature'"),
        ("nonsense", {}, "nonsense", "unknown parameter"),
    ],
)
@pytest.mark.parametrize("url", [CHAT, COMPLETION])
def test_bad_fields_are_named(url: str, field: str, value: Any, param: str, words: str) -> None:
    """What and where, for both endpoints."""
    error = refused(url, {"messages" if url == CHAT else "prompt": HI if url == CHAT else "hi", field: value})
    assert error.param == param
    assert str(error).startswith(f"{param}: ") and words in str(error)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
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
        ({"promptCacheKey": 3}, "promptCacheKey"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": None}, "messages"),
        *(({name: 7}, name) for name in BODIES["chat"].refused),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"length_penalty": 1.1}, "length_penalty"),
        ({"top_a": 0.2}, "top_a"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"plugins": [{"id": "web"}]}, "plugins"),
        ({"verbosity": 1}, "verbosity"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"echo": True}, "echo"),
    ],
)
def test_bad_chat_fields_are_named(fields: Mapping[str, Any], param: str) -> None:
    """What cannot be honoured is refused, never ignored."""
    error = refused(CHAT, {"messages": HI, **fields})
    assert error.param == param
    assert build_error(error)["error"]["param"] == param


STRICT = Config(server=ServerSettings(strict_fields=True))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"priority": 1}, "priority"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"store": True}, "store"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"reasoning_effort": "none"}, "reasoning_effort"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"enable_thinking": False}, "enable_thinking"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        ({"messages": [{**HI[0], "id": "x"}]}, "messages[0].id"),
        *(({name: {}}, name) for name in BODIES["chat"].refused),
        *((set_field({}, name, value), name) for name, value in ACCEPTED if "." not in name),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
def test_what_has_no_effect_is_refused_if_strict(fields: Mapping[str, Any], param: str) -> None:
    """With server.strict_fields; but values that are always accepted are accepted then too."""
    body = {"messages": HI, "stream": True, **fields}
    always = BODIES["chat"].harmless.get(param)
    if always is not None and fields[param] in list_examples(always[0]):
        assert BODIES["chat"].check(body, strict=True)
    else:
        assert refused(CHAT, body, config=STRICT, stream=True).param == param


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
        ({"echo": True, "logprobs": 1, "suffix": "x"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2}, "best_of"),
        ({"tools": [TOOL]}, "tools"),
    ],
)
def test_bad_completion_fields_are_named(fields: Mapping[str, Any], param: str) -> None:
    assert refused(COMPLETION, {"prompt": "hi", **fields}).param == param


def list_fields_of_clients() -> dict[str, tuple[set[str], BodySchema]]:
    """The top-level fields that the types of the SDKs have, and the table that classifies them."""
    from anthropic.types import message_count_tokens_params, message_create_params
    from anthropic.types.beta import message_count_tokens_params as beta_count
    from anthropic.types.beta import message_create_params as beta_messages
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_params
    from openai.types.responses import response_create_params

    def names(cls: type) -> set[str]:
        return set(get_type_hints(cls))

    return {
        "openai chat": (names(chat_params.CompletionCreateParamsStreaming), BODIES["chat"]),
        "openai completions": (
            names(completion_create_params.CompletionCreateParamsStreaming),
            BODIES["completion"],
        ),
        "openai responses": (names(response_create_params.ResponseCreateParamsStreaming), RESPONSES),
        "anthropic": (names(message_create_params.MessageCreateParamsStreaming), anthropic_fields.BODY),
        "anthropic count": (
            names(message_count_tokens_params.MessageCountTokensParams),
            anthropic_fields.COUNT_BODY,
        ),
        "anthropic beta": (names(beta_messages.MessageCreateParamsStreaming), anthropic_fields.BODY),
        "anthropic beta count": (
            names(beta_count.MessageCountTokensParams),
            anthropic_fields.COUNT_BODY,
        ),
        "litellm": (set(LITELLM), BODIES["chat"]),
        "vllm chat": (set(VLLM_CHAT), BODIES["chat"]),
        "sglang chat": (set(SGLANG_CHAT), BODIES["chat"]),
        "openrouter": (set(OPENROUTER), BODIES["chat"]),
    }


# Of LiteLLM's constants, the protocols of vLLM and SGLang and OpenRouter's documentation, without OpenAI's.
LITELLM = (
    *("additional_drop_params", "allowed_openai_params", "api_version", "context_management"),
    *("custom_llm_provider", "drop_params", "extra_headers", "include_server_side_tool_invocations"),
    *("max_retries", "thinking"),
)
VLLM_CHAT = (
    *("reasoning_effort", "thinking_token_budget", "include_reasoning", "use_beam_search", "top_k"),
    *("min_p", "repetition_penalty", "watermarking", "length_penalty", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "min_tokens", "skip_special_tokens"),
    *("spaces_between_special_tokens", "truncate_prompt_tokens", "truncation_side", "prompt_logprobs"),
    *("logprob_token_ids", "allowed_token_ids", "bad_words", "echo", "add_generation_prompt"),
    *("continue_final_message", "add_special_tokens", "documents", "chat_template"),
    *("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs", "structured_outputs"),
    *("priority", "request_id", "session_id", "return_tokens_as_token_ids", "return_token_ids"),
    *("routed_experts_prompt_start", "return_token_offsets", "return_prompt_text", "return_mm_kwargs"),
    *("cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs", "repetition_detection"),
    *("stream_interval",),
)
SGLANG_CHAT = (
    *("return_hidden_states", "return_routed_experts", "routed_experts_start_len"),
    *("return_cached_tokens_details", "return_prompt_token_ids", "return_token_ids"),
    *("return_meta_info", "task", "top_k", "min_p", "min_tokens", "regex", "ebnf"),
    *("repetition_penalty", "stop_token_ids", "stop_regex", "no_stop_trim", "ignore_eos"),
    *("continue_final_message", "skip_special_tokens", "lora_path", "session_id", "session_params"),
    *("separate_reasoning", "stream_reasoning", "chat_template_kwargs", "max_dynamic_patch"),
    *("min_dynamic_patch", "use_audio_in_video", "images_config", "custom_logit_processor"),
    *("custom_params", "input_ids", "rid", "extra_key", "cache_salt", "ngram_corpus_id", "priority"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "routed_dp_rank"),
    *("disagg_prefill_dp_rank", "data_parallel_rank", "reasoning"),
)
OPENROUTER = (
    *("models", "provider", "plugins", "route", "transforms", "reasoning", "usage", "debug", "trace"),
    *("session_id", "cache_control", "image_config", "top_k", "top_a", "min_p", "repetition_penalty"),
    *("include_reasoning", "verbosity", "preset"),
)


@pytest.mark.parametrize("client", list(list_fields_of_clients()))
def test_every_field_of_the_clients_has_one_treatment(client: str) -> None:
    """None is unknown: it is honoured, or accepted with some values, or refused with a reason."""
    names, body = list_fields_of_clients()[client]
    unclassified = names - body.honoured.keys() - body.harmless.keys() - body.ignored.keys()
    assert unclassified - body.refused.keys() == set()
    assert "response_formt" not in {*body.honoured, *body.ignored, *body.harmless, *body.refused}
    for name in names & body.honoured.keys():
        assert name not in {*body.harmless, *body.ignored, *body.refused}, name


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


OTHER: dict[str, Any] = {  # a value of another kind than those that are accepted
    "boolean": "yes",
    "string": 1,
    "integer": "1",
    "number": "1",
    "array": {"x": 1},
    "object": "x",
    "string or array": 1,
}
CASES = [
    *((CHAT, name, schema) for name, (schema, _) in CHAT_IGNORED.items()),
    *((COMPLETION, name, schema) for name, (schema, _) in COMPLETION_IGNORED.items()),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_other_values_are_refused(case: int) -> None:
    url, name, schema = CASES[case]
    values = describe_values(schema)
    if values == "any value":
        return
    base = {"messages": HI} if url == CHAT else {"prompt": "hi"}
    body = {**base, "stream": True, **set_field({}, name, OTHER.get(values, ["another", 9]))}
    assert refused(url, body, stream=True).param == name


@pytest.mark.parametrize("name", [*REFUSED_OF_OTHERS, *REFUSED_OF_OTHER_CHATS])
def test_what_would_change_the_answer_is_refused(name: str) -> None:
    error = refused(CHAT, {"messages": HI, name: "x"})
    assert error.param == name and REFUSED_OF_OTHER_CHATS[name] in str(error)


@pytest.mark.parametrize("strict", [False, True])
def test_null_is_not_given_in_an_object_of_known_fields(strict: bool) -> None:
    thinking = {"type": "enabled", "budget_tokens": None, "clear_thinking": None}
    body = {"messages": [], "thinking": thinking, "stream_options": {"include_usage": None}}
    found = BODIES["chat"].check(body, strict=strict)
    assert found == {"messages": [], "thinking": {"type": "enabled"}, "stream_options": {}}


def test_null_is_not_given() -> None:
    assert chat(**dict.fromkeys([*REFUSED_OF_OTHER_CHATS, "use_beam_search"])).requests
    assert complete(**dict.fromkeys(REFUSED_OF_OTHERS)).requests
