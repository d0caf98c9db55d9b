"""The fields of OpenAI's /v1/responses: honoured, harmless or refused by name. Ranges are OpenAI's.

Fields in SAME mean the same in a chat body and are copied to it; request.py translates the others.
"""

from __future__ import annotations

from mlxrun.api.body_schema import BOOL, OBJECT, STRING, TOOLS, BodySchema, Schema, object_of
from mlxrun.api.openai.fields import HONOURED as CHAT

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
# The other values of `include` are outputs of built-in tools, which do not run here, or always included.
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

# From the second line on: settings of the chat endpoint that OpenAI's API does not have.
SAME = (
    *("model", "temperature", "top_p", "parallel_tool_calls", "user", "stream"),
    *("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "chat_template_kwargs", "priority"),
)

HONOURED: dict[str, Schema] = {name: CHAT["chat"][name] for name in SAME} | {
    "input": {"type": ["string", "array"]},
    "instructions": STRING,
    "previous_response_id": STRING,
    "tools": TOOLS,
    "tool_choice": {"type": ["string", "object"]},
    "reasoning": object_of(
        {},
        {"effort": {"enum": [*EFFORTS, None]}}
        | dict.fromkeys(("summary", "generate_summary", "context"), {"enum": ["auto", None]}),
    ),
    "text": object_of({}, {"format": {"type": ["object", "null"]}, "verbosity": {"enum": ["medium", None]}}),
    "max_output_tokens": CHAT["chat"]["max_tokens"],
    "top_logprobs": CHAT["chat"]["top_logprobs"],
    "include": {"type": "array", "maxItems": 64, "items": {"enum": list(INCLUDES)}},
    "store": BOOL,
    "metadata": {
        "type": "object",
        "maxProperties": 16,
        "propertyNames": {"maxLength": 64},
        "additionalProperties": {"type": "string", "maxLength": 512},
    },
    "prompt_cache_key": STRING,  # a hint, but part of the response; so are the next two
    "safety_identifier": STRING,
    "max_tool_calls": {"type": "integer", "minimum": 1},  # limits built-in tools only, which do not run here
}

# Accepted because these values do not change the answer: the values, and the reason.
HARMLESS: dict[str, tuple[Schema, str]] = {
    "background": ({"const": False}, "there is no background mode"),
    "client_metadata": (OBJECT, "it labels requests for a dashboard"),
    "service_tier": ({"enum": ["auto", "default"]}, "there is only one service tier"),
    "stream_options": (
        object_of({}, {"include_obfuscation": {"const": False}}),
        "streams are not obfuscated",
    ),
    "truncation": ({"const": "disabled"}, "an input that does not fit is refused, not truncated"),
}

# Known fields that are always refused, and the reason.
REFUSED: dict[str, str] = {
    "access_programs": "there are no access programs",
    "background_options": "there is no background mode",
    "context_management": "the client manages the context",
    "conversation": "use previous_response_id",
    "image": "images always have full detail",
    "moderation": "there is no moderation model",
    "prompt": "there are no stored prompts; send instructions and input",
    "prompt_cache_options": "the prefix cache has no options per request",
    "prompt_cache_retention": "the config decides how long prefixes are cached",
}

_CHAT_URL = "/v1/chat/completions"
_ELSEWHERE = (
    *("messages", "max_tokens", "max_completion_tokens", "reasoning_effort", "logprobs", "n"),
    *("response_format", "functions", "continue_final_message", "add_generation_prompt"),
)

BODY = BodySchema(HONOURED, HARMLESS, REFUSED, dict.fromkeys(_ELSEWHERE, _CHAT_URL))

# Tools that OpenAI runs itself and that some clients always send. They are left out of the prompt and of the
# response's `tools`, with a warning in the log.
ABSENT_TOOLS = ("web_search", "web_search_preview", "image_generation", "tool_search")
REFUSED_TOOLS = (
    *("file_search", "code_interpreter", "mcp", "computer", "computer_use_preview"),
    *("local_shell", "shell", "apply_patch", "programmatic_tool_calling"),
)
