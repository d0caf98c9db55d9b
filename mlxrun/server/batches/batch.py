"""One batch of either API, as the server stores it and as OpenAI's API describes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlxrun.jobs.run.job_service import BatchStamp, JobCounts, LineProblem

FINAL_STATUSES = ("completed", "failed", "expired", "cancelled")
STATUSES = ("validating", "in_progress", "finalizing", "cancelling", *FINAL_STATUSES)
COUNTS = ("total", "completed", "failed")
_OWN_FIELDS = ("owner", "is_message_batch", "output_expires_after")  # which no API shows


@dataclass(slots=True)
class Batch:
    """Times are seconds since 1970. `owner`: name of the API key that created it, empty without keys.

    `is_message_batch`: made by Anthropic's API. Then there is no input file, and `output_file_id` is the file
    of its results. `output_expires_after`: seconds from the end until its files expire, None: never.
    """

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
    is_message_batch: bool = False
    output_expires_after: int | None = None
    request_counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))

    @property
    def is_whole(self) -> bool:
        """Whether its status and counts are such that there are; not of a document that was damaged."""
        return self.status in STATUSES and self.request_counts.keys() == {*COUNTS}

    @property
    def ended(self) -> bool:
        return self.status in FINAL_STATUSES

    @property
    def stamp(self) -> BatchStamp:
        """What its answers have and those of other batches do not."""
        return BatchStamp(self.id, self.created_at)

    def describe(self) -> dict[str, Any]:
        """OpenAI's batch object."""
        found = asdict(self)
        return {"object": "batch", **{name: found[name] for name in found if name not in _OWN_FIELDS}}

    @property
    def ended_at(self) -> int | None:
        """When it ended; None if it has not."""
        return self.completed_at or self.failed_at or self.expired_at or self.cancelled_at

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
