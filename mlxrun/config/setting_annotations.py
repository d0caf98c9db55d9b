"""Annotations of settings: what is said about them besides their type."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """Inclusive bounds of a number; None: no bound."""

    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Bytes:
    """Marks an int field that also accepts a string with a unit. kB, MB, GB are powers of 1000; KiB, MiB, GiB
    are powers of 1024."""


@dataclass(frozen=True, slots=True)
class Secret:
    """Marks a mapping whose values are never printed and must come from variables (`${NAME}`)."""
