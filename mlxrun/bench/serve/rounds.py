"""What the workloads of `mlxrun bench serve` share: the plan, a round, and how one is measured."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxrun.bench.serve.streaming_client import Load, Target
from mlxrun.bench.serve.workloads import Size

Values = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class ServeMeasure:
    """One number of a round: how it is shown, and whether more of it is better (None: neither is)."""

    title: str
    unit: str
    more: bool | None = False


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What to send, and to whom."""

    targets: tuple[Target, ...]
    workloads: tuple[str, ...]
    size: Size
    requests: int
    load: Load
    repeat: int = 3


@dataclass(frozen=True, slots=True)
class Round:
    """The numbers of one round, one for each measure of its workload (seconds, tokens, shares), and what
    went wrong in it."""

    numbers: Values
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """How a workload is measured.

    `run` sends one round to one server; its last argument seeds the words. `takes` are the settings, by their
    names on the command line, that mean something to it; `note` says in words what was sent, from the
    report's settings; `headline` is the measure that progress shows.
    """

    measures: Mapping[str, ServeMeasure]
    run: Callable[[Target, ServePlan, str], Awaitable[Round]]
    takes: frozenset[str]
    note: Callable[[Mapping[str, Any]], str]
    headline: str


def percentile(values: Sequence[float], share: int) -> float:
    """The value below which `share` per cent lie: the nearest one, never between two."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)]
