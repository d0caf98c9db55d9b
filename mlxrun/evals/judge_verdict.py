"""Reads the verdict in a judge's answer, and turns it into a score from 0 to 1."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mlxrun.core.field_errors import suggest
from mlxrun.jobs.scoring.answer_values import (
    MISSING,
    check_schema,
    find_json,
    find_last_number,
    find_schema_problem,
)
from mlxrun.jobs.scoring.letter_choice import find_letters, find_texts, normalize_option
from mlxrun.jobs.scoring.line_scores import OWN

Problem = tuple[tuple[str, ...], str]  # the path of a value in a judge, and what is wrong with it
_KEYS = ("choices", "number", "json", "schema", "after")
_NUMBER = r"[-+]?\d+(?:\.\d+)?"
_RATING = re.compile(rf"\[\[\s*({_NUMBER})\s*\]\]")  # as MT-bench's judges write it


class VerdictError(Exception):
    """A judge's answer has no readable verdict; the text says why."""


@dataclass(frozen=True, slots=True)
class VerdictReader:
    """Reads verdicts. `choices`: the score of each word or letter; `low`, `high`: the ends of a scale of
    numbers; `json`: the field of the answer's object with the choice or number; `after`: the verdict stands
    behind its last occurrence."""

    choices: Mapping[str, float] = field(default_factory=dict)
    low: float = 0.0
    high: float = 1.0
    json: str | None = None
    schema: Mapping[str, Any] | None = None
    after: str | None = None

    def read(self, answer: str) -> tuple[float, Any]:
        """Return the score, and the verdict as the judge gave it. VerdictError if there is none."""
        if self.after is not None:
            if self.after not in answer:
                raise VerdictError(f"its answer has no {self.after!r}")
            answer = answer.rpartition(self.after)[2]
        value = self._read_field(answer) if self.json is not None else self._read_text(answer)
        return self._compute_score(value), value

    def _read_field(self, answer: str) -> Any:
        found = find_json(answer, containers_only=True)
        if found is MISSING or not isinstance(found, dict):
            raise VerdictError("its answer has no JSON object")
        try:
            problem = None if self.schema is None else find_schema_problem(self.schema, found)
        except (TimeoutError, ValueError) as error:
            problem = str(error)
        if problem is not None:
            raise VerdictError(f"its answer does not fit verdict.schema: {problem}")
        if self.json not in found:
            raise VerdictError(f"its JSON object has no {self.json!r}")
        return found[self.json]

    def _read_text(self, answer: str) -> Any:
        if not self.choices:
            return self._find_number(answer)
        if all(len(name) == 1 and "A" <= name <= "Z" for name in self.choices):
            found = find_letters(answer)
            found = [letter for letter in found if letter in self.choices]
        else:
            found = self._find_words(answer)
        if len(found) != 1:
            several = f"several of them: {', '.join(found)}" if found else "none of them"
            raise VerdictError(
                f"it was to choose one of {', '.join(self.choices)}, and its answer has {several}"
            )
        return found[0]

    def _find_words(self, answer: str) -> list[str]:
        """The choices in the answer's last line that has any. A choice within another one does not count."""
        names = {normalize_option(name): name for name in reversed([*self.choices])}
        found = (sorted(find_texts(line, names)) for line in reversed(answer.splitlines()))
        return next(filter(None, found), [])

    def _find_number(self, answer: str) -> float:
        """A number such as "[[8]]", else that of "8/10" or "8 out of 10", else the last one."""
        high = re.escape(f"{self.high:g}")
        of_scale = re.findall(rf"({_NUMBER})\s*(?:/|out of)\s*{high}(?![\d.]\d|\d)", answer)
        found = _RATING.findall(answer) or of_scale
        number = float(found[-1]) if found else find_last_number(answer)
        if number is None:
            raise VerdictError("its answer has no number")
        return number

    def _compute_score(self, value: Any) -> float:
        if self.choices:
            if not isinstance(value, str) or value not in self.choices:
                raise VerdictError(f"its verdict {value!r:.100} is none of {', '.join(self.choices)}")
            return self.choices[value]
        if isinstance(value, bool):
            return float(value)
        if not isinstance(value, int | float) or not self.low <= value <= self.high:
            raise VerdictError(f"its verdict {value!r:.100} is no number from {self.low:g} to {self.high:g}")
        return (value - self.low) / (self.high - self.low)


