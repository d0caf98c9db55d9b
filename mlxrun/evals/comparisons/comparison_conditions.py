"""The conditions of `--fail-if`, such as `score < 0.8` or `regression`, which make a comparison fail."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from mlxrun.core.errors import JobError
from mlxrun.evals.comparisons.compared_group import ComparedGroup
from mlxrun.evals.comparisons.comparison import Comparison

_VALUES: dict[str, Callable[[ComparedGroup], float]] = {
    "score": lambda group: group.result.second,
    "difference": lambda group: group.result.difference,
    "flips": lambda group: group.better + group.worse,
    "better": lambda group: group.better,
    "worse": lambda group: group.worse,
    "failed": lambda group: group.failed,
    "unscored": lambda group: group.unscored,
    "p": lambda group: group.adjusted_p,
}
_SHARES = ("score", "difference", "p")  # values that may be given in percent or points
_WORDS: dict[str, Callable[[ComparedGroup], bool]] = {
    "regression": lambda group: group.is_significant and group.gain < 0,
    "different": lambda group: group.is_significant,
    "equivalent": lambda group: group.equivalence is not None and group.equivalence.is_shown,
}
_OPERATORS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)\s*(%|points?)?"
_COMPARED = re.compile(rf"(\w+)\s*(<=|>=|==|!=|<|>)\s*{_NUMBER}")
_STATED = re.compile(r"(not\s+)?(\w+)")
ALLOWED = (
    f"a value ({', '.join(_VALUES)}), one of {' '.join(_OPERATORS)}, and a number (0.8, 80 % or -2 points); "
    f"or one of {', '.join(_WORDS)}, with or without `not` before it; each may end in `in GROUP`, or for "
    "suites in `in MODEL/TASK` or `in MODEL/TASK:GROUP`, where * stands for any text"
)


@dataclass(frozen=True, slots=True)
class FailCondition:
    """A parsed condition. `group`: the only group in which it is checked, None for all lines together;
    `cell`: a pattern of the names of the cells in which it is checked, None for all cells."""

    text: str
    holds: Callable[[ComparedGroup], bool]
    describe_value: Callable[[ComparedGroup], str]
    group: str | None
    needs_margin: bool
    cell: str | None = None

    def find_reasons(self, comparisons: Sequence[Comparison]) -> Iterator[str]:
        """Yield a sentence for each comparison in which the condition holds. JobError if there is no such
        cell, or if no cell has its group."""
        found, cells = 0, [each for each in comparisons if self._is_of(each.cell.name)]
        if not cells:
            names = ", ".join(each.cell.name for each in comparisons).strip() or "these are two runs"
            raise JobError(f"--fail-if {self.text!r}: there is no cell {self.cell!r} (cells: {names})")
        for comparison in cells:
            for group in comparison.groups if self.group is not None else [comparison.total]:
                if self.group in (None, group.name):
                    found += 1
                    if self.holds(group):
                        where = f"{comparison.cell.name}: " if comparison.cell.name else ""
                        yield f"{where}{self.text}: {self.describe_value(group)}"
        if not found:
            known = sorted({group.name for comparison in cells for group in comparison.groups})
            names = ", ".join(known) or "all lines are in one"
            raise JobError(f"--fail-if {self.text!r}: there is no group {self.group!r} (groups: {names})")

    def _is_of(self, name: str) -> bool:
        # The names of two models' cells have no model, so `*/sums` has to find `sums`.
        return self.cell is None or any(fnmatchcase(each, self.cell) for each in (name, name and f"/{name}"))


def parse_condition(text: str) -> FailCondition:
    """Parse a condition. ValueError says what is allowed."""
    body, _, place = (part.strip() for part in text.partition(" in "))
    cell, group = _parse_place(place)
    if match := _COMPARED.fullmatch(body):
        return replace(_parse_comparison(text, match, group), cell=cell)
    match = _STATED.fullmatch(body)
    if match is None or match[2] not in _WORDS:
        raise ValueError(f"{text!r} is no condition; a condition is {ALLOWED}")
    is_true, wanted, word = _WORDS[match[2]], match[1] is None, match[2]

    def describe(group: ComparedGroup) -> str:
        measure, difference = group.measure, group.result.difference
        if word == "equivalent" and group.equivalence is not None:
            bounds = group.equivalence.interval
            low, high = (measure.format_number(bound, group.result.first, "+") for bound in bounds)
            return f"the 90 % interval of the difference is {low} to {high} {measure.points}".rstrip()
        text = f"{measure.format_number(difference, group.result.first, '+')} {measure.points}".rstrip()
        return f"the score changed by {text} (p = {group.adjusted_p:.2g})"

    needs_margin = word == "equivalent"
    return FailCondition(text, lambda each: is_true(each) is wanted, describe, group, needs_margin, cell)


def _parse_place(place: str) -> tuple[str | None, str | None]:
    """The cell and the group of what is behind `in`. A group with a slash is given with its cell: `*:a/b`."""
    if "/" not in place and not place.startswith("*"):
        return None, place or None
    cell, _, group = (part.strip() for part in place.partition(":"))
    return cell, group or None


def _parse_comparison(text: str, match: re.Match[str], group: str | None) -> FailCondition:
    name, sign, number, unit = match.groups()
    if name not in _VALUES:
        raise ValueError(f"{text!r}: {name!r} is no value; a condition is {ALLOWED}")
    if unit and name not in _SHARES:
        raise ValueError(f"{text!r}: {name} is a number of lines, without {unit}")
    read, compare = _VALUES[name], _OPERATORS[sign]
    limit = float(number) / (100 if unit else 1)

    def describe(group: ComparedGroup) -> str:
        value = read(group)
        return f"{name} is {value:.4g}"

    def holds(group: ComparedGroup) -> bool:
        is_share = name == "p" or group.measure.is_share
        if name in _SHARES and is_share and abs(limit) > 1:
            raise JobError(
                f"--fail-if {text!r}: {name} is never beyond 1; for percent or points, write {number} %"
            )
        if unit and not is_share:
            raise JobError(
                f"--fail-if {text!r}: {name} is in {group.measure.points or 'no unit'}, not in {unit}"
            )
        return bool(compare(read(group), limit))

    return FailCondition(text, holds, describe, group, False)
