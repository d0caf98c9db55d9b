"""The fields of OpenAI's /v1/responses: honoured, harmless or refused by name. Ranges are OpenAI's.

Fields in SAME mean the same in a chat body and go there as they are; the others are translated by
responses_body.py.
"""

from __future__ import annotations

from mlxrun.api.body_schema import BodySchema, Schema
from mlxrun.api.openai.fields import HONOURED as CHAT

_BOOL: Schema = {"type": "boolean"}
_STRING: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
# The rest of `include` are outputs of tools that never run here, and what is always given.
INCLUDES = (
    LOGPROBS,
    ENCRYPTED,
    "message.input_image.image_url",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "web_search_call.action.sources",
    "web_search_call.results",
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

# Ours, from the second line on: settings that the chat endpoint has and the original does not.
SAME = (
    *("model", "temperature", "top_p", "parallel_tool_calls", "user", "stream"),
    *("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "chat_template_kwargs", "priority"),
)

HONOURED: dict[str, Schema] = {name: CHAT["chat"][name] for name in SAME} | {
    "input": {"type": ["string", "array"]},
    "instructions": _STRING,
    "previous_response_id": _STRING,
    "tools": {"type": "array", "maxItems": 1024},
    "tool_choice": {"type": ["string", "object"]},
    "reasoning": {
        "type": "object",
        "properties": {
            "effort": {"enum": [*EFFORTS, None]},
            "summary": {"enum": ["auto", None]},
            "generate_summary": {"enum": ["auto", None]},
            "context": {"enum": ["auto", None]},
        },
        "additionalProperties": False,
    },
    "text": {
        "type": "object",
        "properties": {
            "format": {"type": ["object", "null"]},
            "verbosity": {"enum": ["medium", None]},
        },
        "additionalProperties": False,
    },
    "max_output_tokens": CHAT["chat"]["max_tokens"],
    "top_logprobs": CHAT["chat"]["top_logprobs"],
    "include": {"type": "array", "maxItems": 64, "items": {"enum": list(INCLUDES)}},
    "store": _BOOL,
    "metadata": {
        "type": "object",
        "maxProperties": 16,
        "propertyNames": {"maxLength": 64},
        "additionalProperties": {"type": "string", "maxLength": 512},
    },
    "prompt_cache_key": _STRING,  # a hint, but part of the response; as are the next two
    "safety_identifier": _STRING,
    "max_tool_calls": {"type": "integer", "minimum": 1},  # counts built-in tools only, of which none runs
}

# Accepted because the given values change nothing in the answer: values, and why.
HARMLESS: dict[str, tuple[Schema, str]] = {
    "background": ({"const": False}, "an answer is made while its request is open"),
    "client_metadata": (_OBJECT, "labels for a dashboard"),
    "service_tier": ({"enum": ["auto", "default"]}, "there is one tier"),
    "stream_options": (
        {
            "type": "object",
            "properties": {"include_obfuscation": {"const": False}},
            "additionalProperties": False,
        },
        "streams are not padded; leave it out",
    ),
    "truncation": ({"const": "disabled"}, "an input that does not fit is refused, not cut"),
}

# Known fields that are refused whatever they hold, and why.
REFUSED: dict[str, str] = {
    "access_programs": "there are none",
    "background_options": "an answer is made while its request is open",
    "context_management": "the client decides what stays in the context",
    "conversation": "use previous_response_id",
    "image": "images are always seen in full",
    "moderation": "there is no moderation model",
    "prompt": "there are no stored prompts; send instructions and input",
    "prompt_cache_options": "prefixes are found by their tokens",
    "prompt_cache_retention": "how long prefixes are kept is a setting of the config",
}

_CHAT_URL = "/v1/chat/completions"
_ELSEWHERE = (
    *("messages", "max_tokens", "max_completion_tokens", "reasoning_effort", "logprobs", "n"),
    *("response_format", "functions", "continue_final_message", "add_generation_prompt"),
)

BODY = BodySchema(HONOURED, HARMLESS, REFUSED, dict.fromkeys(_ELSEWHERE, _CHAT_URL))

# Tools that the original runs itself and adds by default for some clients. The model is not told of them, the
# response's `tools` lacks them, and the log says so.
ABSENT_TOOLS = ("web_search", "web_search_preview", "image_generation", "tool_search")
REFUSED_TOOLS = (
    *("file_search", "code_interpreter", "mcp", "computer", "computer_use_preview"),
    *("local_shell", "shell", "apply_patch", "programmatic_tool_calling"),
)
