"""Finds out what a chat template renders, once for each model, when the model is loaded.

Short conversations of marked texts are rendered. A feature is supported if there is no error and every text
is in its place. normalize_messages avoids the other features.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mlxrun.api.text.messages import Message, MessageSupport
from mlxrun.api.text.model_info import ModelInfo
from mlxrun.api.text.templates.template import (
    find_template_variables,
    get_image_markers,
    may_reason,
    try_template,
)

# A call of other servers' ids; Mistral's templates accept only nine letters and digits.
_FITTING_ID, _OTHER_IDS = "Zqid00000", ("call_Zqid00000", "Zq")
_BROKEN = "Zq{broken"  # arguments that are no JSON
_PARAMETERS = {"type": "object", "properties": {"Zqk": {"type": "string", "description": "Zq"}}}
_TOOL = {"type": "function", "function": {"name": "Zqt", "description": "Zq", "parameters": _PARAMETERS}}


def inspect_template(model: ModelInfo) -> None:
    """Find out all facts about a model's chat template, so that they are cached."""
    if model.chat_template is None:
        return
    get_image_markers(model)
    get_message_support(model)
    may_reason(model, {})


def get_message_support(model: ModelInfo) -> MessageSupport:
    """Return what the model's chat template renders without changes."""
    if model.chat_template is None:
        return MessageSupport()
    return _find_message_support(model.tokenizer, model.chat_template, model.vision)


@functools.lru_cache(maxsize=16)
def _find_message_support(tokenizer: Any, template: str, vision: bool) -> MessageSupport:
    """Without tools in the template, api/text/tools.py may write calls and results as text."""
    late_system = _renders_late_system(tokenizer, template)
    if "tool_calls" not in template:
        return MessageSupport(late_system=late_system, text_arguments=True)
    as_object = _renders_arguments(tokenizer, template, {"Zqk": "Zqv"}, ("Zqk", "Zqv"))
    as_text = _renders_arguments(tokenizer, template, _BROKEN, (_BROKEN,))
    return MessageSupport(
        late_system=late_system,
        object_arguments=as_object or not as_text,
        text_arguments=as_text,
        tool_images=vision and _renders_tool_images(tokenizer, template),
        any_call_ids=_accepts_any_ids(tokenizer, template, _BROKEN if as_text else {}),
    )


def _make_message(role: str, number: int) -> Message:
    return {"role": role, "content": f"Zq{number}z"}


def _renders_late_system(tokenizer: Any, template: str) -> bool:
    """Whether system messages stay in their place, wherever they are after the first message."""
    orders = (
        ("system", "user", "system"),
        ("user", "system", "user", "assistant", "user"),
        ("system", "user", "assistant", "system", "user"),
        ("system", "user", "system", "assistant", "user", "system"),
        ("user", "assistant", "user", "system"),
    )
    for roles in orders:
        messages = [_make_message(role, i) for i, role in enumerate(roles)]
        text = _render(tokenizer, template, messages)
        if text is None or not _has_in_order(text, [message["content"] for message in messages]):
            return False
    return True


def _has_in_order(text: str, parts: Sequence[str]) -> bool:
    """Whether a text has all the parts, each once, one after the other."""
    positions = [text.find(part) for part in parts]
    return -1 not in positions and positions == sorted(positions) and all(text.count(p) == 1 for p in parts)


def _render_call(
    tokenizer: Any, template: str, arguments: Any, result: Any, call_id: str = _FITTING_ID
) -> str | None:
    """A conversation that ends with a call and its result: some templates drop those of earlier turns."""
    function = {"name": "Zqt", "arguments": arguments}
    call = {"id": call_id, "type": "function", "function": function}
    messages = [
        _make_message("user", 0),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "name": "Zqt", "content": result},
    ]
    return _render(tokenizer, template, messages, tools=[_TOOL])


def _renders_arguments(tokenizer: Any, template: str, arguments: Any, parts: Sequence[str]) -> bool:
    """Whether all parts of a call's arguments are rendered."""
    text = _render_call(tokenizer, template, arguments, "Zqr")
    return text is not None and all(part in text for part in parts)


def _accepts_any_ids(tokenizer: Any, template: str, arguments: Any) -> bool:
    """Whether no other id is refused where one of nine letters and digits is rendered."""
    if _render_call(tokenizer, template, arguments, "Zqr") is None:
        return True
    others = (_render_call(tokenizer, template, arguments, "Zqr", other) for other in _OTHER_IDS)
    return None not in others


def _renders_tool_images(tokenizer: Any, template: str) -> bool:
    """Whether an image in a tool message is marked as it is in a user's message."""
    image, text = {"type": "image"}, {"type": "text", "text": "Zqr"}
    plain = _render_call(tokenizer, template, {}, [text])
    marked = _render_call(tokenizer, template, {}, [image, text])
    first = [{"role": "user", "content": parts} for parts in ([text], [image, text])]
    without, with_image = (_render(tokenizer, template, [message]) for message in first)
    if plain is None or marked is None or without is None or with_image is None or "'type'" in marked:
        return False
    count = [
        Counter(tokenizer(each, add_special_tokens=False)["input_ids"])
        for each in (plain, marked, without, with_image)
    ]
    added = count[1] - count[0]
    return bool(added) and "Zqr" in marked and added == count[3] - count[2]


def _render(
    tokenizer: Any, template: str, messages: Sequence[Message], tools: Sequence[Message] | None = None
) -> str | None:
    """A conversation as text; None if the template raises, or prints parts as Python does."""
    known = list(tools) if tools and "tools" in find_template_variables(template) else None
    return try_template(tokenizer, template, list(messages), tools=known, add_generation_prompt=True)
