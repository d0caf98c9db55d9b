"""Chooses the next line: one within a window that has the same prefix as the last line, if there is one.

Lines that share a prefix so run together and hit the prefix cache. Every line is chosen once. If no line has
the same prefix, the oldest one is next. At most `WINDOW` - 1 later lines start before any line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from mlxrun.jobs.lines.job_file import JobLine

WINDOW = 256  # lines
_FIRST = 200  # characters of a prompt that are taken as a system prompt where there is none
_MORE = 1000  # characters after the system prompt
_SYSTEM = ("system", "developer")
_SYSTEM_FIELDS = ("system", "instructions")  # of /v1/messages and /v1/responses


def hash_prefix(line: JobLine) -> int:
    """Hash the start of a line's prompt to 64 bits. The upper 32 bits are equal for lines with the same tools
    and system prompt. All 64 are equal if the first _MORE characters after them are the same too."""
    body = line.body
    messages = body.get("messages", body.get("input"))
    turns: list[Any] = messages if isinstance(messages, list) else [messages]
    lead = 0
    while lead < len(turns) and isinstance(turns[lead], dict) and turns[lead].get("role") in _SYSTEM:
        lead += 1
    first = [body.get("tools"), *(body.get(name) for name in _SYSTEM_FIELDS), turns[:lead]]
    head = "".join(iterate_texts(first))
    rest = _start([body.get("prompt"), turns[lead:]], _MORE)
    if not head:
        head = rest[:_FIRST]
    return _hash(line.url + head) << 32 | _hash(rest)


def _hash(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "big")


def _start(value: Any, size: int) -> str:
    """The first `size` characters, at least, of the texts in `value`."""
    found = ""
    for text in iterate_texts(value):
        found += text[:size]
        if len(found) >= size:
            break
    return found[:size]


def iterate_texts(value: Any) -> Iterator[str]:
    """Yield all keys, strings and numbers in a JSON value, in order, each with an end mark."""
    left = [value]  # a stack: JSON may be nested as deeply as Python's own
    while left:
        item = left.pop()
        if isinstance(item, list):
            left += reversed(item)
        elif isinstance(item, dict):
            left += [part for pair in reversed(item.items()) for part in reversed(pair)]
        elif isinstance(item, str) and item.startswith("data:"):
            # Files of one type have equal first characters.
            yield f"data {_hash(item)}\n"
        elif item is not None:
            yield f"{item}\n"


def look_ahead(
    positions: Iterator[int], get_prefix_hash: Callable[[int], int], size: int = WINDOW
) -> Iterator[int]:
    """Yield all positions so that lines with the same prefix are neighbours. `get_prefix_hash` is called once
    for each position, at most `size` positions ahead."""
    ranked = enumerate(positions)
    following = next(ranked, None)
    waiting: list[tuple[int, int, int]] = []  # rank, position, prefix hash; oldest first
    last: int | None = None  # prefix hash of the last position
    while True:
        while following is not None and (not waiting or following[0] < waiting[0][0] + size):
            waiting.append((*following, get_prefix_hash(following[1])))
            following = next(ranked, None)
        if not waiting:
            return
        _, position, last = waiting.pop(_pick([each[2] for each in waiting], last))
        yield position


def _pick(hashes: list[int], last: int | None) -> int:
    """The index of the first line with the same prefix, else with the same system prompt, else 0."""
    if last in hashes:
        return hashes.index(last)
    same_system = (at for at, each in enumerate(hashes) if last is not None and each >> 32 == last >> 32)
    return next(same_system, 0)
