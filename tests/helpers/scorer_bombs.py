"""Scorers that take forever, a few kilobytes each; and limits with which tests of them are fast."""

from __future__ import annotations

from typing import Any

import pytest

from mlxrun.scoring import limited_calls
from mlxrun.scoring.scorer_process import ScorerLimits, ScorerPool

LEVELS = 40


def make_bomb_schema(levels: int = LEVELS) -> dict[str, Any]:
    """A schema that is checked 2 ** levels times."""
    defs: dict[str, Any] = {
        f"l{level}": {"allOf": [{"$ref": f"#/$defs/l{level + 1}"}] * 2} for level in range(levels)
    }
    return {"type": "object", "$ref": "#/$defs/l0", "$defs": {**defs, f"l{levels}": {"type": "object"}}}


def set_limits(patch: pytest.MonkeyPatch, seconds: float, memory: int = 1_000_000_000) -> ScorerPool:
    """Replace the limits of mlxrun's own scorers."""
    pool = ScorerPool(ScorerLimits(seconds, memory))
    patch.setattr(limited_calls, "OWN", pool)
    return pool
