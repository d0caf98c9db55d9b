"""The messages between driver and workers, as plain data that can be pickled, and the check of workers.

`PROTOCOL` changes with the messages: a driver and a worker of different numbers do not understand each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlxrun.core.errors import EngineDead, MlxrunError
from mlxrun.jobs.lines.job_file import JobLine
from mlxrun.jobs.records.manifest_checks import RunEnvironment

PROTOCOL = 1


class WorkerDied(Exception):
    """A worker answers no more. `blameless`: no line can be the cause, as its whole machine is gone."""

    def __init__(self, reason: str, *, blameless: bool = False) -> None:
        super().__init__(reason)
        self.blameless = blameless


class WorkerRefused(MlxrunError):
    """A worker cannot be used, or would compute other answers than the others."""

    exit_code = 2


class RayEnded(EngineDead):
    """Ray has ended, and all workers with it: none can be started any more."""


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The identity of a worker. `rows`: lines that it computes at once; `most`: lines that it should have at
    once. `settings`: digest of all that changes answers, its model's digests included; `visible`: its
    devices, as in CUDA_VISIBLE_DEVICES; `shares_folder`: whether it sees the job's folder."""

    host: str
    node: str
    process: int
    protocol: int
    versions: Mapping[str, str]
    device: Mapping[str, Any]
    model: str
    settings: str
    rows: int
    most: int
    visible: str = ""
    shares_folder: bool = True


@dataclass(frozen=True, slots=True)
class SentLine:
    """A line on its way to a worker. `number`: the number of this sending; a line that is sent again gets
    another one. `partial`: the records of its partial answers."""

    number: int
    line: JobLine
    key: str
    partial: bytes = b""


@dataclass(frozen=True, slots=True)
class LineCounts:
    """The tokens of one line on one worker: prompt tokens computed and reused, and output tokens."""

    computed: int = 0
    reused: int = 0
    output: int = 0


@dataclass(frozen=True, slots=True)
class LineResult:
    """The response body of a line, or the error in its place. `took`: seconds that the worker had it;
    `computed`, `answered`: seconds until its first prompt tokens and its first output token, None if there
    were none."""

    number: int
    body: dict[str, Any] | None
    error: MlxrunError | None
    counts: LineCounts
    took: float = 0.0
    computed: float | None = None
    answered: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker did since its last report. `running`: counts of running lines; `partial`: records of
    their answers; `prompts`: prompt tokens and max_tokens of prepared lines; `counters`: those of its prefix
    cache; `dead`: why its engine has stopped."""

    finished: Sequence[LineResult] = ()
    running: Mapping[int, LineCounts] = field(default_factory=dict)
    partial: bytes = b""
    prompts: Sequence[tuple[int, int]] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    dead: str | None = None


class Worker(Protocol):
    """One worker as the dispatcher sees it. Each method raises WorkerDied once the worker is gone."""

    async def start(self) -> WorkerFacts:
        """Load the model. WorkerRefused if the worker must not be used; MlxrunError if no worker could load
        it."""

    async def submit(self, lines: Sequence[SentLine]) -> None:
        """Hand lines over."""

    async def poll(self) -> WorkerReport:
        """Wait for a report, but not longer than a second or so."""

    async def withdraw(self, count: int) -> Sequence[int]:
        """Give back up to `count` lines that were not begun, and return their numbers."""

    async def close(self) -> None:
        """Stop the worker. This raises nothing."""


def check_worker(facts: WorkerFacts, first: WorkerFacts, *, mixed: bool) -> list[str]:
    """Return the differences between a worker and the first one that `mixed` allows. WorkerRefused if the
    worker must not be used. A worker with another model or other settings is always refused: its answers
    would be kept under this model's keys."""
    where = f"{facts.host} (process {facts.process})"
    if facts.protocol != PROTOCOL:
        raise WorkerRefused(
            f"{where} has another version of mlxrun, which speaks protocol {facts.protocol} and not "
            f"{PROTOCOL}; install the same version on all machines"
        )
    if facts.model != first.model:
        raise WorkerRefused(f"{where} has other files in the model's folder; copy the same model to it")
    if facts.settings != first.settings:
        raise WorkerRefused(
            f"{where} has other settings that change answers; remove them from workers.overrides, and see "
            "that the tokenizer and the chat template are the same there"
        )
    here, there = (RunEnvironment(each.versions, each.device) for each in (first, facts))
    found = here.list_obstacles(there)
    if found and not mixed:
        raise WorkerRefused(
            f"{where} differs from the driver or the first worker: {'; '.join(found)}. Install the same "
            "versions on machines with the same device, or accept it with --mixed"
        )
    return found
