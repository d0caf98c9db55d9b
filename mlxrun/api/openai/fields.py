"""The fields of OpenAI's chat/completions and completions, and of vLLM's tokenize and detokenize. Ranges are
OpenAI's where it has the field."""

from __future__ import annotations

from typing import Literal

from mlxrun.api.body_schema import BodySchema, Schema

RequestKind = Literal["chat", "completion"]
URLS: dict[str, RequestKind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}

MAX_ENTRIES = 1024  # most entries where each is checked
_BOOL: Schema = {"type": "boolean"}
_STRING: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_ANY: Schema = {}
_COUNT: Schema = {"type": "integer", "minimum": 1}
_PENALTY: Schema = {"type": "number", "minimum": -2, "maximum": 2}
_TOP: Schema = {"type": "integer", "minimum": 0, "maximum": 20}

# Honoured by both endpoints. The last seven are not OpenAI's.
_COMMON: dict[str, Schema] = {
    "model": _STRING,
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "logit_bias": {
        "type": "object",
        "maxProperties": MAX_ENTRIES,
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "seed": {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
    "max_tokens": _COUNT,
    "n": {"type": "integer", "minimum": 1, "maximum": 128},
    "stop": _ANY,
    "stream": _BOOL,
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": _BOOL, "include_obfuscation": {"const": False}},
        "additionalProperties": False,
    },
    "top_k": {"type": "integer", "minimum": -1},
    "min_p": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    "repetition_penalty": {"type": "number", "minimum": 0.01, "maximum": 10},
    "structured_outputs": _OBJECT,
    "guided_json": _ANY,
    "guided_regex": _STRING,
    "guided_choice": _ANY,
    "guided_grammar": _STRING,
    "stop_token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_ENTRIES},
    "ignore_eos": _BOOL,
    "priority": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    "user": _STRING,
}
HONOURED: dict[RequestKind, dict[str, Schema]] = {
    "chat": _COMMON
    | {
        "messages": _ANY,
        "tools": {"type": "array", "maxItems": 1024},
        "tool_choice": _ANY,
        "max_completion_tokens": _COUNT,
        "logprobs": _BOOL,
        "top_logprobs": _TOP,
        "reasoning_effort": _STRING,
        "thinking_budget": {"type": "integer", "minimum": 0},
        "thinking_token_budget": {"type": "integer", "minimum": 0},  # the same, as vLLM calls it
        "chat_template_kwargs": _OBJECT,
        "parallel_tool_calls": _BOOL,
        "response_format": {"type": "object", "required": ["type"]},
        "add_generation_prompt": _BOOL,  # vLLM's pair: see prefill.py
        "continue_final_message": _BOOL,
    },
    "completion": _COMMON | {"prompt": _ANY, "echo": _BOOL, "logprobs": _TOP},
}

# Accepted because the given values change nothing in the answer: values, and why.
_HARMLESS: dict[str, tuple[Schema, str]] = {
    "skip_special_tokens": ({"const": True}, "special tokens are no text"),
    "include_stop_str_in_output": ({"const": False}, "stop strings are no part of an answer"),
}
HARMLESS: dict[RequestKind, dict[str, tuple[Schema, str]]] = {
    "chat": _HARMLESS
    | {
        "include_reasoning": ({"const": True}, "thoughts are part of the answer"),
        "add_special_tokens": ({"const": False}, "the chat template writes them"),
        "metadata": (_OBJECT, "labels for a dashboard"),
        "safety_identifier": (_STRING, "names the end user"),
        "prompt_cache_key": (_STRING, "a hint; prefixes are found by their tokens"),
        "promptCacheKey": (_STRING, "the same, as some clients spell it"),
        "store": ({"const": False}, "nothing is stored"),
        "service_tier": ({"enum": ["auto", "default"]}, "there is one tier"),
        "modalities": ({"const": ["text"]}, "answers are text"),
    },
    "completion": _HARMLESS
    | {
        "best_of": ({"const": 1}, "one answer is the best of one"),
        "add_special_tokens": ({"const": True}, "a text gets those that the tokenizer puts around it"),
    },
}

# Known fields that are refused whatever they hold, and why.
_REFUSED = {  # of vLLM's fields
    "allowed_token_ids": "use structured_outputs",
    "bad_words": "use logit_bias",
    "cache_salt": "prefixes are found by their tokens",
    "guided_decoding_backend": "there is one",
    "guided_whitespace_pattern": "white space is where JSON has it",
    "length_penalty": "answers are drawn, not searched",
    "logits_processors": "no code is run",
    "min_tokens": "an answer ends where the model ends it; see ignore_eos",
    "mm_processor_kwargs": "how images are seen is the model's",
    "prompt_logprobs": "prompts are not scored",
    "request_id": "ids are given here",
    "return_token_ids": "answers are text; see /tokenize",
    "return_tokens_as_token_ids": "answers are text; see /tokenize",
    "spaces_between_special_tokens": "special tokens are no text",
    "truncate_prompt_tokens": "a prompt that does not fit is refused, not cut",
    "use_beam_search": "answers are drawn, not searched",
}
REFUSED: dict[RequestKind, dict[str, str]] = {
    "chat": _REFUSED
    | {
        "audio": "answers are text",
        "chat_template": "it is a setting of the config",
        "documents": "say them in a message",
        "function_call": "deprecated; use tool_choice",
        "functions": "deprecated; use tools",
        "moderation": "there is no moderation model",
        "prediction": "predicted outputs",
        "prompt_cache_options": "prefixes are found by their tokens",
        "prompt_cache_retention": "how long prefixes are kept is a setting of the config",
        "verbosity": "say in the prompt how long the answer should be",
        "web_search_options": "there is no web search",
    },
    "completion": _REFUSED | {"suffix": "text is only continued at its end"},
}

_URL = {of: url for url, of in URLS.items()}
BODIES: dict[RequestKind, BodySchema] = {
    of: BodySchema(
        HONOURED[of],
        HARMLESS[of],
        REFUSED[of],
        {name: _URL[other] for other in HONOURED if other != of for name in HONOURED[other]},
    )
    for of in HONOURED
}

# Counting: a prompt as the engine would get it, and back.
TOKENIZE = BodySchema(
    {
        "model": _STRING,
        "prompt": _STRING,
        "add_special_tokens": _BOOL,
        "return_token_strs": _BOOL,
        **{
            name: HONOURED["chat"][name]
            for name in (
                *("messages", "tools", "reasoning_effort", "chat_template_kwargs"),
                *("add_generation_prompt", "continue_final_message"),
            )
        },
        "tool_choice": {"enum": ["auto", "none"]},
    },
)
DETOKENIZE = BodySchema({"model": _STRING, "tokens": {"type": "array"}})  # a million tokens are checked elsewhere
