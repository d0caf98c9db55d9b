"""Chat bodies of Inspect's requests: its generate config and tools in the fields of /v1/chat/completions.

A setting without such a field is refused by name, unless it is for Inspect itself or for other services.
Field names are those of `inspect_ai.model.GenerateConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxrun.core.field_errors import reject_unsupported

Json = dict[str, Any]

# Fields with the same meaning; those not named otherwise have the same name.
_RENAMED = {"stop_seqs": "stop", "num_choices": "n", "reasoning_tokens": "thinking_budget"}
_SAME = (
    "best_of",
    "frequency_penalty",
    "logprobs",
    "max_tokens",
    "presence_penalty",
    "prompt_logprobs",
    "reasoning_effort",
    "seed",
    "temperature",
    "top_k",
    "top_logprobs",
    "top_p",
)
_OWN = {"extra_body", "logit_bias", "parallel_tool_calls", "response_schema"}
# For Inspect itself: retries, connections, its cache and its choice of messages.
_INSPECTS = {
    "adaptive_connections",
    "attempt_timeout",
    "batch",
    "cache",
    "fail_on_refusal",
    "internal_tools",
    "max_connections",
    "max_retries",
    "max_tool_output",
    "reasoning_history",
    "stream_idle_timeout",
    "system_message",
    "timeout",
}
# Hints to the services of others, which do not ask for another answer here.
_HINTS = {"cache_prompt", "extra_headers", "reasoning_summary", "verbosity"}
_KNOWN = {*_SAME, *_RENAMED, *_OWN, *_INSPECTS, *_HINTS}


def build_chat_body(
    messages: Sequence[Any], tools: Sequence[Mapping[str, Any]], tool_choice: Any, config: Mapping[str, Any]
) -> Json:
    """Build the body of a request. RequestError names a setting that cannot be honoured. `messages`: in
    OpenAI's format; `tools`: name, description and parameters of each; `tool_choice`: Inspect's, a name or a
    mapping with one; `config`: the settings of the generate config."""
    for name in config.keys() - _KNOWN:
        reject_unsupported(name, "Inspect's setting has no counterpart in mlxrun")
    body: Json = {"messages": list(messages)}
    for name in (*_SAME, *_RENAMED):
        if name in config:
            body[_RENAMED.get(name, name)] = config[name]
    if "logit_bias" in config:
        body["logit_bias"] = {str(token): bias for token, bias in config["logit_bias"].items()}
    if "response_schema" in config:
        schema = dict(config["response_schema"])
        schema = {"schema": schema.pop("json_schema"), **schema}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if tools:
        # As with Inspect over HTTP, so that both give the same prompt.
        body["tools"] = [{"type": "function", "function": {**tool, "strict": True}} for tool in tools]
        body["tool_choice"] = _build_tool_choice(tool_choice)
        if "parallel_tool_calls" in config:
            body["parallel_tool_calls"] = config["parallel_tool_calls"]
    return body | config.get("extra_body", {})


def _build_tool_choice(choice: Any) -> Any:
    if isinstance(choice, Mapping):
        return {"type": "function", "function": {"name": choice["name"]}}
    return "required" if choice == "any" else choice
