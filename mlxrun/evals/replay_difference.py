"""Compares the records of two runs of one line, and says where they begin to differ.

The result of scoring (`eval`) is left out: it follows from the answer, and can be computed again without the
model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from mlxrun.jobs.records.output_records import dump_record

_AROUND = 20  # characters that are shown before and after the first one that differs
_MISSING = object()


@dataclass(frozen=True, slots=True)
class LineDifference:
    """A line whose record is another one now. `number`: in the job file; `text`: what differs first."""

    id: str
    number: int | None
    text: str

    def __str__(self) -> str:
        place = "" if self.number is None else f" (line {self.number} of the job)"
        return f"{self.id!r}{place}: {self.text}"


def describe_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Where the bytes of two records begin to differ, without their scores; None if they are equal."""
    before, now = _dump(old), _dump(new)
    if before == now:
        return None
    if old["error"] is None and new["error"] is not None:
        return f"it was answered, and fails now: {new['error']['message']}"
    if old["error"] is not None and new["error"] is None:
        return f"it is answered now, and failed before: {old['error']['message']}"
    found = next(_walk(_strip(old), _strip(new), ""), None)
    at = next(at for at, (a, b) in enumerate(zip_longest(before, now)) if a != b)
    return found or f"the same values are written differently from byte {at} on"


def _dump(record: Mapping[str, Any]) -> bytes:
    return dump_record({key: value for key, value in record.items() if key != "eval"})


def _strip(record: Mapping[str, Any]) -> Any:
    """The response body or the error, whose paths are short; then what else there is."""
    response = record["response"]
    body = response.get("body") if isinstance(response, Mapping) else None
    found = body if record["error"] is None and isinstance(body, Mapping) else {}
    # Ids are made of the settings, so they differ wherever something else does.
    rest = {key: value for key, value in record.items() if key != "eval"}
    return {**{key: value for key, value in found.items() if key != "id"}, "record": rest}


def _walk(old: Any, new: Any, path: str) -> Iterator[str]:
    """Each difference in two JSON values, in order."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            yield from _walk(old.get(key, _MISSING), new.get(key, _MISSING), f"{path}.{key}" if path else key)
    elif isinstance(old, list) and isinstance(new, list):
        for at, (a, b) in enumerate(zip_longest(old, new, fillvalue=_MISSING)):
            yield from _walk(a, b, f"{path}[{at}]")
    elif isinstance(old, str) and isinstance(new, str) and old != new:
        at = next(at for at, (a, b) in enumerate(zip_longest(old, new)) if a != b)
        yield f"{path} differs from character {at} on: {_quote(new, at)}, was {_quote(old, at)}"
    elif type(old) is not type(new) or old != new:
        yield f"{path} is {_show(new)}, was {_show(old)}"


def _quote(text: str, at: int) -> str:
    start, end = max(0, at - _AROUND), at + _AROUND
    return ("..." if start else "") + repr(text[start:end]) + ("..." if end < len(text) else "")


def _show(value: Any) -> str:
    if value is _MISSING:
        return "missing"
    text = repr(value)
    return text if len(text) <= 3 * _AROUND else text[: 3 * _AROUND] + "..."
