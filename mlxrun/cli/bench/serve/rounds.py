"""The plan of `mlxrun bench serve`, the result of a round, and the measures of a workload."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlxrun.cli.bench.serve.streaming_client import LoadPattern, Target
from mlxrun.cli.bench.serve.workloads import PromptSize

Values = dict[str, float | None]


@dataclass(frozen=True, slots=True)
class ServeMeasure:
    """One number of a round: its label and unit, and whether more is better (None: neither is)."""

    title: str
    unit: str
    more: bool | None = False


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What to send to which servers."""

    targets: tuple[Target, ...]
    workloads: tuple[str, ...]
    size: PromptSize
    requests: int
    load: LoadPattern
    repeat: int = 3


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The numbers of one round, one for each measure of its workload (seconds, tokens, shares), and its
    errors."""

    numbers: Values
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """How a workload is measured.

    `run_round` sends one round to one server; its last argument seeds the words. `settings` are those that
    the workload uses, by their names on the command line; `describe` says in words what was sent, from the
    report's settings; `headline` is the measure that progress shows.
    """

    measures: Mapping[str, ServeMeasure]
    run_round: Callable[[Target, ServePlan, str], Awaitable[RoundResult]]
    settings: frozenset[str]
    describe: Callable[[Mapping[str, Any]], str]
    headline: str
