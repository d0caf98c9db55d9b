"""A batch: what OpenAI's clients see of it, and when it ended."""

from __future__ import annotations

import pytest
from openai.types import Batch as OpenAIBatch

from mlxrun.jobs.run.job_service import JobCounts, LineProblem
from mlxrun.server.batches.batch import FINAL_STATUSES, Batch


def make_batch(**more: object) -> Batch:
    return Batch("batch_1", "/v1/responses", "file-1", "24h", 1, 2, **more)  # type: ignore[arg-type]


def test_what_clients_see() -> None:
    """OpenAI's fields and no others."""
    found = make_batch(owner="ann", metadata={"a": "b"}, output_expires_after=3600).describe()
    assert found["object"] == "batch" and found["metadata"] == {"a": "b"}
    assert found.keys() <= OpenAIBatch.model_fields.keys()
    OpenAIBatch.model_validate(found, strict=True)


@pytest.mark.parametrize("status", FINAL_STATUSES)
def test_when_it_ended(status: str) -> None:
    batch = make_batch()
    assert batch.ended_at is None and not batch.ended
    setattr(batch, f"{status}_at", 7)
    batch.status = status
    assert batch.ended_at == 7 and batch.ended


def test_the_stamp() -> None:
    """It does not change while the batch does."""
    batch = make_batch()
    stamp = batch.stamp
    assert (stamp.batch_id, stamp.created_at) == (batch.id, batch.created_at)
    batch.status, batch.in_progress_at = "in_progress", batch.created_at + 5
    assert batch.stamp == stamp


def test_counts_and_problems() -> None:
    batch = make_batch()
    batch.set_counts(JobCounts(5, 3, 1))
    assert batch.request_counts == {"total": 5, "completed": 3, "failed": 1}
    assert batch.format_counts() == "3 of 5 lines done, 1 failed"
    assert batch.describe_progress() == {"id": "batch_1", "done": 3, "failed": 1, "total": 5}
    batch.fail([LineProblem("invalid_line", "not JSON", 3)], 9)
    assert (batch.status, batch.failed_at) == ("failed", 9)
    problem = {"code": "invalid_line", "message": "not JSON", "line": 3, "param": None}
    assert batch.errors == {"object": "list", "data": [problem]}
