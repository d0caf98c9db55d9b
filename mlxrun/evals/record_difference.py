"""Says where the records of two runs of a line begin to differ.

The result of scoring (`eval`) is not compared: it follows from the answer, and can be computed without the
model. Neither is the name of the model, which its digest identifies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

from mlxrun.jobs.records.output_records import dump_record

_AROUND = 20  # characters that are shown before and after the first one that differs
_MISSING = object()


def find_difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str | None:
    """Describe where the bytes of two records begin to differ. None if they are equal."""
    old, new = _leave_out(old), _leave_out(new)
    before, now = dump_record(old), dump_record(new)
    if before == now:
        return None
    if old["error"] is None and new["error"] is not None:
        return f"it was answered, and fails now: {new['error']['message']}"
    if old["error"] is not None and new["error"] is None:
        return f"it is answered now, and failed before: {old['error']['message']}"
    found = next(_walk(_strip(old), _strip(new), ""), None)
    at = next(at for at, (a, b) in enumerate(zip_longest(before, now)) if a != b)
    return found or f"the same values are written differently from byte {at} on"


def _leave_out(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record without what is not compared."""
    found = {key: value for key, value in record.items() if key != "eval"}
    body = (record["response"] or {}).get("body")
    if isinstance(body, Mapping):
        body = {key: value for key, value in body.items() if key != "model"}
        found["response"] = {**record["response"], "body": body}
    return found


def _strip(record: Mapping[str, Any]) -> Any:
    """What was said with tools, the response body or the error, whose paths are short; then what else there
    is."""
    response = record["response"]
    body = response.get("body") if isinstance(response, Mapping) else None
    found = body if record["error"] is None and isinstance(body, Mapping) else {}
    # Ids are made of the settings, so they differ wherever something else does.
    rest = {key: value for key, value in found.items() if key != "id"}
    return {"transcript": record.get("transcript"), **rest, "record": record}


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
