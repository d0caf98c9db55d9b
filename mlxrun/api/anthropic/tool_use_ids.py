"""Ids of tool calls in Anthropic's form, and back to the ids that the chat template shows to the model.

Some clients accept only ids of Anthropic's form: `toolu_`, then letters, digits, `_` and `-`. Our own ids
(make_call_id) keep their digits. An id that the model wrote, such as Kimi's `functions.add:0`, is spelled out
behind `toolu_own_`. So the next request gives the model its id in the form that it has learned.
"""

from __future__ import annotations

import re

_MADE = re.compile(r"call_([0-9a-f]{24})")
_TOOL_USE = re.compile(r"toolu_([0-9a-f]{24})")
_OWN = "toolu_own_"
_OTHER = re.compile(rb"[^A-Za-z0-9-]")
_ESCAPED = re.compile(rb"_([0-9a-f]{2})")


def encode_call_id(call_id: str) -> str:
    """Return the id of a call as Anthropic's clients get it."""
    made = _MADE.fullmatch(call_id)
    if made is not None:
        return f"toolu_{made[1]}"
    encoded = call_id.encode("utf-8", "surrogatepass")
    return _OWN + _OTHER.sub(lambda found: b"_%02x" % ord(found[0]), encoded).decode("ascii")


def decode_tool_use_id(tool_use_id: str) -> str:
    """Return the id that `encode_call_id` encoded. An id of another server stays as it is."""
    made = _TOOL_USE.fullmatch(tool_use_id)
    if made is not None:
        return f"call_{made[1]}"
    if not tool_use_id.startswith(_OWN):
        return tool_use_id
    escaped = tool_use_id.removeprefix(_OWN).encode("utf-8", "surrogatepass")
    decoded = _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode("ascii")), escaped)
    call_id = decoded.decode("utf-8", "replace")
    return call_id if encode_call_id(call_id) == tool_use_id else tool_use_id
