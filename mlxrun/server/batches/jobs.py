"""What is said of a batch, and who runs its job, as the server sees it. mlxrun.batch.job_service runs jobs;
cli/serve.py joins the two, as server and batch know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

OVER = ("completed", "failed", "expired", "cancelled")


class Counted(Protocol):
    """How many lines there are, were answered, and failed."""

    @property
    def total(self) -> int: ...
    @property
    def done(self) -> int: ...
    @property
    def failed(self) -> int: ...


class Problem(Protocol):
    """Why a line cannot be run."""

    @property
    def line(self) -> int: ...
    @property
    def code(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def param(self) -> str | None: ...


class Checked(Protocol):
    """What a file holds: lines, and the first of its problems."""

    @property
    def total(self) -> int: ...
    @property
    def problems(self) -> Sequence[Problem]: ...


class JobFiles(Protocol):
    """What a job leaves; any of them may not be there."""

    @property
    def output(self) -> Path: ...
    @property
    def errors(self) -> Path: ...
    @property
    def manifest(self) -> Path: ...


class Jobs(Protocol):
    """Runs job files; one call a file at a time."""

    async def check(self, path: Path, url: str) -> Checked:
        """Look at every line; all are to be for `url`."""
        ...

    async def run(self, path: Path, told: Callable[[Counted], None]) -> Counted:
        """Run what is left. Cancelling keeps what is finished; EngineDead, or JobError if a file cannot be
        written: the next call goes on."""
        ...

    async def settle(self, path: Path) -> Counted:
        """Run nothing more; make what a kill may have torn whole."""
        ...

    def files(self, path: Path) -> JobFiles:
        """Where the answers are."""
        ...


@dataclass(slots=True)
class Batch:
    """One batch as OpenAI describes it; times are seconds since 1970. `owner`: name of the API key."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    owner: str = ""
    metadata: dict[str, str] | None = None
    status: str = "validating"
    errors: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: dict[str, int] = field(default_factory=lambda: {"total": 0, "completed": 0, "failed": 0})

    @property
    def over(self) -> bool:
        return self.status in OVER

    def body(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        found = {name: value for name, value in asdict(self).items() if name != "owner"}
        return {"object": "batch", **found}

    def summary(self) -> dict[str, Any]:
        """How far it is, for /v1/status."""
        counts = self.request_counts
        found = {"id": self.id, "done": counts["completed"]}
        return found | {name: counts[name] for name in ("failed", "total")}

    @property
    def tally(self) -> str:
        """The same, for the log."""
        return "{completed} of {total} lines done, {failed} failed".format(**self.request_counts)

    def count(self, counts: Counted) -> None:
        self.request_counts = {"total": counts.total, "completed": counts.done, "failed": counts.failed}

    def refuse(self, problems: Sequence[Mapping[str, Any]], now: int) -> None:
        """It has failed, and why."""
        self.errors = {"object": "list", "data": list(problems)}
        self.status, self.failed_at = "failed", now
