"""Fields of requests that are accepted and have no effect; each is logged once in a process.

A field is named by its path without indices, such as `messages[].tool_calls[].index`. Clients choose these
names, so their number in the log is limited.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from mlxrun.core.field_errors import check_keys, shorten

logger = logging.getLogger(__name__)

CACHE_HINT = "a hint; the prefix cache compares tokens"
_ANSWER = "part of another server's answer, which chat templates do not render"
_REPEATED = "reasoning_content has the reasoning"
# Of messages, their parts and their tool calls: the fields that clients are known to send, and the reason.
# Any other field that is not known has no effect either, as ECHOED says.
MESSAGE_FIELDS: dict[str, dict[str, str]] = {
    "messages[]": {
        "annotations": _ANSWER,
        "cache_control": CACHE_HINT,
        "images": _ANSWER,
        "name": "chat templates do not render names of system messages",
        "provider_specific_fields": _ANSWER,
        "reasoning_details": _REPEATED,
        "reasoning_items": _REPEATED,
        "thinking_blocks": _REPEATED,
    },
    "messages[].content[]": {
        "annotations": _ANSWER,
        "cache_control": CACHE_HINT,
        "prompt_cache_breakpoint": CACHE_HINT,
    },
    "messages[].content[].image_url": {
        "detail": "the model's processor decides the resolution",
        "format": "the bytes of an image say its format",
    },
    "messages[].tool_calls[]": {
        "cache_control": CACHE_HINT,
        "extra_content": _ANSWER,
        "index": "calls are in the order of the array",
        "provider_specific_fields": _ANSWER,
    },
    "messages[].tool_calls[].function": {
        "parsed_arguments": "arguments has them",
        "provider_specific_fields": _ANSWER,
    },
}
ECHOED = "a field of an answer, which the client sends back and the prompt does not need"
_MOST = 1000
_INDEX = re.compile(r"\[\d+\]")
logged_fields: set[str] = set()


def log_ignored(param: str, reason: str) -> None:
    """Log that a field was accepted and has no effect, once for each field."""
    name = shorten(_INDEX.sub("[]", param))
    if name in logged_fields or len(logged_fields) >= _MOST:
        return
    logged_fields.add(name)
    logger.info("the field %r is accepted and has no effect: %s", name, reason)
    if len(logged_fields) == _MOST:
        logger.info("%d such fields were logged; further ones are not", _MOST)


def select_known(
    value: Mapping[str, Any], known: Iterable[str], param: str, *, strict: bool
) -> dict[str, Any]:
    """Return the known fields of a message, a part or a tool call at the path `param`. Clients send answers
    back, so other fields have no effect and are logged. `strict`: RequestError for them."""
    known = tuple(known)
    if strict:
        check_keys(value, known, param)
    for key in value:
        if key not in known and value[key] is not None:
            reasons = MESSAGE_FIELDS.get(_INDEX.sub("[]", param), {})
            log_ignored(f"{param}.{key}", reasons.get(key, ECHOED))
    return {key: item for key, item in value.items() if key in known}
