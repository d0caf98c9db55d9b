"""The `eval` key of a job line: the expected answer, how an answer is compared with it, and the score table.

A line scores 1 or 0; a failed line scores 0. Only the first choice of a line is scored.
`json` looks for the first JSON value in the answer; for the first object or array if one is expected.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MATCHES = ("exact", "contains", "regex", "json", "number")
_NUMBER = re.compile(r"(?<![\d.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d*)?(?:[eE][-+]?\d+)?")
_MAX_STARTS = 1000  # positions at which a JSON value is searched; limits the time for "[[[[..."


@dataclass(frozen=True, slots=True)
class EvalSpec:
    """A validated `eval` object."""

    expected: Any
    match: str = "exact"
    group: str = "all"


def parse_eval(value: Any) -> EvalSpec:
    """`value` as an Eval; ValueError with the reason if it is not one."""
    if not isinstance(value, dict):
        raise ValueError(f"eval must be an object, not {type(value).__name__}")
    unknown = [key for key in value if key not in ("expected", "match", "group")]
    if unknown:
        raise ValueError(f"eval.{unknown[0]} is not known; eval takes expected, match and group")
    if "expected" not in value:
        raise ValueError("eval.expected is missing")
    group = value.get("group", "all")
    if not isinstance(group, str) or not group:
        raise ValueError("eval.group must be a string that is not empty")
    parsed = EvalSpec(value["expected"], value.get("match", "exact"), group)
    if str(parsed.match) not in MATCHES:
        raise ValueError(f"eval.match must be one of {', '.join(MATCHES)}, not {parsed.match!r}")
    _check_expected(parsed)
    return parsed


def _check_expected(wanted: EvalSpec) -> None:
    if wanted.match in ("exact", "contains", "regex") and not isinstance(wanted.expected, str):
        raise ValueError(f"eval.expected must be a string because eval.match is {wanted.match}")
    if wanted.match == "regex":
        try:
            re.compile(wanted.expected)
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"eval.expected is not a regular expression: {error}") from error
    if wanted.match == "number" and _parse_number(wanted.expected) is None:
        raise ValueError("eval.expected must be a number because eval.match is number")


def score(wanted: EvalSpec, answer: str) -> int:
    """1 if `answer` matches the expected one, else 0."""
    return int(_COMPARE[wanted.match](wanted.expected, answer))


def extract_answer(body: Mapping[str, Any]) -> str:
    """The text of a response body that is scored: the first choice's content, and each of its tool calls as
    an object `{"name", "arguments"}` on a line. Reasoning is not scored."""
    choice = body["choices"][0]
    message = choice.get("message") or {}
    text = message.get("content") if message else choice.get("text")
    calls = [
        json.dumps(_parse_arguments(call), ensure_ascii=False) for call in message.get("tool_calls") or ()
    ]
    return "\n".join([text, *calls] if isinstance(text, str) else calls)


def _parse_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:  # the answer ended within the call
        arguments = function["arguments"]
    return {"name": function["name"], "arguments": arguments}


def _match_json(expected: Any, answer: str) -> bool:
    decoder = json.JSONDecoder()
    starts = r"[\[{]" if isinstance(expected, dict | list) else r"[\[{\"\-\dtfn]"
    for count, start in enumerate(re.finditer(starts, answer)):
        if count == _MAX_STARTS:
            break
        try:
            found, _ = decoder.raw_decode(answer, start.start())
        except (ValueError, RecursionError):
            continue
        return _is_equal(found, expected)
    return False


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two values are equal as JSON: 1 is 1.0 but not true."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b
    return type(a) is type(b) and bool(a == b)


def _match_number(expected: Any, answer: str) -> bool:
    found = [m.group() for m in _NUMBER.finditer(answer.replace("\N{MINUS SIGN}", "-"))]
    wanted = _parse_number(expected)
    got = _parse_number(found[-1]) if found else None
    return wanted is not None and got is not None and math.isclose(got, wanted, rel_tol=1e-9, abs_tol=0.0)


def _parse_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value.replace(",", "")) if isinstance(value, str) else float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


_COMPARE: dict[str, Callable[[Any, str], bool]] = {
    "exact": lambda expected, answer: expected.strip() == answer.strip(),
    "contains": lambda expected, answer: expected in answer,
    "regex": lambda expected, answer: re.search(expected, answer) is not None,
    "json": _match_json,
    "number": _match_number,
}


@dataclass(slots=True)
class ScoreGroup:
    """The scores of one group. `failed` lines count in `lines` and not in `correct`."""

    lines: int = 0
    correct: int = 0
    failed: int = 0

    @property
    def share(self) -> float:
        return self.correct / self.lines if self.lines else 0.0


class Scores:
    """The score table, built from records as they are read or written."""

    def __init__(self) -> None:
        self.groups: dict[str, ScoreGroup] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """Count an output or error record, if it has an `eval`."""
        result = record.get("eval")
        if not isinstance(result, dict):
            return
        group = self.groups.setdefault(str(result.get("group", "all")), ScoreGroup())
        group.lines += 1
        group.correct += result.get("score") == 1
        group.failed += record.get("error") is not None

    def list_rows(self) -> list[tuple[str, ScoreGroup]]:
        """The groups by name, and `total` if there are several."""
        rows = sorted(self.groups.items())
        if len(rows) > 1:
            groups = [group for _, group in rows]
            total = ScoreGroup(
                *(sum(getattr(g, name) for g in groups) for name in ("lines", "correct", "failed"))
            )
            rows.append(("total", total))
        return rows
