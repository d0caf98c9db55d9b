"""Translates the reasoning fields of chat bodies, which differ by API, to variables of the chat template.

A template may have the variable `reasoning_effort`, a switch of reasoning, both or neither. An effort sets
the variable. Without the variable, `none` sets the switch off, and other efforts set it on. If the template
has both, `none` sets the switch. With neither, the effort has no effect. Explicit `chat_template_kwargs` come
first. The variable takes any text. Without it the effort must be one of OpenAI's, since any other would mean
on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxrun.api.openai.fields import EFFORTS
from mlxrun.api.prepared import ApiContext
from mlxrun.api.text.ignored_fields import log_ignored
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.templates.template import find_reasoning_switch, find_template_variables
from mlxrun.core.field_errors import reject, reject_choice, reject_unsupported

_NO_VARIABLE = "the model's chat template has no such variable"
_SWITCHED = {"enabled": True, "disabled": False}  # the other types of `thinking` leave it to the template


def resolve_reasoning_fields(given: Mapping[str, Any], context: ApiContext) -> dict[str, Any]:
    """Return a checked chat body, with template variables and a thinking budget for its reasoning fields.

    RequestError for an unknown effort; with `server.strict_fields` also for a field without effect."""
    effort_field, effort = _find_first(given, "reasoning_effort", "reasoning.effort")
    enabled_field, enabled = _find_first(given, "enable_thinking", "thinking.type", "reasoning.enabled")
    kept_field, kept = _find_first(given, "thinking.clear_thinking")
    known = find_template_variables(context.model_info.chat_template or "")
    switch = find_reasoning_switch(context.model_info)
    if effort is not None:
        if "reasoning_effort" not in known and effort not in EFFORTS:
            reject_choice(effort_field, effort, EFFORTS)
        if not effort.strip():
            reject(effort_field, "is empty")
    variables = {} if effort is None else translate_effort(effort, context.model_info)
    unused = [] if effort is None or variables else [effort_field]
    enabled = _SWITCHED.get(enabled) if isinstance(enabled, str) else enabled
    if enabled is not None and switch is not None:
        variables[switch] = enabled
    elif enabled is not None:
        unused.append(enabled_field)
    if kept is not None and "clear_thinking" in known:
        variables["clear_thinking"] = kept
    elif kept is not None:
        unused.append(kept_field)
    for name in unused:
        if context.config.server.strict_fields:
            reject_unsupported(name, _NO_VARIABLE)
        log_ignored(name, _NO_VARIABLE)
    body = _add_budget(given, context)
    if variables:
        body["chat_template_kwargs"] = {**variables, **given.get("chat_template_kwargs", {})}
    return body


def translate_effort(effort: str, model_info: ModelInfo) -> dict[str, Any]:
    """Return the template variables of a reasoning effort; empty if the template has none for it."""
    switch = find_reasoning_switch(model_info)
    has_effort = "reasoning_effort" in find_template_variables(model_info.chat_template or "")
    if has_effort and (effort != "none" or switch is None):
        return {"reasoning_effort": effort}
    return {} if switch is None else {switch: effort != "none"}


def _find_first(given: Mapping[str, Any], *paths: str) -> tuple[str, Any]:
    """The first of these fields that was given, and its value; the last one and None if there is none."""
    for path in paths:
        name, _, inner = path.partition(".")
        value = given.get(name)
        if inner:
            value = value.get(inner) if isinstance(value, dict) else None
        if value is not None:
            return path, value
    return paths[-1], None


def _add_budget(given: Mapping[str, Any], context: ApiContext) -> dict[str, Any]:
    """The body with a thinking budget, if one was given and the model's reasoning can be parsed."""
    name, budget = _find_first(given, "thinking.budget_tokens", "reasoning.max_tokens")
    body = dict(given)
    if budget is None or "thinking_budget" in given or "thinking_token_budget" in given:
        return body
    if context.formats.reasoning is None:
        log_ignored(name, "the model's reasoning cannot be parsed, so it has no limit")
        return body
    return body | {"thinking_budget": budget}
