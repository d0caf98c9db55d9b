"""The fields of OpenAI's chat/completions and completions, and of vLLM's tokenize and detokenize.

Ranges are OpenAI's if it has the field. foreign_fields.py has the fields that mean nothing here.
"""

from __future__ import annotations

from mlxrun.api.body_schema import (
    ANY,
    BOOL,
    LIST,
    OBJECT,
    STRING,
    TOOLS,
    Accepted,
    BodySchema,
    Schema,
    object_of,
)
from mlxrun.api.openai.foreign_fields import (
    CHAT_IGNORED,
    COMPLETION_IGNORED,
    REFUSED_OF_OTHER_CHATS,
    REFUSED_OF_OTHERS,
)
from mlxrun.api.prepared import RequestKind

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
URLS: dict[str, RequestKind] = {CHAT_URL: "chat", COMPLETION_URL: "completion"}

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # of reasoning, OpenAI's
MAX_ENTRIES = 1024  # of a list of which each entry is checked
_COUNT: Schema = {"type": "integer", "minimum": 1}
_PENALTY: Schema = {"type": "number", "minimum": -2, "maximum": 2}
_TOP: Schema = {"type": "integer", "minimum": 0, "maximum": 20}

# Honoured by both endpoints. Those from top_k on are not OpenAI's, except `user`.
_COMMON: dict[str, Schema] = {
    "model": STRING,
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
    "stop": ANY,
    "stream": BOOL,
    "stream_options": object_of(
        {},
        {"include_usage": BOOL, "continuous_usage_stats": BOOL, "include_obfuscation": {"const": False}},
    ),
    "top_k": {"type": "integer", "minimum": -1},
    "min_p": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    "repetition_penalty": {"type": "number", "minimum": 0.01, "maximum": 10},
    "structured_outputs": OBJECT,
    "guided_json": ANY,
    "guided_regex": STRING,
    "guided_choice": ANY,
    "guided_grammar": STRING,
    "stop_token_ids": {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_ENTRIES},
    "ignore_eos": BOOL,
    "min_tokens": {"type": "integer", "minimum": 0},
    "prompt_logprobs": _TOP,
    "return_token_ids": BOOL,
    "return_tokens_as_token_ids": BOOL,
    "priority": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    "speculation": BOOL,
    "sparse_prefill": BOOL,
    "user": STRING,
}
CHAT = _COMMON | {
    "messages": ANY,
    "tools": TOOLS,
    "tool_choice": ANY,
    "max_completion_tokens": _COUNT,
    "logprobs": BOOL,
    "top_logprobs": _TOP,
    "reasoning_effort": STRING,  # reasoning.py resolves this and the next three
    "reasoning": object_of(  # OpenRouter's
        {},
        {"effort": STRING, "enabled": BOOL, "max_tokens": _COUNT, "exclude": {"const": False}},
    ),
    "thinking": object_of(  # of the chat APIs of GLM and DeepSeek, and LiteLLM's
        {"type": {"enum": ["enabled", "disabled", "auto", "adaptive"]}},
        {"budget_tokens": _COUNT, "clear_thinking": BOOL},
    ),
    "enable_thinking": BOOL,  # of the chat API of Qwen
    "thinking_budget": {"type": "integer", "minimum": 0},
    "thinking_token_budget": {"type": "integer", "minimum": 0},  # vLLM's name of the same
    "chat_template_kwargs": OBJECT,
    "parallel_tool_calls": BOOL,
    "response_format": {"type": "object", "required": ["type"]},
    "add_generation_prompt": BOOL,  # with the next, as in vLLM: see api/text/continuation.py
    "continue_final_message": BOOL,
}
_COMPLETION = _COMMON | {
    "prompt": ANY,
    "suffix": STRING,
    "echo": BOOL,
    "logprobs": _TOP,
    "max_tokens": {"type": "integer", "minimum": 0},  # 0: for the logprobs of the prompt
    "prompt_windows": object_of({}, {"size": _COUNT, "stride": _COUNT}),  # see api/text/raw_prompts.py
}

