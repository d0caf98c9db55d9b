"""Describes the served model as Ollama's /api/tags, /api/ps and /api/show do.

Names have a tag, as in Ollama: `:latest` where there is none. The first call for a model reads its files.
"""

from __future__ import annotations

from typing import Any

from mlxrun.api.anthropic.response import format_time
from mlxrun.api.ollama.request import LATEST
from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.model_info import ModelInfo, list_names
from mlxrun.api.text.raw_prompts import find_infill_format

Json = dict[str, Any]

NEVER = "9999-12-31T23:59:59Z"  # when the model is unloaded
# The names that clients look for, behind the architecture, of sizes in a model's config.
_SIZES = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "intermediate_size": "feed_forward_length",
    "vocab_size": "vocab_size",
}


def list_tags(model: ModelInfo) -> Json:
    """Build the response of /api/tags: the names of the model and of its adapters."""
    modified = {"modified_at": format_time(model.summary.modified)}
    return {"models": [_describe(name, model) | modified for name in list_names(model)]}


def list_loaded(model: ModelInfo | None) -> Json:
    """Build the response of /api/ps. None: the model is not loaded yet."""
    if model is None:
        return {"models": []}
    more = {
        "expires_at": NEVER,
        "size_vram": model.summary.weight_bytes,
        "context_length": model.context_length,
    }
    return {"models": [_describe(model.name, model) | more]}


def describe_model(context: ApiContext) -> Json:
    """Build the response of /api/show."""
    model = context.model_info
    summary, architecture = model.summary, model.summary.family or "unknown"
    parameters = _list_parameters(model)
    info = {
        "general.architecture": architecture,
        "general.parameter_count": summary.num_parameters,
        f"{architecture}.context_length": model.context_length,
    }
    for name, key in _SIZES.items():
        if name in summary.sizes:
            info[f"{architecture}.{key}"] = summary.sizes[name]
    return {
        "modelfile": "\n".join([f"FROM {model.name}", *(f"PARAMETER {line}" for line in parameters)]),
        "parameters": "\n".join(parameters),
        "template": model.chat_template or "",
        "details": _describe_details(model),
        "model_info": info,
        "capabilities": list_capabilities(context),
        "modified_at": format_time(summary.modified),
    }


def list_capabilities(context: ApiContext) -> list[str]:
    """List what the model can do, in Ollama's words."""
    model = context.model_info
    generates = model.generates
    talks = generates and model.chat_template is not None
    can = {
        "completion": generates,
        "tools": talks,
        "insert": generates and find_infill_format(model) is not None,
        "vision": generates and model.vision,
        "thinking": talks and context.formats.reasoning is not None,
        "embedding": model.pooled is not None and model.pooled.task == "embed",
    }
    return [name for name, is_able in can.items() if is_able]


def _list_parameters(model: ModelInfo) -> list[str]:
    """The lines of `parameters`: the context, and the model's own sampling values."""
    renamed = {"repetition_penalty": "repeat_penalty"}
    values = {renamed.get(name, name): value for name, value in model.defaults.items()}
    return [f"{name:<30} {value:.10g}" for name, value in {"num_ctx": model.context_length, **values}.items()]


def _describe(name: str, model: ModelInfo) -> Json:
    has_tag = ":" in name.rpartition("/")[2]
    tagged = name if has_tag else name + LATEST
    return {
        "name": tagged,
        "model": tagged,
        "size": model.summary.weight_bytes,
        "digest": model.digests["model"],
        "details": _describe_details(model),
    }


def _describe_details(model: ModelInfo) -> Json:
    summary = model.summary
    return {
        "parent_model": "",
        "format": summary.format,
        "family": summary.family,
        "families": [summary.family],
        "parameter_size": format_count(summary.num_parameters),
        "quantization_level": summary.quantization,
        "context_length": model.context_length,
    }


def format_count(count: int) -> str:
    """Format a number of parameters as Ollama does: 494.03M, 7.6B."""
    for size, letter, digits in ((10**12, "T", 1), (10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0)):
        if count >= size:
            return f"{count / size:.{digits}f}{letter}"
    return str(count)
