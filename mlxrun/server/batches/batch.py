"""One batch, as OpenAI's API describes it and as the server stores it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlxrun.batch.job_service import JobCounts, LineProblem

FINAL_STATUSES = ("completed", "failed", "expired", "cancelled")


@dataclass(slots=True)
class Batch:
    """Times are seconds since 1970. `owner`: name of the API key that created it, empty without keys."""

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
    def ended(self) -> bool:
        return self.status in FINAL_STATUSES

    def describe(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        return {"object": "batch", **{name: value for name, value in asdict(self).items() if name != "owner"}}

    def describe_progress(self) -> dict[str, Any]:
        """The progress for /v1/status."""
        counts = self.request_counts
        progress = {"id": self.id, "done": counts["completed"]}
        return progress | {name: counts[name] for name in ("failed", "total")}

    def format_counts(self) -> str:
        """The progress for the log."""
        return "{completed} of {total} lines done, {failed} failed".format(**self.request_counts)

    def set_counts(self, counts: JobCounts) -> None:
        self.request_counts = {"total": counts.total, "completed": counts.done, "failed": counts.failed}

    def fail(self, problems: Sequence[LineProblem], now: int) -> None:
        """End it as failed, with the reasons."""
        self.errors = {"object": "list", "data": [asdict(problem) for problem in problems]}
        self.status, self.failed_at = "failed", now