# Accepted because these values do not change the answer, also with server.strict_fields: the values, and the
# reason.
_HARMLESS: Accepted = {
    "skip_special_tokens": ({"const": True}, "special tokens are never part of the text"),
    "include_stop_str_in_output": ({"const": False}, "stop strings are never part of an answer"),
}
# Known fields that are refused, unless their value is one of those that are ignored, and the reason.
_REFUSED = {  # of vLLM's fields
    "allowed_token_ids": "use structured_outputs",
    "bad_words": "use logit_bias",
    "cache_salt": "the prefix cache is shared by all requests",
    "guided_decoding_backend": "there is only one backend",
    "guided_whitespace_pattern": "white space in JSON output cannot be configured",
    "length_penalty": "there is no beam search",
    "logits_processors": "code in requests is not run",
    "mm_processor_kwargs": "the model's files configure image processing",
    "request_id": "mlxrun assigns the ids",
    "spaces_between_special_tokens": "special tokens are never part of the text",
    "truncate_prompt_tokens": "a prompt that does not fit is refused, not truncated",
    "use_beam_search": "there is no beam search",
}

BODIES: dict[RequestKind, BodySchema] = {
    "chat": BodySchema(
        CHAT,
        _HARMLESS
        | {
            "include_reasoning": ({"const": True}, "reasoning is always returned"),
            "add_special_tokens": ({"const": False}, "the chat template adds the special tokens"),
            "metadata": (OBJECT, "it labels requests for a dashboard"),
            "safety_identifier": (STRING, "it identifies the end user"),
            "prompt_cache_key": (STRING, "a hint; the prefix cache compares tokens"),
            "promptCacheKey": (STRING, "another spelling of prompt_cache_key"),
            "store": ({"const": False}, "chat completions are not stored"),
            "service_tier": ({"enum": ["auto", "default"]}, "there is only one service tier"),
            "modalities": ({"const": ["text"]}, "only text output is supported"),
        },
        _REFUSED
        | REFUSED_OF_OTHER_CHATS
        | {
            "audio": "only text output is supported",
            "chat_template": "set model.chat_template in the config",
            "documents": "send them in a message",
            "function_call": "deprecated; use tool_choice",
            "functions": "deprecated; use tools",
            "moderation": "there is no moderation model",
            "prediction": "predicted outputs are not implemented",
            "prompt_cache_options": "the prefix cache has no options per request",
            "prompt_cache_retention": "the config decides how long prefixes are cached",
            "verbosity": "ask for the desired length in the prompt",
            "web_search_options": "there is no web search",
        },
        dict.fromkeys(_COMPLETION, COMPLETION_URL),
        CHAT_IGNORED,
    ),
    "completion": BodySchema(
        _COMPLETION,
        _HARMLESS
        | {
            "best_of": ({"const": 1}, "candidates are not compared"),
            "add_special_tokens": ({"const": True}, "the tokenizer always adds its special tokens"),
        },
        _REFUSED | REFUSED_OF_OTHERS,
        dict.fromkeys(CHAT, CHAT_URL),
        COMPLETION_IGNORED,
    ),
}

# Tokens of a prompt, as the engine would get it, and back.
_PROMPT_FIELDS = (
    *("messages", "tools", "reasoning_effort", "reasoning", "thinking", "enable_thinking"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
)
TOKENIZE = BodySchema(
    {"model": STRING, "prompt": STRING, "add_special_tokens": BOOL, "return_token_strs": BOOL}
    | {name: CHAT[name] for name in _PROMPT_FIELDS}
    | {"tool_choice": {"enum": ["auto", "none"]}}
)
DETOKENIZE = BodySchema(
    {"model": STRING, "tokens": LIST}
)  # whose items the endpoint checks, since there may be many
