"""What a template may compute: steps, bytes of texts and lists, and processor time of its thread.

An operation is measured before it runs, so that it never makes or walks a value that is too large.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2.utils import Namespace

BASE_BYTES = 1 << 26  # that a template may make of nothing
BYTES_PER_CHARACTER = 200  # that it may make more for each character that it is given
STEP_BYTES = 32  # what a step counts as: 2 million steps
CPU_SECONDS = 5.0
CHECKED_BYTES = 1 << 13  # the clock is read each time so many are counted
MAX_BITS = 100_000  # of an integer
ITEM_BYTES = 8
_VIEWS: tuple[type[Any], ...] = (type({}.keys()), type({}.values()), type({}.items()))
CONTAINERS: tuple[type[Any], ...] = (list, tuple, set, frozenset, dict, range, *_VIEWS)
_NUMBER = re.compile(r"\d{4,}")
_NESTED_FIELD = re.compile(r"[:!.\[][^{}]*\{")  # of str.format: a width may be an argument
# Filters and tests that look at the items of a value, and not into them.
SHALLOW = frozenset(
    ("length", "count", "first", "last", "list", "map", "select", "reject", "selectattr", "rejectattr")
    + ("items", "default", "d", "attr", "random")
)
# Tests that walk through both of their values; the others look at the type of one.
WALKING = frozenset(
    ("eq", "equalto", "==", "ne", "!=", "lt", "lessthan", "<", "le", "<=")
    + ("gt", "greaterthan", ">", "ge", ">=", "in", "lower", "upper")
)
# Filters and methods with a number that says how much is made.
_WIDTHS = frozenset(("center", "ljust", "rjust", "zfill", "indent", "batch", "slice", "tojson", "truncate"))


class TemplateLimitError(Exception):
    """A template does more than it may."""


class WorkBudget:
    """What is left of one rendering's budget. `characters`: of the messages. `share`: the part of the whole
    budget, 0 to 1."""

    def __init__(self, characters: int = 0, share: float = 1.0) -> None:
        self._left = int((BASE_BYTES + characters * BYTES_PER_CHARACTER) * share)
        self._deadline = time.thread_time() + CPU_SECONDS * share
        self._next_check = max(0, self._left - CHECKED_BYTES)

    def tick(self) -> None:
        """Count a step. TemplateLimitError if the budget is spent."""
        self._left -= STEP_BYTES
        if self._left < self._next_check:
            self.check_time()

    def spend(self, size: int) -> None:
        """Count a step and `size` bytes. TemplateLimitError if the budget is spent."""
        self._left -= size + STEP_BYTES
        if self._left < self._next_check:
            self.check_time()

    def check_time(self) -> None:
        """Raise TemplateLimitError if bytes or processor time are spent, and set when to look again."""
        if self._left < 0:
            raise TemplateLimitError("it loops or grows beyond what a template may compute")
        if time.thread_time() > self._deadline:
            raise TemplateLimitError("it takes more processor time than a template may")
        self._next_check = max(0, self._left - CHECKED_BYTES)

    def measure(self, value: Any, *, numbers: bool = False) -> int:
        """Estimate the bytes of a value as it would be printed. Counting stops when more than the budget is
        found. `numbers`: an integer counts as so many bytes, since it may be a width."""
        if isinstance(value, str):
            return len(value)
        size, waiting = 0, [value]
        while waiting and size <= self._left:
            item = waiting.pop()
            size += 4 * ITEM_BYTES
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, Namespace):
                waiting.append(object.__getattribute__(item, "_Namespace__attrs"))
            elif isinstance(item, CONTAINERS):
                size += ITEM_BYTES * len(item)
                if size <= self._left:
                    waiting += [*item.keys(), *item.values()] if isinstance(item, Mapping) else item
            elif numbers and isinstance(item, int):
                size += abs(item)
        return size

    def measure_operation(self, operator: str, left: Any, right: Any) -> int:
        """Estimate from above the bytes that `+`, `*`, `**` or `%` makes. TemplateLimitError for a number of
        more than MAX_BITS."""
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length()
            if bits + right.bit_length() > MAX_BITS:
                raise TemplateLimitError("it computes a number of too many digits")
            return 0
        if operator == "*":
            left, right = (right, left) if isinstance(left, int) else (left, right)
            return get_size(left) * abs(right) if isinstance(right, int) else 0
        if operator == "%" and isinstance(left, str):
            return self._measure_format(left, right, left.count("%"))
        return get_size(left) + get_size(right)

    def _measure_format(self, text: str, values: Any, fields: int) -> int:
        """At most so many bytes has a text whose fields are filled in."""
        has_widths = "*" in text or _NESTED_FIELD.search(text) is not None
        widths = sum(int(each[:12]) for each in _NUMBER.findall(text))
        return len(text) + widths + max(fields, 1) * self.measure(values, numbers=has_widths)

    def measure_method(self, text: str, name: str, more: Sequence[Any]) -> int:
        """Estimate from above the bytes that a text's method makes or reads. `more`: its arguments."""
        if name in ("format", "format_map"):
            return self._measure_format(text, list(more), text.count("{"))
        size = len(text)
        if name == "join":
            return size * len(more[0]) + self.measure(more[0]) if more else size
        if name == "replace" and len(more) >= 2:
            return size + text.count(str(more[0])) * len(str(more[1]))
        if name == "expandtabs":
            return size + text.count("\t") * self.measure(list(more) or 8, numbers=True)
        if name == "translate":
            return size * (1 + self.measure(list(more)))
        size += self.measure(list(more), numbers=name in _WIDTHS)
        return size * ITEM_BYTES if name in ("split", "rsplit", "splitlines") else size

    def measure_filter(self, name: str, value: Any, more: Sequence[Any]) -> int:
        """Estimate from above the bytes that a filter or a test makes or reads. `more`: its arguments."""
        if name in SHALLOW and not isinstance(value, str):
            return get_size(value)
        text = value if isinstance(value, str) else ""
        size = self.measure(value)
        if not more:
            return size
        if name == "format":
            return self._measure_format(text, list(more), text.count("%"))
        if name == "replace" and len(more) >= 2:
            return size + (text.count(str(more[0])) if text else size) * len(str(more[1]))
        extra = self.measure(list(more), numbers=name in _WIDTHS)
        if name == "indent":
            return size + (text.count("\n") + 1) * extra
        if name in ("join", "wordwrap"):
            return size + (len(text) or size // ITEM_BYTES) * extra
        return size + (ITEM_BYTES * extra if name in ("batch", "slice") else extra)


def get_size(value: Any) -> int:
    """Return the bytes of a value itself, without those of its items."""
    if isinstance(value, str):
        return len(value)
    return ITEM_BYTES * len(value) if isinstance(value, CONTAINERS) else 0


_current = threading.local()


@contextmanager
def apply_limits(characters: int = 0, share: float = 1.0) -> Iterator[None]:
    """Give all that this thread renders within the block one WorkBudget."""
    earlier = getattr(_current, "budget", None)
    _current.budget = WorkBudget(characters, share)
    try:
        yield
    finally:
        _current.budget = earlier


def get_budget() -> WorkBudget:
    """Return the budget of this thread's rendering; a new one outside of `apply_limits`."""
    return getattr(_current, "budget", None) or WorkBudget()
