"""The rules against contradictions, as the modules register them that have some."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from mlxrun.config.settings import Config

Rule = Callable[[Config], str | None]
RULES: list[tuple[tuple[str, ...], Rule]] = []

NAME = re.compile(r"[\w.-]{1,64}")  # of adapters and API keys


def reads(*keys: str) -> Callable[[Rule], Rule]:
    """Register a rule with the keys that it reads."""

    def register(rule: Rule) -> Rule:
        RULES.append((keys, rule))
        return rule

    return register


def find_changed(section: Any, keys: Sequence[str]) -> str | None:
    """The first of a section's keys whose value is not the default; None if all have theirs."""
    default = type(section)()
    return next((key for key in keys if getattr(section, key) != getattr(default, key)), None)
