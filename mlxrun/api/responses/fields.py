"""The fields of OpenAI's /v1/responses: honoured, accepted without effect, or refused by name.

Ranges are OpenAI's. The fields in SAME mean the same in a chat body, and are copied to it. request.py
translates the others.
"""

from __future__ import annotations

from mlxrun.api.body_schema import (
    BOOL,
    METADATA,
    OBJECT,
    STRING,
    TOOLS,
    Accepted,
    BodySchema,
    Schema,
    object_of,
)
from mlxrun.api.openai.fields import CHAT, CHAT_URL, EFFORTS

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

# From the second line on: settings of the chat endpoint that OpenAI's API does not have.
SAME = (
    *("model", "temperature", "top_p", "parallel_tool_calls", "user", "stream"),
    *("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "chat_template_kwargs", "priority"),
    *("speculation", "sparse_prefill"),
)
SUMMARIES = ("auto", "concise", "detailed")
INCLUDE: Schema = {"type": "array", "maxItems": 64, "items": {"enum": list(INCLUDES)}}

HONOURED: dict[str, Schema] = {name: CHAT[name] for name in SAME} | {
    "input": {"type": ["string", "array"]},
    "instructions": STRING,
    "previous_response_id": STRING,
    "conversation": {"type": ["string", "object"]},
    "background": BOOL,
    "truncation": {"enum": ["auto", "disabled"]},
    "tools": TOOLS,
    "tool_choice": {"type": ["string", "object"]},
    "reasoning": object_of(
        {},
        {"effort": {"enum": [*EFFORTS, None]}, "mode": {"enum": ["standard", None]}}
        | dict.fromkeys(("summary", "generate_summary", "context"), {"enum": ["auto", None]}),
    ),
    "text": object_of({}, {"format": {"type": ["object", "null"]}, "verbosity": {"enum": ["medium", None]}}),
    "max_output_tokens": CHAT["max_tokens"],
    "top_logprobs": CHAT["top_logprobs"],
    "include": INCLUDE,
    "store": BOOL,
    "metadata": METADATA,
    "prompt_cache_key": STRING,  # a hint, but part of the response; so are the next two
    "safety_identifier": STRING,
    "max_tool_calls": {"type": "integer", "minimum": 1},  # limits built-in tools only, which do not run here
}

# Accepted because these values do not change the answer: the values, and the reason.
HARMLESS: Accepted = {
    "client_metadata": (OBJECT, "it labels requests for a dashboard"),
    "service_tier": ({"enum": ["auto", "default"]}, "there is only one service tier"),
    "stream_options": (
        object_of({}, {"include_obfuscation": {"const": False}}),
        "streams are not obfuscated",
    ),
}
_NO_SUMMARY = ({"enum": list(SUMMARIES)}, "reasoning is returned whole, and is not summarized")
# The same, but refused with server.strict_fields.
IGNORED: Accepted = {
    "context_management": ({"const": []}, "conversations are not compacted"),
    "prompt_cache_options": (OBJECT, "a hint; the prefix cache finds every shared prefix"),
    "prompt_cache_retention": (STRING, "a hint; the config decides how long prefixes are cached"),
    "reasoning.context": ({"enum": ["all_turns"]}, "the chat template decides which reasoning it renders"),
    "reasoning.generate_summary": _NO_SUMMARY,
    "reasoning.summary": _NO_SUMMARY,
    "service_tier": (STRING, "there is only one service tier"),
    "stream_options.include_obfuscation": (BOOL, "streams are not obfuscated"),
    "text.verbosity": ({"enum": ["low", "medium", "high"]}, "a hint; ask for the length in the prompt"),
}

# Known fields that are always refused, and the reason.
REFUSED: dict[str, str] = {
    "access_programs": "there are no access programs",
    "background_options": "responses in the background have no options",
    "image": "images always have full detail",
    "moderation": "there is no moderation model",
    "prompt": "there are no stored prompts; send instructions and input",
}

_ELSEWHERE = (
    *("messages", "max_tokens", "max_completion_tokens", "reasoning_effort", "logprobs", "n"),
    *("response_format", "functions", "continue_final_message", "add_generation_prompt"),
)

BODY = BodySchema(HONOURED, HARMLESS, REFUSED, dict.fromkeys(_ELSEWHERE, CHAT_URL), IGNORED)

# Tools that OpenAI runs itself and that some clients always offer. They are left out of the prompt and of the
# response's `tools`, with a warning in the log; refused with server.strict_fields.
ABSENT_REASON = "it does not run here; it is left out, and the response's `tools` lacks it"
ABSENT_TOOLS = ("web_search", "web_search_preview", "image_generation", "tool_search")
REFUSED_REASON = "it does not run here; use function and custom tools"
REFUSED_TOOLS = (
    *("file_search", "code_interpreter", "mcp", "computer", "computer_use_preview"),
    *("local_shell", "shell", "apply_patch", "programmatic_tool_calling"),
)