def read_limited(reader: VerdictReader, answer: str) -> tuple[float, Any]:
    """Call `reader.read` in a process with limits. ScorerEnded if it takes too much time or memory."""
    score, value, problem = OWN.call(f"{__name__}:read_fields", asdict(reader), answer)
    if problem is not None:
        raise VerdictError(problem)
    return score, value


def read_fields(fields: Mapping[str, Any], answer: str) -> tuple[float, Any, str | None]:
    """Read a verdict in the child, for `read_limited`."""
    try:
        return *VerdictReader(**fields).read(answer), None
    except VerdictError as error:
        return 0.0, None, str(error)


def find_verdict_problems(value: Any) -> Iterator[Problem]:
    """Yield what is wrong with the `verdict` of a judge."""
    if not isinstance(value, dict) or not value:
        yield ("verdict",), "verdict must be an object with choices, number or json"
        return
    for key in value:
        if key not in _KEYS:
            hint = suggest(key, _KEYS)
            text = f"verdict.{key} is not known{hint}; verdict takes {', '.join(_KEYS)}"
            yield ("verdict", str(key)), text
    if "choices" in value and "number" in value:
        yield ("verdict",), "verdict takes one of choices and number"
    if not value.keys() & {"choices", "number", "json"}:
        yield ("verdict",), "verdict needs choices, number or json"
    if "schema" in value and "json" not in value:
        yield ("verdict", "schema"), "verdict.schema needs verdict.json, the field with the verdict"
    for key in ("json", "after"):
        if key in value and (not isinstance(value[key], str) or not value[key]):
            yield ("verdict", key), f"verdict.{key} must be a string that is not empty"
    if "schema" in value:
        try:
            check_schema(value["schema"])
        except ValueError as error:
            yield ("verdict", "schema"), f"verdict.schema {error}"
    if "choices" in value:
        yield from _find_choice_problems(value["choices"])
    if "number" in value:
        yield from _find_scale_problems(value["number"])


def _find_choice_problems(value: Any) -> Iterator[Problem]:
    steps = ("verdict", "choices")
    if not isinstance(value, dict) or not value:
        yield steps, "verdict.choices must be an object with the score of each choice"
        return
    if len(value) < 2:
        yield steps, f"verdict.choices has {next(iter(value))!r} alone; a judge needs two choices or more"
    for key, score in value.items():
        if not _is_number(score) or not 0 <= score <= 1:
            yield (*steps, str(key)), f"verdict.choices.{key} must be a score from 0 to 1, not {score!r}"
        if not normalize_option(key):
            yield steps, "verdict.choices has an empty choice"


def _find_scale_problems(value: Any) -> Iterator[Problem]:
    steps = ("verdict", "number")
    if not isinstance(value, dict) or value.keys() - {"min", "max"}:
        yield steps, "verdict.number must be an object with min and max"
        return
    low, high = value.get("min", 0), value.get("max", 1)
    if not _is_number(low) or not _is_number(high) or not low < high:
        yield steps, "verdict.number needs numbers, and min below max"


def build_reader(value: Mapping[str, Any]) -> VerdictReader:
    """Build the reader of a valid `verdict`. A scale without ends is from 0 to 1."""
    scale = value.get("number", {})
    low, high = float(scale.get("min", 0)), float(scale.get("max", 1))
    choices = {str(key): float(score) for key, score in value.get("choices", {}).items()}
    return VerdictReader(choices, low, high, value.get("json"), value.get("schema"), value.get("after"))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
