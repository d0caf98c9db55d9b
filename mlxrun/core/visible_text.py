"""Text of files, models and clients as people are shown it: what a terminal would obey is made visible.

Control characters, marks that change the direction of text and lone surrogates are written as `\\x1b` or
`\\u202e`. A message is one line of at most MAX_MESSAGE bytes.
"""

from __future__ import annotations

import json
import re
from typing import Any

from mlxrun.core.errors import shorten_message

# Controls but the line feed, also those of eight bits; marks of direction; separators at which some programs
# end a line; lone surrogates, which no output can encode.
_HIDDEN = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
_NAMED = {"\t": "\\t", "\r": "\\r"}


def make_visible(text: str) -> str:
    """The text with its hidden characters written out; line feeds stay."""
    return _HIDDEN.sub(_write_out, text)


def make_line(text: str) -> str:
    """The text as one line: line feeds are written out too."""
    return make_visible(text).replace("\n", "\\n")


def make_message(text: str) -> str:
    """The text as one line of at most MAX_MESSAGE bytes."""
    return shorten_message(make_line(text))


def dump_json(value: Any, indent: int | None = None) -> str:
    """A value as JSON in which hidden characters are escapes, so that it may be printed and still be read."""
    return escape_json(json.dumps(value, indent=indent, ensure_ascii=False))


def escape_json(text: str) -> str:
    """JSON with its hidden characters as escapes."""
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _write_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    return _NAMED.get(found[0]) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
